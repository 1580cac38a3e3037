"""Figures of grammars in summary.json."""

from __future__ import annotations

from typing import TypedDict


class Grammars(TypedDict):
    """Time of the host for grammars of outputs."""

    num_grammars: int
    compile_ms: float
    longest_compile_ms: float | None
    num_masks: int
    mask_ms: float
