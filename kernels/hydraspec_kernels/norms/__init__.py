"""RMSNorm alone, and with the residual sum before it."""

from __future__ import annotations

from functools import partial
from typing import NotRequired, TypedDict

import torch
from torch import Tensor

from hydraspec_kernels.norms.cpu import NormGain, add_norm_cpu, rms_norm_cpu
from hydraspec_kernels.norms.records import MAX_WIDTH, AddNorm
from hydraspec_kernels.norms.reference import add_norm_reference, rms_norm_reference
from hydraspec_kernels.quantised.records import Rounding
from hydraspec_kernels.runtime.launch import runs_kernels

__all__ = [
    "MAX_WIDTH",
    "AddNorm",
    "AddNormOptions",
    "NormGain",
    "add_norm",
    "add_norm_cpu",
    "rms_norm",
    "rms_norm_cpu",
]


class AddNormOptions(TypedDict):
    """Options of `add_norm`, for functions that hand them on."""

    post_weight: Tensor | None
    next_weight: Tensor | None
    eps: float
    scale: NotRequired[float | None]
    has_post_norm: NotRequired[bool]


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm of x [..., H] with weight [H] (None: no weight), rounded once to x's dtype.

    No kernel takes a weight per head [.., H], nor an H above MAX_WIDTH (the states of several
    layers side by side): the reference runs then.
    """
    has_kernel = x.dtype is not torch.float64 and x.shape[-1] <= MAX_WIDTH
    if runs_kernels(x) and has_kernel and (weight is None or weight.dim() == 1):
        from hydraspec_kernels.norms.rms_norm_kernel import rms_norm_cuda  # Triton

        return rms_norm_cuda(x, weight, eps)
    return rms_norm_reference(x, weight, eps)


def add_norm(
    h: Tensor,
    x: Tensor,
    *,
    post_weight: Tensor | None,
    next_weight: Tensor | None,
    eps: float,
    scale: float | None = None,
    has_post_norm: bool = True,
    rounding: Rounding | None = None,
) -> AddNorm:
    """Residual sum of a decoder layer with the norms around it, in one kernel:
    h' = (h + norm(x)) * scale, written into h [T, D], and y = norm(h').

    x is [T, D], or partial sums [S, T, D], which are added up first (`linear_partials`). Without
    has_post_norm x is added as it is (pre-norm decoders). post_weight [D] None: a norm without
    weight. next_weight [D] None: no y. Both norms take eps. rounding: how the product that reads y
    rounds it, which the kernel does then, for a group or a row (`quantised.rounding_before`).
    """
    if runs_kernels(h) and h.dtype is not torch.float64:
        from hydraspec_kernels.norms.add_norm_kernel import add_norm_cuda  # Triton

        run = partial(add_norm_cuda, rounding=rounding)
    else:
        assert rounding is None, "only the kernel rounds"
        run = partial(add_norm_reference)
    return run(
        h,
        x,
        post_weight=post_weight,
        next_weight=next_weight,
        eps=eps,
        scale=scale,
        has_post_norm=has_post_norm,
    )
