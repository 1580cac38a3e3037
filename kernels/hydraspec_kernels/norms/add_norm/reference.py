"""What stands between two matrices of a decoder layer: norm of a block's output, sum, next norm."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from hydraspec_kernels.norms.rms_norm.reference import rms_norm_reference


class AddNorm(NamedTuple):
    """The residual stream after a block, and what the next block reads."""

    h: Tensor  # [T, D], the tensor that was given, changed in place
    y: Tensor | None  # [T, D] norm(h), None without a next norm


def add_norm_reference(
    h: Tensor,
    x: Tensor,
    *,
    post_weight: Tensor | None,
    next_weight: Tensor | None,
    eps: float,
    scale: float | None = None,
    has_post_norm: bool = True,
) -> AddNorm:
    """See `hydraspec_kernels.norms.add_norm.add_norm`. Every step rounds to h's dtype."""
    if x.dim() == 3:
        x = (x[0] if x.shape[0] == 1 else x.sum(0)).to(h.dtype)
    h.add_(rms_norm_reference(x, post_weight, eps) if has_post_norm else x)
    if scale is not None:
        h.mul_(scale)
    return AddNorm(h, None if next_weight is None else rms_norm_reference(h, next_weight, eps))
