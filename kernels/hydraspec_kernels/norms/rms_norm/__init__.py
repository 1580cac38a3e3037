"""RMSNorm with a plain weight, and its weightless core for callers that fold the weight away."""

from __future__ import annotations

import torch
from torch import Tensor

from hydraspec_kernels.norms.rms_norm.cpu import unit_norm, unit_norm_
from hydraspec_kernels.norms.rms_norm.reference import rms_norm_reference
from hydraspec_kernels.runtime.launch import runs_kernels

__all__ = ["MAX_WIDTH", "rms_norm", "unit_norm", "unit_norm_"]

MAX_WIDTH = 16384  # beyond, a row no longer fits the registers of one program


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm of x [..., H] with weight [H] (None: no weight), rounded once to x's dtype.

    A weight of several rows [.., H], one for each head, and an H beyond MAX_WIDTH (the states of
    several layers side by side) run as plain operators everywhere.
    """
    has_kernel = x.dtype is not torch.float64 and x.shape[-1] <= MAX_WIDTH
    if runs_kernels(x) and has_kernel and (weight is None or weight.dim() == 1):
        from hydraspec_kernels.norms.rms_norm.kernel import (
            rms_norm_cuda,  # Triton, where there is a GPU
        )

        return rms_norm_cuda(x, weight, eps)
    return rms_norm_reference(x, weight, eps)
