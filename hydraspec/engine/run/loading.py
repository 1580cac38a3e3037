"""Builds the parts of a native engine from a RunConfig: device, target, drafter, cache, state,
scheduler."""

from __future__ import annotations

import logging
import time
from copy import copy
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
from hydraspec_kernels.quantised import E4M3
from hydraspec_kernels.runtime.ahead import can_compile_ahead, compiled_ahead

from hydraspec.config.schema import KVDtype, MethodConfig, RunConfig
from hydraspec.engine.base import EngineInfo
from hydraspec.engine.cache.kv_cache import KVCache
from hydraspec.engine.cache.sizing import (
    Models,
    check_block_sizes,
    new_cache,
    size_warnings,
    smallest_cache,
)
from hydraspec.engine.machine import model_length, pick_device, set_num_threads
from hydraspec.engine.notes import log_once
from hydraspec.engine.rounded_kv import KV_IS_ROUNDED, with_fp8_cache
from hydraspec.engine.run.device_runner import DeviceRunner
from hydraspec.engine.run.kv_scales import scale_kv
from hydraspec.engine.run.rank_check import RankCheck
from hydraspec.engine.run.room import room_for, target_bytes, timed
from hydraspec.engine.run.runners import build_runner, draft_lengths_of
from hydraspec.engine.schedule.host_drafts import build_step_drafts
from hydraspec.engine.schedule.prompt_rows import PromptRows
from hydraspec.engine.schedule.scheduler import Scheduler
from hydraspec.graphs import (
    CudaGraphBackend,
    GraphBackend,
    GraphModes,
    no_graphs,
    resolve_modes,
)
from hydraspec.models import load_target
from hydraspec.models.base import TargetModel
from hydraspec.models.checkpoint.reader import resolve_folder
from hydraspec.models.stages import Stage
from hydraspec.models.tokenizer import Tokenizer, load_tokenizer
from hydraspec.parallel.control import ALONE, Control
from hydraspec.parallel.ranks import current
from hydraspec.parallel.stages import StageLink
from hydraspec.speculators.base import BaseSpeculator
from hydraspec.speculators.elsewhere import loaded_drafter
from hydraspec.speculators.none import NoSpeculator
from hydraspec.speculators.registry import build_speculator
from hydraspec.types import DTYPES, IMAGE

log = logging.getLogger(__name__)

ROWS_STAY = (
    "method.options.min_survival leaves drafts out of verification, but saves no rows of a step, "
    "since steps are scheduled before the results of the last one are in: "
    "engine.async_scheduling=false with one pipeline stage saves them"
)


@dataclass(slots=True, kw_only=True)
class Loaded:
    """The parts of one engine. A baseline shares target, tokenizer and cache tensors with its
    origin."""

    config: RunConfig
    target: TargetModel
    tokenizer: Tokenizer | None
    runner: DeviceRunner
    scheduler: Scheduler
    info: EngineInfo
    control: Control = ALONE  # of the ranks that run this engine's steps
    check: RankCheck | None = None  # of parallelism.check
    link: StageLink | None = None  # of a pipeline stage


def load(config: RunConfig) -> Loaded:
    """Load target and drafter and size the cache.

    Raises:
        ConfigurationError: device or length that this machine or checkpoint cannot give.
        CheckpointError: a checkpoint that cannot be used.
    """
    device, ranks = pick_device(config), current()
    speculator = build_speculator(config)
    split = config.parallelism.pipeline_layers
    stage = Stage(
        index=ranks.at.stage,
        count=ranks.layout.pipeline,
        num_layers=None if split is None else tuple(split),
        drafts=speculator.num_speculative_tokens > 0,
        drafter_reads_kv=speculator.reads_target_kv,
    )
    checkpoint, drafter = config.target.checkpoint, config.method.checkpoint
    needed = partial(target_bytes, config, ranks.group, stage)
    with (
        timed("target's weights", device),
        room_for("its weights", "target.checkpoint", checkpoint, device, needed),
    ):
        target = load_target(
            config.target.checkpoint,
            weights=config.target.weights.value,
            dtype=DTYPES[config.target.dtype.value],
            device=device,
            seed=config.seed,
            max_model_len=config.target.max_model_len,
            group=ranks.group,
            stage=stage,
        )
    if device.type == "cpu":
        set_num_threads(config.engine.num_threads, target.hidden_size)
    if config.engine.kv_cache.dtype is KVDtype.fp8:
        with timed("scales of the KV cache", device):
            scale_kv(target, config, ranks.link, ranks.control)
    with (
        timed("drafter's weights", device),
        room_for("its weights beside the target's", "method.checkpoint", drafter, device, None),
    ):
        speculator = loaded_drafter(speculator, target, config, ranks.link)
    tokenizer = load_tokenizer(resolve_folder(config.target.checkpoint))
    return assemble(
        *(config, target, tokenizer, speculator, None), control=ranks.control, link=ranks.link
    )


