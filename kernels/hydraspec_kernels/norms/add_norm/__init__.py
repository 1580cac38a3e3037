"""The residual sum of a decoder layer with the norms around it, in one kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from hydraspec_kernels.norms.add_norm.reference import AddNorm, add_norm_reference
from hydraspec_kernels.runtime.launch import runs_kernels

__all__ = ["AddNorm", "add_norm"]


def add_norm(
    h: Tensor,
    x: Tensor,
    *,
    post_weight: Tensor | None,
    next_weight: Tensor | None,
    eps: float,
    scale: float | None = None,
    has_post_norm: bool = True,
) -> AddNorm:
    """h' = (h + norm(x)) * scale, written into h [T, D], and y = norm(h').

    x [T, D], or [S, T, D] partial sums to add up first (`linear_partials`). Without has_post_norm
    x is added as it is (pre-norm decoders). post_weight [D] None: a norm without weight.
    next_weight [D] None: no y. Both norms take eps.
    """
    run = add_norm_reference
    if runs_kernels(h) and h.dtype is not torch.float64:
        from hydraspec_kernels.norms.add_norm.kernel import add_norm_cuda as run  # Triton
    return run(
        h,
        x,
        post_weight=post_weight,
        next_weight=next_weight,
        eps=eps,
        scale=scale,
        has_post_norm=has_post_norm,
    )
