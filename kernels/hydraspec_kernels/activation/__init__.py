"""Gated activations: act(gate) * up."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hydraspec_kernels.activation.reference import gated_activation_reference
from hydraspec_kernels.runtime.launch import runs_kernels

__all__ = ["Activation", "gated_activation"]

Activation = Literal["gelu_tanh", "silu"]


def gated_activation(gate_up: Tensor, activation: Activation = "gelu_tanh") -> Tensor:
    """Product act(gate) * up [..., I] of gate_up [..., 2I], gate half first, in the same dtype."""
    if runs_kernels(gate_up) and gate_up.dtype is not torch.float64:
        from hydraspec_kernels.activation.kernel import gated_activation_cuda  # Triton

        return gated_activation_cuda(gate_up, activation)
    return gated_activation_reference(gate_up, activation)