def load_baseline(loaded: Loaded) -> Loaded:
    """The same target without a drafter, over the same cache tensors: only one of the two may run
    at a time."""
    block_size = loaded.config.engine.kv_cache.block_size_of
    target_kv = loaded.runner.kv.leading(len(loaded.target.kv_groups(block_size)))
    config = replace(loaded.config, method=MethodConfig(name="none", num_speculative_tokens=0))
    return assemble(
        config,
        loaded.target,
        loaded.tokenizer,
        NoSpeculator(config),
        target_kv,
        backend=loaded.runner.backend,  # the same memory pool: only one of the two runs
        control=loaded.control,
        link=loaded.link,
    )


def assemble(
    config: RunConfig,
    target: TargetModel,
    tokenizer: Tokenizer | None,
    speculator: BaseSpeculator,
    kv: KVCache | None,
    *,
    backend: GraphBackend | None = None,
    control: Control = ALONE,
    link: StageLink | None = None,
) -> Loaded:
    """Wire loaded models into an engine's parts; `kv` None makes a new cache, as large on every
    rank. `link` is that of a pipeline stage.

    `backend` captures graphs in place of CUDA's; with one, a CPU runs the steps that graphs hold.
    """
    target = copy(target)  # the same weights; kv_groups sets the block size of this engine alone
    models = Models(
        config=config,
        target=target,
        speculator=speculator,
        max_model_len=model_length(config, target.max_position_embeddings),
        link=link,
    )
    if kv is None:
        check_block_sizes(models)
    modes = _resolve_modes(models, backend)
    if modes.enabled and backend is None:
        backend = CudaGraphBackend(target.device)
    memory_bytes = {"weights": target.memory_bytes(), "draft_weights": speculator.memory_bytes()}
    on_cuda = target.device.type == "cuda"
    if on_cuda or backend is not None:
        measures = on_cuda and (kv is None or target.vocabulary.group.size > 1)
        memory_bytes |= _rehearse(models, modes, backend, control, measures=measures)
        torch.cuda.empty_cache()
    warnings: list[str] = []
    if kv is None:
        with timed("KV cache", target.device):
            kv = new_cache(
                models, control, activation_bytes=_step_bytes(models, modes, memory_bytes)
            )
        warnings = size_warnings(models, kv)
    memory_bytes["kv_cache"] = kv.num_bytes
    activation_bytes = memory_bytes.get("activations", 0)
    runner = build_runner(*(models, kv, modes, backend, control), activation_bytes=activation_bytes)
    _capture(runner)
    group = target.vocabulary.group
    is_checked = config.parallelism.check and group.size > 1
    return Loaded(
        config=config,
        target=target,
        tokenizer=tokenizer,
        runner=runner,
        scheduler=_scheduler(models, kv, runner),
        info=_info(models, kv, modes, memory_bytes, warnings),
        control=control,
        check=RankCheck(group, target.device) if is_checked else None,
        link=link,
    )


def _scheduler(models: Models, kv: KVCache, runner: DeviceRunner) -> Scheduler:
    config, speculator = models.config, models.speculator
    num_stages = models.target.stage.count
    prompt_rows = PromptRows(
        max_rows=config.engine.max_num_batched_tokens,
        graph_rows=tuple(runner.graphs.mixed_rows) if runner.graphs is not None else (),
        num_micro_batches=num_stages,
        launch_bound_rows=runner.limits.launch_bound_rows,
        max_mixing_cost=config.engine.max_mixing_cost,
    )
    runs_ahead = _runs_ahead(config, models.target)
    return Scheduler(
        kv,
        max_num_seqs=config.engine.max_num_seqs,
        max_num_batched_tokens=config.engine.max_num_batched_tokens,
        max_model_len=models.max_model_len,
        num_speculative_tokens=speculator.num_speculative_tokens,
        num_lookahead_tokens=speculator.num_lookahead_tokens,
        num_micro_batches=num_stages,
        runs_ahead=runs_ahead,
        prompt_rows=prompt_rows,
        draft_lengths=draft_lengths_of(models, runner, runs_ahead=runs_ahead),
        step_drafts=build_step_drafts(speculator),
    )


def rehearsing_runner(
    models: Models, modes: GraphModes, backend: GraphBackend | None
) -> DeviceRunner:
    """A runner for compiling kernels ahead of time, with the smallest cache and its own state.

    In a rehearsal indices read zeros and products are left out, so whatever a runner computes and
    keeps is wrong: a runner that has rehearsed never decodes.
    """
    return build_runner(models, smallest_cache(models), modes, backend)


def _rehearse(
    models: Models,
    modes: GraphModes,
    backend: GraphBackend | None,
    control: Control,
    *,
    measures: bool,
) -> dict[str, int]:
    """Compile kernels ahead of time. If it `measures`, returns the bytes that the largest step
    takes, as "activations", and those of kept encoder outputs, as "images"."""
    runner = rehearsing_runner(models, modes, backend)
    _compile(runner)
    control.agree_all(True)  # later, devices wait for each other, with short limits
    if not measures:
        return {}
    found = {"activations": _measure_activations(runner)}
    kept_bytes = runner.images.kept_bytes
    return found | ({"images": kept_bytes} if kept_bytes else {})


