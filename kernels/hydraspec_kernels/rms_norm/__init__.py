"""RMSNorm with a plain weight, and its weightless core for callers that fold the weight away."""

from __future__ import annotations

from torch import Tensor

from hydraspec_kernels.rms_norm.cpu import unit_norm, unit_norm_
from hydraspec_kernels.rms_norm.reference import rms_norm_reference

__all__ = ["rms_norm", "unit_norm", "unit_norm_"]


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm of x [..., H] with weight [H] (None: no weight), rounded once to x's dtype."""
    return rms_norm_reference(x, weight, eps)
