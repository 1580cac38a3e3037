"""RMSNorm with a plain weight, and its weightless core for callers that fold the weight away."""

from __future__ import annotations

import torch
from torch import Tensor

from hydraspec_kernels.launch import runs_kernels
from hydraspec_kernels.rms_norm.cpu import unit_norm, unit_norm_
from hydraspec_kernels.rms_norm.reference import rms_norm_reference

__all__ = ["rms_norm", "unit_norm", "unit_norm_"]


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm of x [..., H] with weight [H] (None: no weight), rounded once to x's dtype.

    A weight of several rows [.., H], one for each head, runs as plain operators everywhere.
    """
    if runs_kernels(x) and x.dtype is not torch.float64 and (weight is None or weight.dim() == 1):
        from hydraspec_kernels.rms_norm.kernel import rms_norm_cuda  # Triton, where there is a GPU

        return rms_norm_cuda(x, weight, eps)
    return rms_norm_reference(x, weight, eps)