def _measure_activations(runner: DeviceRunner) -> int:
    """Bytes that the largest step takes beside weights, cache and state, from one run on
    padding."""
    device = runner.target.device
    torch.cuda.empty_cache()
    start = time.perf_counter()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    runner.run_padding()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    log.info("largest step: %.2f GiB, %.1f s", peak / (1 << 30), time.perf_counter() - start)
    return peak


def _step_bytes(models: Models, modes: GraphModes, memory_bytes: dict[str, int]) -> int:
    """Bytes that the largest eager step takes, and the pool of large graphs with it: as much per
    row, for the rows of the largest graph; and encoder outputs that are kept."""
    most = models.config.engine.max_num_batched_tokens
    in_graphs = min(modes.max_mixed_rows, most) if modes.has_large else 0
    in_steps = memory_bytes.get("activations", 0) * (most + in_graphs) // most
    return in_steps + memory_bytes.get("images", 0)


def _compile(runner: DeviceRunner) -> None:
    """Compile all kernels at once; if that fails, warm-ups compile them one after another."""
    device = runner.target.device
    if not can_compile_ahead(device):
        return
    log.info("compiling kernels")
    start = time.perf_counter()
    try:
        with compiled_ahead(device) as compiled:
            runner.rehearse()
    except Exception as error:
        log.warning("kernels are compiled one by one, because all at once failed: %r", error)
        return
    log.info(
        "compiled %d kernels in %.1f s (finding them %.1f, compiling %.1f, loading %.1f)",
        *(compiled.num_kernels, time.perf_counter() - start),
        *(compiled.stepping_s, compiled.compiling_s, compiled.loading_s),
    )


def _capture(runner: DeviceRunner) -> None:
    if runner.graphs is None:
        return
    start = time.perf_counter()
    num_bytes = runner.capture()
    torch.cuda.empty_cache()  # memory that warm-ups took on the stream of captures
    log.info(
        "captured %d graphs (%s) in %.1f s, %.2f GiB",
        *(runner.graphs.num_graphs, runner.modes.requested, time.perf_counter() - start),
        num_bytes / (1 << 30),
    )


def _resolve_modes(models: Models, backend: GraphBackend | None) -> GraphModes:
    """Graph modes in which the requested one runs; every downgrade is logged with its reason."""
    requested, speculator = models.config.cudagraph.name, models.speculator
    if models.target.device.type == "cpu" and backend is None:
        modes = no_graphs(requested, "device is cpu")
    else:
        modes = resolve_modes(
            requested,
            drafts=speculator.num_speculative_tokens > 0,
            cannot_draft_in_graph=speculator.cannot_be_captured,
            max_mixed_rows=models.config.cudagraph.max_mixed_rows,
        )
    for reason in modes.reasons:
        log_once(f"cudagraph={requested} does not run as requested: {reason}")
    return modes


def _runs_ahead(config: RunConfig, target: TargetModel) -> bool:
    """Returns engine.async_scheduling; null: true on CUDA, where a launch returns before the work
    is done. With pipeline stages it says whether a step is launched before the results of the step
    that it follows are read."""
    wanted = config.engine.async_scheduling
    return target.device.type == "cuda" if wanted is None else wanted


def _info(
    models: Models,
    kv: KVCache,
    modes: GraphModes,
    memory_bytes: dict[str, int],
    warnings: list[str],
) -> EngineInfo:
    config, target, spec = models.config, models.target, models.speculator.spec
    device = target.device
    notes: list[str] = []
    stored = getattr(target, "quantization", None)  # a plugin's target may not say
    if stored is not None:
        log.info("target: quantization=%s", stored)
    notes += getattr(target, "quantization_notes", ())
    if any(each.dtype is E4M3 for each in kv.specs):
        notes.append(KV_IS_ROUNDED.format(config.target.dtype.value))
        stored = with_fp8_cache(stored)
    elif note := getattr(target, "kv_cache_note", ""):
        notes.append(note)
    if spec is not None:
        log.info("drafter: %s", spec)
        other_model = spec.note_on_target(config.target.checkpoint)
        notes += [*spec.notes, *([other_model] if other_model else [])]
    runs_ahead = _runs_ahead(config, target) or target.stage.count > 1
    if models.speculator.min_survival is not None and runs_ahead:
        notes.append(ROWS_STAY)
    return EngineInfo(
        engine="native",
        target=config.target.name,
        method=config.method.name,
        num_speculative_tokens=models.speculator.num_speculative_tokens,
        device=str(device),
        dtype=config.target.dtype.value,
        vocab_size=target.vocab_size,
        max_model_len=models.max_model_len,
        greedy_is_exact=target.dtype in (torch.float32, torch.float64),
        cudagraph=modes.as_info(),
        checks_logits=True,
        async_scheduling=_runs_ahead(config, target),
        prefix_caching=kv.prefix_caching,
        encoded_kinds=(IMAGE,) if getattr(target, "encoder", None) is not None else (),
        memory_bytes=memory_bytes,
        devices=[torch.cuda.get_device_name(device) if device.type == "cuda" else device.type],
        draft_spec=None if spec is None else asdict(spec),
        quantization=stored,
        eos_token_ids=list(target.eos_token_ids),
        warnings=[*warnings, *notes],
    )
