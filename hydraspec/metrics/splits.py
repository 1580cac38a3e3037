"""A split in words, named as the choices of the config group `parallelism` are."""

from __future__ import annotations

from collections.abc import Mapping

AXES = {"tensor": "tp", "pipeline": "pp", "data": "dp"}


def split_words(parallelism: object) -> str:
    """ "single", "tp2", "tp2_pp2" or "tp4_dp3", of a summary's `parallelism`; empty where a summary
    of an earlier version has none."""
    if not isinstance(parallelism, Mapping):
        return ""
    sizes = [(short, parallelism.get(axis, 1)) for axis, short in AXES.items()]
    return "_".join(f"{short}{size}" for short, size in sizes if size != 1) or "single"
