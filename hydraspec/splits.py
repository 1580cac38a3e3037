"""Refuses splits that a target cannot have, before the processes of its ranks are started.

A split that sizes in config.json plainly allow goes to the ranks at once. Where they leave a doubt,
the models' own checks decide, on a target without weights; these need torch, whose import takes a
second or two. What is not decided here the ranks decide while loading: hub ids, and targets of
plugins.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydraspec.config.schema import ParallelismConfig, RunConfig
from hydraspec.errors import UserError
from hydraspec.shipped import SHAPE_PREFIX, SHAPES, ZOO, ZOO_PREFIX

ASSISTANT = "gemma4_mtp"  # the method whose drafter ranks have to divide as they do the target
DIVIDED = ("num_attention_heads", "intermediate_size")
DIVIDED_OR_REPEATED = ("num_key_value_heads",)
# Keys that only some targets have.
ALSO_DIVIDED = ("moe_intermediate_size",)
ALSO_DIVIDED_OR_REPEATED = ("num_global_key_value_heads",)


def check(config: RunConfig) -> None:
    """Refuse a split of the native engine with the message of its ranks. Reads no weights.

    Raises:
        ConfigurationError: the target, or its assistant, cannot be split so; a device that is
            refused as well is told in its place.
        CheckpointError: a config.json that had to be looked at, and cannot be used.
    """
    target = _folder(config.target.checkpoint)
    drafter = config.method.checkpoint if config.method.name == ASSISTANT else None
    assistant = None if drafter is None else _folder(drafter)
    if target is None or _plainly_fits(config, target, assistant):
        return
    try:
        _check_target(config)
        if drafter is not None and assistant is not None:
            _check_assistant(drafter, config.parallelism.tensor)
    except UserError:
        from hydraspec import factory

        factory.device_type(config)  # what ranks settle before they load
        raise


def _folder(checkpoint: str) -> Path | None:
    """The folder of a checkpoint; None where there is none on this machine."""
    for prefix, place in ((ZOO_PREFIX, ZOO), (SHAPE_PREFIX, SHAPES)):
        if checkpoint.startswith(prefix):
            return place / checkpoint.removeprefix(prefix)
    folder = Path(checkpoint).expanduser()
    return folder if folder.is_dir() else None


def _plainly_fits(config: RunConfig, target: Path, assistant: Path | None) -> bool:
    """Returns whether a split needs no closer look, by the sizes of the target and of its
    assistant."""
    sizes, tensor = _sizes(target), config.parallelism.tensor
    if not _divides(sizes, tensor):
        return False
    if assistant is not None and not _divides(_sizes(assistant), tensor):
        return False
    return _fills_stages(config.parallelism, sizes, reads_kv=config.method.name == ASSISTANT)


def _fills_stages(axes: ParallelismConfig, sizes: Mapping[str, Any], *, reads_kv: bool) -> bool:
    """Returns whether stages plainly hold all layers. Layers that share KV, or whose KV a drafter
    reads (`reads_kv`), stay together: they are taken for the later half of those that write any."""
    split = axes.pipeline_layers
    if axes.pipeline == 1 and split is None:
        return True
    layers, shared = sizes.get("num_hidden_layers"), sizes.get("num_kv_shared_layers") or 0
    if not (isinstance(layers, int) and isinstance(shared, int)):
        return False
    last_border = (layers - shared) // 2 if shared or reads_kv else layers - 1
    if split is None:
        return axes.pipeline - 1 <= last_border
    fits = len(split) == axes.pipeline and sum(split) == layers and min(split) > 0
    return fits and sum(split[:-1]) <= last_border


def _sizes(folder: Path) -> Mapping[str, Any]:
    """The keys of the text model in a config.json; none where it cannot be read."""
    try:
        raw = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):  # told by those who have to read it
        return {}
    sizes = raw.get("text_config") or raw if isinstance(raw, dict) else None
    return sizes if isinstance(sizes, dict) else {}


def _divides(sizes: Mapping[str, Any], ranks: int) -> bool:
    """Returns whether ranks can divide every size that some family's ranks do. An absent key is in
    doubt: families have defaults."""
    if ranks == 1:
        return True
    whole = [sizes.get(key) for key in DIVIDED]
    whole += [sizes[key] for key in ALSO_DIVIDED if sizes.get(key) is not None]
    heads = [sizes.get(key) for key in DIVIDED_OR_REPEATED]
    heads += [sizes[key] for key in ALSO_DIVIDED_OR_REPEATED if sizes.get(key) is not None]
    return all(isinstance(n, int) and n > 0 and n % ranks == 0 for n in whole) and all(
        isinstance(n, int) and n > 0 and 0 in (n % ranks, ranks % n) for n in heads
    )


def _check_target(config: RunConfig) -> None:
    """Build the first rank's part of the target, without memory."""
    import torch

    from hydraspec.models import load_target
    from hydraspec.models.checkpoint.reader import open_checkpoint
    from hydraspec.models.registry import TARGETS
    from hydraspec.models.stages import Stage
    from hydraspec.models.weights import EMPTY
    from hydraspec.parallel.group import SoloGroup
    from hydraspec.speculators.registry import build_speculator
    from hydraspec.types import DTYPES

    axes, speculator = config.parallelism, build_speculator(config)
    if open_checkpoint(config.target.checkpoint).config.get("model_type") not in TARGETS:
        return  # a plugin's loader knows no empty weights
    group, split = SoloGroup(), axes.pipeline_layers
    group.size = axes.tensor  # nothing is exchanged
    load_target(
        config.target.checkpoint,
        weights=EMPTY,
        dtype=DTYPES[config.target.dtype.value],
        device=torch.device("meta"),
        seed=config.seed,
        max_model_len=config.target.max_model_len,
        group=group,
        stage=Stage(
            count=axes.pipeline,
            num_layers=None if split is None else tuple(split),
            drafts=speculator.num_speculative_tokens > 0,
            drafter_reads_kv=speculator.reads_target_kv,
        ),
    )


def _check_assistant(checkpoint: str, ranks: int) -> None:
    from hydraspec.models.detect import check_method, open_draft
    from hydraspec.models.gemma4.assistant_config import read_assistant

    check_method(open_draft(checkpoint), ASSISTANT)
    opened, config = read_assistant(checkpoint)
    config.text.divided.check(ranks, str(opened.folder))
