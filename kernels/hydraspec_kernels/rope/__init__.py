"""Rotary position embedding."""

from __future__ import annotations

from torch import Tensor

from hydraspec_kernels.rope.reference import (
    Frequencies,
    apply_rope_reference,
    mirrored,
    rope_frequencies,
    rope_table,
)

__all__ = ["Frequencies", "apply_rope", "mirrored", "rope_frequencies", "rope_table"]


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads x [T, heads, H] in place by a table of `rope_table`; returns x."""
    return apply_rope_reference(x, cos, sin)
