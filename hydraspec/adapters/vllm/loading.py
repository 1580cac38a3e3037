"""Maps the configuration to vLLM's arguments and starts a vLLM engine with them.

vLLM reads weights only: prompts are tokenised and answers ended by code that all engines share.
Checked against vLLM 0.26. vLLM is imported by this package only, and not before it has to run.
"""

from __future__ import annotations

import gc
import os
import re
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from hydraspec.adapters.vllm import images
from hydraspec.adapters.vllm.async_engine import start_data_parallel
from hydraspec.adapters.vllm.splits import check_devices, check_sizes
from hydraspec.adapters.vllm.steps import StepStats
from hydraspec.adapters.vllm.weights import EXTENSION, LOAD_FORMAT, is_known, unequal_weights
from hydraspec.config.drafts import is_per_step
from hydraspec.config.messages import refusal
from hydraspec.config.schema import RunConfig, Verification, Weights
from hydraspec.engine.machine import GIB, pick_device
from hydraspec.models.checkpoint.config_reader import text_part
from hydraspec.models.checkpoint.quantized_tensors import check_elsewhere, read_elsewhere
from hydraspec.models.checkpoint.reader import Checkpoint, open_checkpoint, resolve_folder
from hydraspec.models.pictures.format import PictureFormat
from hydraspec.models.tokenizer import Tokenizer, load_tokenizer
from hydraspec.types import CheckpointError, ConfigurationError, UserError

OLDEST = (0, 26)
FOR_MEMORY = (
    "free device memory, lower engine.max_num_seqs or target.max_model_len, or set "
    "engine.kv_cache.memory_gib or engine.vllm.gpu_memory_utilization to what there is room for"
)
MAX_SEED = 2**32  # vLLM seeds numpy with it
MAX_REASON = 600  # characters of vLLM's own words in a message
LOAD_FORMATS = {Weights.checkpoint: "auto", Weights.random: LOAD_FORMAT}
_LINK = "For further information visit"
_CHECKED_VALUES = re.compile(r" \[type=.*")
# What vLLM raises for files that it cannot use; AttributeError: a key of config.json is missing.
WRONG_FILES = (
    *(ValueError, TypeError, RuntimeError, KeyError, OSError, AssertionError),
    *(AttributeError, ModuleNotFoundError),
)
METHODS = {  # where vLLM has another name; a folder tells it an assistant or DFlash2
    "gemma4_mtp": "mtp",
    "peagle": "eagle3",
    "dflash2": "dflash",
}


@dataclass(slots=True, kw_only=True)
class VllmParts:
    """A running vLLM engine, with its tokenizer, limits and warnings."""

    config: RunConfig
    engine: Any  # vllm.LLMEngine, or what start_data_parallel returns
    stats: StepStats | None  # None: steps are not recorded
    environment: Environment
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    max_model_len: int
    cudagraph_mode: str
    memory_bytes: dict[str, int]
    warnings: list[str]
    quantization: Mapping[str, str] | None = None  # of the target's matrices, by kind
    pictures: PictureFormat | None = None  # None: it was started for text alone


class Environment:
    """Environment variables set while the engine lives: vLLM reads most of them after import.

    Variables that the user has set are left as they are.
    """

    def __init__(self, *, one_process: bool) -> None:
        wanted = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if one_process else "1",
            # Ranks: torch has asked the driver for devices, after which a fork cannot use them.
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # results own stdout
        }
        self._added: list[str] = []
        for name, value in wanted.items():
            self.add(name, value)

    def add(self, name: str, value: str) -> None:
        """Sets a variable that is not set yet."""
        if name not in os.environ:
            os.environ[name] = value
            self._added.append(name)

    def restore(self) -> None:
        """Removes the variables that were added."""
        for name in self._added:
            os.environ.pop(name, None)
        self._added = []


def load_parts(config: RunConfig) -> VllmParts:
    """Starts vLLM with what `config` names.

    Raises:
        ConfigurationError: vLLM or a CUDA device is missing, or it cannot do what is asked.
        CheckpointError: a folder that cannot be used.
        UserError: too little device memory.
    """
    one_process = config.parallelism.data == 1
    environment = Environment(one_process=one_process)
    try:
        opened, arguments = prepare(config, environment)
        stats = StepStats() if config.engine.vllm.record_steps and one_process else None
        engine = _start(config, arguments, stats)
        return _parts(config, opened, engine, stats, environment)
    except BaseException:
        environment.restore()
        raise


