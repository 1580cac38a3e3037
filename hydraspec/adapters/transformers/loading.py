"""Loads transformers' own classes for a target folder and an assistant, offline and from
safetensors only; code in a folder is never run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging as hf_logging

from hydraspec.config.schema import RunConfig, Weights
from hydraspec.engine.machine import pick_device, set_num_threads
from hydraspec.models.checkpoint.quantized_tensors import check_elsewhere, read_elsewhere
from hydraspec.models.checkpoint.reader import Checkpoint, listed, open_checkpoint
from hydraspec.models.gemma4.assistant_config import TARGETS as TARGETS_WITH_ASSISTANTS
from hydraspec.models.gemma4.assistant_config import read_assistant
from hydraspec.models.pictures.format import PictureFormat, read_picture_format
from hydraspec.models.tokenizer import Tokenizer, load_tokenizer
from hydraspec.types import DTYPES, CheckpointError


@dataclass(slots=True, kw_only=True)
class TransformersParts:
    """Models, tokenizer and limits of an engine. A baseline shares all but the assistant."""

    config: RunConfig
    model: Any  # PreTrainedModel with generate()
    assistant: Any | None
    tokenizer: Tokenizer | None
    device: torch.device
    vocab_size: int
    max_positions: int
    eos_token_ids: tuple[int, ...]
    suppress_token_ids: tuple[int, ...]
    quantization: Mapping[str, str] | None = None  # of the target's matrices, by kind
    pictures: PictureFormat | None = None  # None: the target reads none


def load_parts(config: RunConfig) -> TransformersParts:
    """Loads the target and, for method=gemma4_mtp, its assistant.

    Weights are read in target.dtype from the start: a model that is converted later keeps constants
    (Gemma's embedding scale) rounded to the dtype it was loaded in. weights=random are
    transformers' own initial values, drawn from `seed`; they are not the native engine's.

    Raises:
        ConfigurationError: a device that this machine does not have.
        CheckpointError: a folder that cannot be used, or an assistant of another target.
    """
    device = pick_device(config)
    opened = open_checkpoint(config.target.checkpoint)
    model = _load_model(opened, config.target.weights, config, device)
    text = model.config.get_text_config()
    if device.type == "cpu":
        set_num_threads(config.engine.num_threads, text.hidden_size)
    suppressed = opened.token_ids("suppress_tokens", text.vocab_size)
    # Requests set stops and sampling: the folder's defaults must not apply.
    model.generation_config = GenerationConfig(
        suppress_tokens=list(suppressed) or None, pad_token_id=0
    )
    assistant = None
    if config.method.name == "gemma4_mtp":
        assistant = _load_assistant(config, opened, text, device)
    return TransformersParts(
        config=config,
        model=model,
        assistant=assistant,
        tokenizer=load_tokenizer(opened.folder),
        device=device,
        vocab_size=text.vocab_size,
        max_positions=text.max_position_embeddings,
        eos_token_ids=opened.token_ids("eos_token_id", text.vocab_size),
        suppress_token_ids=suppressed,
        quantization=read_elsewhere(opened),
        pictures=read_picture_format(opened, config.target.max_soft_tokens),
    )


def _load_assistant(config: RunConfig, target: Checkpoint, text: Any, device: torch.device) -> Any:
    """The assistant, set to draft a constant K at any confidence."""
    checkpoint = config.method.checkpoint
    assert checkpoint is not None, "the configuration names a drafter"
    if target.config.get("model_type") not in TARGETS_WITH_ASSISTANTS:
        raise CheckpointError(
            f"method=gemma4_mtp: target {str(target.folder)!r} has model_type "
            f"{target.config.get('model_type')!r}; assistants are made for "
            f"{', '.join(TARGETS_WITH_ASSISTANTS)}"
        )
    opened, shape = read_assistant(checkpoint)
    sides = (
        ("hidden size (backbone_hidden_size)", shape.backbone_hidden_size, text.hidden_size),
        ("vocab_size", shape.text.vocab_size, text.vocab_size),
    )
    found = [
        f"{what} is {ours} in the assistant and {theirs} in the target"
        for what, ours, theirs in sides
        if ours != theirs
    ]
    if found:
        raise CheckpointError(
            f"assistant {str(opened.folder)!r} was not made for this target: {'; '.join(found)}. "
            "Give the assistant that was released with the target"
        )
    assistant = _load_model(opened, config.method.weights, config, device)
    assistant.generation_config = GenerationConfig(
        num_assistant_tokens=config.method.most_drafts,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )
    return assistant


def _load_model(
    opened: Checkpoint, weights: Weights, config: RunConfig, device: torch.device
) -> Any:
    folder, dtype = opened.folder, DTYPES[config.target.dtype.value]
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"checkpoint folder {str(folder)!r} has no config.json; engine=transformers reads "
            "Hugging Face's layout only: convert the folder, or choose engine=native"
        )
    if weights is Weights.random and opened.is_quantised:
        raise CheckpointError(
            f"config.json of {str(folder)!r} names a quantization_config, and transformers draws "
            "random weights in float only: give weights=checkpoint, or choose engine=native"
        )
    if weights is Weights.checkpoint:
        opened.entries()  # refuses files that are missing, cut short or no safetensors
        check_elsewhere(opened)
    try:
        with _without_its_own_output():
            model, report = _from_transformers(str(folder), weights, dtype, config.seed)
    except (ImportError, ValueError, KeyError, OSError, RuntimeError) as error:
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        raise CheckpointError(
            f"transformers cannot load {str(folder)!r} ({type(error).__name__}: {reason}): see the "
            "models that it supports, or choose engine=native"
        ) from error
    _check_report(folder, report)
    return model.to(device).eval()


@contextmanager
def _without_its_own_output() -> Iterator[None]:
    """Context without transformers' progress bars and load reports: `_check_report` says what is
    wrong with a checkpoint.
    """
    level, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()


def _from_transformers(
    folder: str, weights: Weights, dtype: torch.dtype, seed: int
) -> tuple[Any, dict[str, Any]]:
    """The model, and transformers' report of the tensors that its files lack or misshape ({} for
    random weights).
    """
    options = {"local_files_only": True, "trust_remote_code": False}
    hf_config = AutoConfig.from_pretrained(folder, **options)
    if weights is Weights.random:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return AutoModelForCausalLM.from_config(hf_config, dtype=dtype), {}
    model, report = AutoModelForCausalLM.from_pretrained(
        folder,
        config=hf_config,
        dtype=dtype,
        use_safetensors=True,
        output_loading_info=True,
        **options,
    )
    return model, report


def _check_report(folder: Path, report: dict[str, Any]) -> None:
    """Raises CheckpointError for missing or misshapen tensors, which transformers would draw."""
    missing = sorted(str(key) for key in report.get("missing_keys", ()))
    misshapen = sorted(str(key) for key in report.get("mismatched_keys", ()))
    kinds = (("missing", missing), ("misshapen", misshapen))
    problems = "; ".join(f"{kind}: {listed(names)}" for kind, names in kinds if names)
    if problems:
        raise CheckpointError(
            f"checkpoint {str(folder)!r} does not fit its config.json as transformers reads it: "
            f"{problems}. Download it again"
        )
