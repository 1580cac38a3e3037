"""Rotary position embedding: frequencies, the table of a batch's positions, and the rotation."""

from __future__ import annotations

import torch
from torch import Tensor

from hydraspec_kernels.rope.reference import (
    Frequencies,
    apply_rope_reference,
    mirrored,
    rope_frequencies,
    rope_table_reference,
)
from hydraspec_kernels.runtime.launch import runs_kernels

__all__ = ["Frequencies", "apply_rope", "mirrored", "rope_frequencies", "rope_table"]


def rope_table(
    positions: Tensor, frequencies: Frequencies, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines [T, 1, H] for positions [T] and `mirrored` frequencies.

    Angles are computed in the frequencies' dtype. The sines' sign is such that rotation is
    x * cos + swap_halves(x) * sin.
    """
    if runs_kernels(positions) and frequencies.cos.dtype is torch.float32:
        from hydraspec_kernels.rope.kernel import rope_table_cuda  # Triton

        half = frequencies.cos.shape[0] // 2
        return rope_table_cuda(positions, frequencies.cos[:half], dtype)
    return rope_table_reference(positions, frequencies, dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates heads x [T, heads, H] in place by a table of `rope_table`; returns x."""
    if runs_kernels(x) and x.dtype is not torch.float64 and x.stride(-1) == 1:
        from hydraspec_kernels.rope.kernel import apply_rope_cuda  # Triton

        return apply_rope_cuda(x, cos, sin)
    return apply_rope_reference(x, cos, sin)
