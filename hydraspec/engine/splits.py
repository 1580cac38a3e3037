"""Splits over ranks that a target or its assistant cannot have, found without reading weights."""

from __future__ import annotations

from pathlib import Path

import torch

from hydraspec.config.schema import RunConfig
from hydraspec.engine.machine import pick_device
from hydraspec.errors import UserError
from hydraspec.models import load_target
from hydraspec.models.base import TargetModel
from hydraspec.models.checkpoint.reader import open_checkpoint
from hydraspec.models.detect import check_method, open_draft
from hydraspec.models.gemma4.assistant_config import read_assistant
from hydraspec.models.registry import TARGETS
from hydraspec.models.stages import Stage
from hydraspec.models.weights import EMPTY
from hydraspec.parallel.group import SoloGroup, TensorGroup
from hydraspec.shipped import SHAPE_PREFIX, ZOO_PREFIX
from hydraspec.speculators.registry import build_speculator
from hydraspec.types import DTYPES

ASSISTANT = "gemma4_mtp"  # the method whose drafter is divided as the target is


def check(config: RunConfig) -> None:
    """Refuse a split that the native engine's ranks would refuse, with their message. Hub ids, and
    targets of plugins, are left to the ranks, which check them while they load.

    Raises:
        ConfigurationError: the target, or its assistant, cannot be split so; if the device cannot
            be used either, the error is that of the device.
        CheckpointError: a config.json that cannot be used.
    """
    if not _is_here(config.target.checkpoint):
        return
    drafter = config.method.checkpoint
    try:
        _check_target(config)
        if config.method.name == ASSISTANT and drafter is not None and _is_here(drafter):
            check_method(open_draft(drafter), ASSISTANT)
            opened, assistant = read_assistant(drafter)
            assistant.text.divided.check(config.parallelism.tensor, str(opened.folder))
    except UserError:
        pick_device(config)  # ranks check the device first
        raise


def _is_here(checkpoint: str) -> bool:
    is_packaged = checkpoint.startswith((ZOO_PREFIX, SHAPE_PREFIX))
    return is_packaged or Path(checkpoint).expanduser().is_dir()


def _check_target(config: RunConfig) -> None:
    """Build the first rank's part of the target, without memory for its weights."""
    axes, speculator = config.parallelism, build_speculator(config)
    group, split = SoloGroup(), axes.pipeline_layers
    group.size = axes.tensor  # nothing is exchanged
    stage = Stage(
        count=axes.pipeline,
        num_layers=None if split is None else tuple(split),
        drafts=speculator.num_speculative_tokens > 0,
        drafter_reads_kv=speculator.reads_target_kv,
    )
    empty_target(config, group, stage)


def empty_target(config: RunConfig, group: TensorGroup, stage: Stage) -> TargetModel | None:
    """A rank's part of the target without memory for its weights, from its config and its files'
    headers; None for a target of a plugin, whose loader may not support weights=EMPTY."""
    if open_checkpoint(config.target.checkpoint).config.get("model_type") not in TARGETS:
        return None
    target: TargetModel = load_target(
        config.target.checkpoint,
        weights=EMPTY,
        dtype=DTYPES[config.target.dtype.value],
        device=torch.device("meta"),
        seed=config.seed,
        max_model_len=config.target.max_model_len,
        group=group,
        stage=stage,
    )
    return target
