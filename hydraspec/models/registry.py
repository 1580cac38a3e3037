"""Table of the functions that load targets, by model_type.

A family is imported when a checkpoint needs it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from hydraspec import plugins
from hydraspec.errors import CheckpointError, ConfigurationError
from hydraspec.models.base import TargetModel
from hydraspec.models.checkpoint.reader import open_checkpoint
from hydraspec.models.stages import WHOLE, Stage, check_whole
from hydraspec.parallel.group import SOLO, TensorGroup

_DENSE = "hydraspec.models.dense.model:DenseTarget.load"
_GEMMA4 = "hydraspec.models.gemma4.model:Gemma4Target.load"
TARGETS: dict[str, str] = {
    "deepseek_v3": "hydraspec.models.deepseek.model:DeepseekTarget.load",
    "gemma4": _GEMMA4,
    "gemma4_text": _GEMMA4,
    "gemma4_unified": _GEMMA4,  # a multimodal wrapper around gemma4_unified_text
    "gemma4_unified_text": _GEMMA4,
    "llama": _DENSE,
    "mimo": _DENSE,
    "ministral": _DENSE,
    "ministral3": _DENSE,
    "mistral": _DENSE,
    "mistral3": _DENSE,  # a multimodal wrapper around mistral or ministral3
    "qwen2": _DENSE,
    "qwen3": _DENSE,
}


def load_target(
    checkpoint: str,
    *,
    weights: str,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    max_model_len: int | None,
    group: TensorGroup = SOLO,
    stage: Stage = WHOLE,
) -> TargetModel:
    """A target model from a folder, zoo:<name> or hub id.

    weights is "checkpoint" or "random" (seeded, in config.json's shapes, no tensor file read).
    Every rank of a group, and every pipeline stage, loads its part. Raises CheckpointError:
    unreadable or of an unknown model_type; ConfigurationError: shorter than max_model_len, or does
    not divide among ranks or stages.
    """
    opened = open_checkpoint(checkpoint)
    model_type = opened.config.get("model_type")
    families = plugins.offered(plugins.TARGETS, TARGETS)
    if model_type not in families:
        raise CheckpointError(
            f"checkpoint {str(opened.folder)!r} has model_type {model_type!r}; targets are "
            f"{', '.join(sorted(families))}" + _drafter_hint(opened.config)
        )
    load = plugins.load(families[model_type])
    model: TargetModel = load(
        opened,
        weights=weights,
        dtype=dtype,
        device=device,
        seed=seed,
        **_of_ranks(load, group, stage, model_type),
    )
    check_length(max_model_len, model.max_position_embeddings)
    if stage.count == 1 and stage.num_layers is not None:
        check_whole(stage.num_layers, model.num_layers)
    return model


def _of_ranks(
    load: Any, group: TensorGroup, stage: Stage, model_type: str
) -> dict[str, TensorGroup | Stage]:
    """Group and stage, where there is more than one rank or stage. Raises ConfigurationError for a
    plugin's target that takes none.
    """
    found: dict[str, TensorGroup | Stage] = {}
    for axis, count, name, value in (
        ("tensor", group.size, "group", group),
        ("pipeline", stage.count, "stage", stage),
    ):
        if count == 1:
            continue
        if name not in inspect.signature(load).parameters:
            raise ConfigurationError(
                f"parallelism.{axis}={count}: the plugin that offers targets of model_type "
                f"{model_type!r} loads them whole (its loader takes no {name})\n  allowed: 1\n"
                f"  to do: leave parallelism.{axis} at 1"
            )
        found[name] = value
    return found


def check_length(max_model_len: int | None, limit: int) -> None:
    """Refuse a target.max_model_len above what the checkpoint was made for."""
    if max_model_len is not None and max_model_len > limit:
        raise ConfigurationError(
            f"target.max_model_len={max_model_len} is above the checkpoint's "
            f"max_position_embeddings\n  allowed: 2 to {limit}, or null\n"
            "  to do: lower it, or leave the key out"
        )


def _drafter_hint(config: Mapping[str, Any]) -> str:
    if str(config.get("model_type")).endswith("_assistant"):
        return ". It is an assistant: give it as method.checkpoint"
    if "speculators_model_type" in config:
        return ". It is a drafter: leave the method out to run it with the target that it names"
    return ""
