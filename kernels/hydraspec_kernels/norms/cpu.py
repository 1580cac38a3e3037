"""RMSNorm in four operators, where the reference takes seven: for a few rows an operator call costs
more than its work.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hydraspec_kernels.norms.reference import AddNorm

_vector_norm = torch.linalg.vector_norm


class NormGain(NamedTuple):
    """A norm's weight and eps in the form that the CPU functions read; computed once per weight."""

    gain: Tensor  # [H] or [heads, H]: weight * sqrt(H)
    floor: Tensor  # 0-d: sqrt(H * eps)

    @classmethod
    def of(cls, weight: Tensor, eps: float) -> NormGain:
        """The gain of a weight [H] or [heads, H]."""
        size = weight.shape[-1]
        return cls(weight * math.sqrt(size), weight.new_tensor(math.sqrt(size * eps)))


def rms_norm_cpu(x: Tensor, norm: NormGain) -> Tensor:
    """RMSNorm of x [..., H], weight included."""
    return unit_norm(x, norm.floor).mul_(norm.gain)


def add_norm_cpu(
    h: Tensor,
    x: Tensor,
    *,
    post: NormGain | None,
    next_norm: NormGain | None,
    scale: float | None = None,
) -> AddNorm:
    """See `hydraspec_kernels.norms.add_norm`; post None adds x as it is."""
    if x.dim() == 3:
        x = x[0] if x.shape[0] == 1 else x.sum(0)
    if post is None:
        h.add_(x)
    else:
        h.addcmul_(unit_norm(x, post.floor), post.gain)
    if scale is not None:
        h.mul_(scale)
    return AddNorm(h, None if next_norm is None else rms_norm_cpu(h, next_norm))


def unit_norm(x: Tensor, floor: Tensor) -> Tensor:
    """Vectors x [..., H] / hypot(|x|, floor). With floor = sqrt(H eps) it is RMSNorm / sqrt(H)."""
    return x / _vector_norm(x, 2, -1, True).hypot_(floor)


def unit_norm_(x: Tensor, floor: Tensor) -> Tensor:
    """Computes `unit_norm` in place; returns x."""
    return x.div_(_vector_norm(x, 2, -1, True).hypot_(floor))
