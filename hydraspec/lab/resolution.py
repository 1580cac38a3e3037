"""Settings that are decided before the run folder is written: the device, and what the
checkpoints' own configurations say.

The module imports no torch itself: the command line calls it before a run is certain.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from hydraspec import factory
from hydraspec.config.checks import MAX_NUM_THREADS
from hydraspec.config.choices import has_key
from hydraspec.config.messages import refusal
from hydraspec.config.schema import RunConfig
from hydraspec.errors import CheckpointError
from hydraspec.shipped import SHAPE_PREFIX, SHAPES, ZOO_PREFIX
from hydraspec.speculators.registry import check_speculator

OF_A_MODEL = (  # keys of its config.json that no number format changes
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "num_experts"),
)


def resolve(config: RunConfig) -> None:
    """Check the device, and complete the configuration, in place, from its checkpoints and the
    environment; see `factory.resolve_drafter`. Folders are looked for by `check_folders`, and here
    where one had to be read."""
    check_speculator(config)
    factory.check_device(config)
    _take_threads(config)
    try:
        factory.resolve_drafter(config)
    except (CheckpointError, RuntimeError):  # of a home folder that nobody has
        check_folders(config)  # its message names the key
        raise


def check_folders(config: RunConfig) -> None:
    """Refuse a checkpoint that is written as a path where there is none, before anything is loaded.

    Raises:
        CheckpointError: naming the key.
    """
    given = {"target.checkpoint": config.target.checkpoint}
    if config.method.needs_checkpoint and config.method.checkpoint is not None:
        given["method.checkpoint"] = config.method.checkpoint
    for key, checkpoint in given.items():
        if _is_missing(checkpoint):
            message = refusal(
                key,
                checkpoint,
                "does not exist",
                allowed="a folder with config.json and safetensors files, zoo:<name>, or a hub id "
                "<owner>/<name>",
                remedy="check the spelling",
            )
            raise CheckpointError(str(message), key=key)


def _is_missing(checkpoint: str) -> bool:
    """Returns whether a checkpoint is written as a path, where there is none: other than a hub id
    it does not have two parts, or its first one is a folder."""
    if checkpoint.startswith((ZOO_PREFIX, SHAPE_PREFIX)):
        return False
    parts, path = checkpoint.split("/"), Path(os.path.expanduser(checkpoint))
    is_path = checkpoint.startswith((".", "/", "~", "\\")) or len(parts) != 2 or "" in parts
    return (is_path or path.parent.is_dir()) and not path.exists()


def _take_threads(config: RunConfig) -> None:
    """Set engine.num_threads, if it is null, to OMP_NUM_THREADS above 1 on a CPU: engines would
    choose one thread for a narrow target."""
    asked, engine = os.environ.get("OMP_NUM_THREADS", ""), config.engine
    if engine.num_threads is not None or not has_key(engine.name, "engine.num_threads"):
        return
    is_several = asked.isdecimal() and 1 < int(asked) <= MAX_NUM_THREADS
    if is_several and factory.device_type(config) == "cpu":
        engine.num_threads = int(asked)


def check_formats(configs: Iterable[RunConfig]) -> None:
    """Refuse jobs of metrics.compare_formats=true whose targets are several models, as far as their
    config.json can be read here: they are compared as formats of one.

    Raises:
        ConfigurationError: naming the first target that differs from the first of all.
    """
    first: tuple[str, Mapping[str, Any]] | None = None
    for config in configs:
        found = _model(config) if config.metrics.compare_formats else {}
        if first is None:
            first = (config.target.name, found) if found else None
            continue
        other, sizes = first
        for key in OF_A_MODEL if found else ():
            if found[key] != sizes[key]:
                raise refusal(
                    "target",
                    config.target.name,
                    f"is another model than {other}: {key} is {found[key]}, not {sizes[key]}, "
                    "and metrics.compare_formats=true compares formats of one model",
                    allowed="targets that differ in their number format alone",
                    remedy="leave out the targets of other models; experiment=drafters, or a "
                    "sweep without metrics.compare_formats, takes them",
                )


@cache
def _sizes(checkpoint: str) -> Mapping[str, Any]:
    from hydraspec.models.checkpoint.config_reader import text_part
    from hydraspec.models.checkpoint.reader import open_checkpoint

    try:
        text = text_part(open_checkpoint(checkpoint).config)
    except CheckpointError:  # the job reports it
        return {}
    return {key: text.get(key) for key in OF_A_MODEL}


def _model(config: RunConfig) -> Mapping[str, Any]:
    """Sizes of the target's text model by OF_A_MODEL; empty where its files are not here."""
    checkpoint = config.target.checkpoint
    if checkpoint.startswith((SHAPE_PREFIX, ZOO_PREFIX)) or os.path.isdir(checkpoint):
        return _sizes(checkpoint)
    has_shape = (SHAPES / config.target.name).is_dir()  # of a hub id, which is not fetched yet
    return _sizes(f"{SHAPE_PREFIX}{config.target.name}") if has_shape else {}