def prepare(config: RunConfig, environment: Environment) -> tuple[Checkpoint, dict[str, Any]]:
    """Checks everything that can be checked before vLLM starts.

    Returns:
        The target's files, and EngineArgs' keyword arguments.

    Raises:
        ConfigurationError, CheckpointError: as `load_parts`.
    """
    if pick_device(config).type != "cuda":
        raise refusal(
            "engine.name",
            "vllm",
            "needs a CUDA device, and torch sees none",
            allowed="native, transformers",
            remedy="choose engine=native, or run where there is a GPU",
        )
    find_vllm()
    opened, drafter = open_checkpoint(config.target.checkpoint), _drafter_folder(config)
    check_sizes(config, text_part(opened.config))
    if config.target.weights is Weights.checkpoint:
        check_elsewhere(opened)
    check_devices(config)
    environment.add("HF_HUB_OFFLINE", "1")  # all checkpoints are local folders now
    if config.parallelism.pipeline_layers is not None:
        layers = ",".join(map(str, config.parallelism.pipeline_layers))
        environment.add("VLLM_PP_LAYER_PARTITION", layers)
    with _importing():
        from hydraspec.adapters.vllm import configs
    configs.register()
    form = images.picture_form(config, opened)
    arguments = engine_arguments(config, opened.folder, drafter, form)
    if config.target.weights is Weights.random and not is_known(opened):
        arguments["load_format"] = "dummy"
        del arguments["model_loader_extra_config"]
    return opened, arguments


def find_vllm() -> None:
    """Refuses a vLLM that is missing or too old, before anything is downloaded for a run."""
    with _importing():
        import vllm
    check_version(vllm.__version__)


@contextmanager
def _importing() -> Iterator[None]:
    """Context that raises ConfigurationError if vLLM cannot be imported. vLLM loads its parts late:
    any may find that a package is missing or does not fit.
    """
    try:
        yield
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise refusal(
            "engine.name",
            "vllm",
            f"needs the package vllm, which cannot be imported here ({_first_line(error)})",
            allowed="native, transformers, and vllm once it is installed",
            remedy="pip install 'vllm>=0.26' (or add it to PYTHONPATH), or choose engine=native",
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or "no reason given").splitlines()[0]


def _reason(error: Exception) -> str:
    """The message of an exception on one line, without the values that were checked and the links
    that pydantic appends to each of its reasons.
    """
    lines = [line.strip() for line in str(error).splitlines()]
    said = [_CHECKED_VALUES.sub("", x) for x in lines if x and not x.startswith(_LINK)]
    return textwrap.shorten(" ".join(said), MAX_REASON, placeholder=" …") or "no reason given"


def check_version(version: str) -> None:
    """Refuses a vLLM older than OLDEST; a version without numbers passes."""
    numbers = [part for part in version.split(".")[:2] if part.isdigit()]
    found = tuple(map(int, numbers))
    if len(found) == 2 and (0, 0) < found < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise refusal(
            "engine.name",
            "vllm",
            f"finds vLLM {version}, whose options are others",
            allowed=f"vLLM {oldest} or later",
            remedy=f"pip install 'vllm>={oldest}', or choose engine=native",
        )


def engine_arguments(
    config: RunConfig, folder: Path, drafter: Path | None, form: PictureFormat | None = None
) -> dict[str, Any]:
    """Keyword arguments of vLLM's EngineArgs. `drafter` is None where the target drafts itself, or
    nothing does, `form` where no pictures are read."""
    engine, parallelism = config.engine, config.parallelism
    memory_gib = engine.kv_cache.memory_gib
    memory = (
        {"gpu_memory_utilization": engine.vllm.gpu_memory_utilization}
        if memory_gib is None
        else {"kv_cache_memory_bytes": int(memory_gib * GIB)}
    )
    return {
        "model": str(folder),
        **_weights(config),
        **images.arguments(form),
        "generation_config": "vllm",  # requests set all sampling parameters
        "dtype": config.target.dtype.value,
        "kv_cache_dtype": engine.kv_cache.dtype.value,
        "max_model_len": config.target.max_model_len,
        "seed": config.seed % MAX_SEED,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "async_scheduling": engine.async_scheduling,
        "enable_prefix_caching": engine.prefix_caching,
        "tensor_parallel_size": parallelism.tensor,
        "pipeline_parallel_size": parallelism.pipeline,
        "data_parallel_size": parallelism.data,
        **_executor(config),
        "compilation_config": _compilation(config),
        "speculative_config": _speculation(config, drafter),
        "disable_log_stats": not engine.vllm.record_steps or parallelism.data > 1,
        **memory,
    }


def _weights(config: RunConfig) -> dict[str, Any]:
    found: dict[str, Any] = {"load_format": LOAD_FORMATS[config.target.weights]}
    if config.target.weights is Weights.random:
        found["model_loader_extra_config"] = {"seed": config.seed}
    if Weights.random in (config.target.weights, config.method.weights):
        found["worker_extension_cls"] = EXTENSION
    return found


def _executor(config: RunConfig) -> dict[str, Any]:
    """Arguments that say how processes are started; without them vLLM runs on this host."""
    options, backend = config.engine.vllm, config.engine.vllm.distributed_executor_backend
    found: dict[str, Any] = {}
    if backend is not None:
        found["distributed_executor_backend"] = backend
    if backend == "ray" and config.parallelism.data > 1:
        found["data_parallel_backend"] = "ray"
    if options.nnodes > 1:
        found["nnodes"], found["node_rank"] = options.nnodes, options.node_rank
        found["master_addr"], found["master_port"] = options.master_addr, options.master_port
    return found


