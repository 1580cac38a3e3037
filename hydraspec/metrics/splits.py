"""The split of a run over devices in words: the choice of the config group `parallelism`."""

from __future__ import annotations

from collections.abc import Mapping

AXES = {"tensor": "tp", "pipeline": "pp", "data": "dp"}


def split_words(parallelism: object) -> str:
    """The split of a summary's `parallelism`: "single", "tp2", "tp2_pp2" or "tp4_dp3"; empty for
    a summary of an earlier version, which has none."""
    if not isinstance(parallelism, Mapping):
        return ""
    sizes = [(short, parallelism.get(axis, 1)) for axis, short in AXES.items()]
    return "_".join(f"{short}{size}" for short, size in sizes if size != 1) or "single"
