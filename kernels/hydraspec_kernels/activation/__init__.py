"""Gated activations: gelu_tanh(gate) * up, and silu(gate) * up."""

from __future__ import annotations

import torch
from torch import Tensor

from hydraspec_kernels.activation.reference import (
    gated_activation_reference,
    gated_silu_reference,
)
from hydraspec_kernels.runtime.launch import runs_kernels

__all__ = ["gated_activation", "gated_silu"]


def gated_activation(gate_up: Tensor) -> Tensor:
    """gate_up [..., 2I], gate half first -> gelu_tanh(gate) * up, [..., I] in the same dtype."""
    if runs_kernels(gate_up) and gate_up.dtype is not torch.float64:
        from hydraspec_kernels.activation.kernel import gated_activation_cuda  # Triton

        return gated_activation_cuda(gate_up, uses_silu=False)
    return gated_activation_reference(gate_up)


def gated_silu(gate_up: Tensor) -> Tensor:
    """gate_up [..., 2I], gate half first -> silu(gate) * up, [..., I] in the same dtype."""
    if runs_kernels(gate_up) and gate_up.dtype is not torch.float64:
        from hydraspec_kernels.activation.kernel import gated_activation_cuda  # Triton

        return gated_activation_cuda(gate_up, uses_silu=True)
    return gated_silu_reference(gate_up)