def _compilation(config: RunConfig) -> dict[str, Any]:
    """vLLM's compilation arguments. cudagraph.capture_sizes count requests, vLLM's sizes the rows
    of a step: K + 1 a request.
    """
    options: dict[str, Any] = {"cudagraph_mode": config.cudagraph.name.upper()}
    sizes, method = config.cudagraph.capture_sizes, config.method
    if sizes is not None and config.cudagraph.name != "none":
        rows = 1 if method.name == "none" else method.most_drafts + 1
        options["cudagraph_capture_sizes"] = [size * rows for size in sizes]
    return options


def _speculation(config: RunConfig, drafter: Path | None) -> dict[str, Any] | None:
    method = config.method
    if method.name == "none":
        return None
    options: dict[str, Any] = {
        "method": METHODS.get(method.name, method.name),
        "num_speculative_tokens": method.most_drafts,
        "rejection_sample_method": method.verification.value,
        "draft_sample_method": method.draft_sampling.value,
    }
    if drafter is not None:
        options["model"] = str(drafter)
    if method.name == "peagle":
        options["parallel_drafting"] = True
    if is_per_step(config):
        options["enable_adaptive_verification"] = True
    if method.name == "ngram":
        options |= asdict(method.options)
    if method.synthetic_acceptance_length is not None:
        options["synthetic_acceptance_length"] = method.synthetic_acceptance_length
    if method.weights is not config.target.weights and drafter is not None:
        options["draft_load_config"] = {"load_format": LOAD_FORMATS[method.weights]}
    return options


def _drafter_folder(config: RunConfig) -> Path | None:
    checkpoint = config.method.checkpoint
    if config.method.name == "none" or checkpoint in (None, config.target.checkpoint):
        return None
    return resolve_folder(checkpoint)


def _start(config: RunConfig, arguments: dict[str, Any], stats: StepStats | None) -> Any:
    """The running engine. Memory that earlier runs of this process left cached is freed first: vLLM
    counts it as taken."""
    with _importing():
        from vllm import EngineArgs, LLMEngine

    gc.collect()
    torch.cuda.empty_cache()
    try:
        if config.parallelism.data > 1:
            return start_data_parallel(arguments)
        loggers = None if stats is None else [stats.attach]
        return LLMEngine.from_engine_args(EngineArgs(**arguments), stat_loggers=loggers)
    except WRONG_FILES as error:
        failed = (
            f"vLLM cannot start with target {config.target.checkpoint!r} and "
            f"method={config.method.name} ({type(error).__name__}: {_reason(error)})"
        )
        if isinstance(error, torch.OutOfMemoryError) or "memory" in _first_line(error):
            raise UserError(f"{failed}: {FOR_MEMORY}") from error
        if isinstance(error, RuntimeError) and not isinstance(error, NotImplementedError):
            error.add_note(failed)  # not about the checkpoint: a driver, a process that died
            raise
        raise CheckpointError(
            f"{failed}: see the models and options that it supports, or choose engine=native"
        ) from error


def _parts(
    config: RunConfig,
    opened: Checkpoint,
    engine: Any,
    stats: StepStats | None,
    environment: Environment,
) -> VllmParts:
    found = engine.vllm_config
    if config.method.verification is Verification.block and not getattr(
        found, "use_v2_model_runner", True
    ):
        raise ConfigurationError(
            "method.verification=block: vLLM runs this target with its older model runner, which "
            "has none\n  allowed: standard, synthetic\n"
            "  to do: set VLLM_USE_V2_MODEL_RUNNER=1 in the environment, or choose engine=native"
        )
    vocab_size = int(found.model_config.get_vocab_size())
    return VllmParts(
        config=config,
        engine=engine,
        stats=stats,
        environment=environment,
        tokenizer=load_tokenizer(opened.folder),
        eos_token_ids=opened.token_ids("eos_token_id", vocab_size),
        vocab_size=vocab_size,
        max_model_len=int(found.model_config.max_model_len),
        cudagraph_mode=str(found.compilation_config.cudagraph_mode.name).lower(),
        memory_bytes=_memory_bytes(engine),
        quantization=read_elsewhere(opened),
        pictures=images.picture_form(config, opened),
        warnings=(
            unequal_weights(engine, opened) if config.target.weights is Weights.random else []
        ),
    )


def _memory_bytes(engine: Any) -> dict[str, int]:
    """Bytes that vLLM says its first worker holds; empty where the worker lives in another
    process."""
    worker = getattr(getattr(engine, "model_executor", None), "driver_worker", None)
    runner = getattr(worker, "model_runner", None)
    sources = {
        "weights": (runner, "model_memory_usage"),  # the drafter's included
        "kv_cache": (worker, "available_kv_cache_memory_bytes"),
    }
    found = {name: getattr(source, key, None) for name, (source, key) in sources.items()}
    return {name: int(value) for name, value in found.items() if value is not None}
