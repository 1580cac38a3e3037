"""Gated activations, act(gate) * up, and the soft cap of logits."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hydraspec_kernels.activation.reference import gated_activation_reference, soft_cap_reference_
from hydraspec_kernels.quantised.records import RoundedRows, Rounding
from hydraspec_kernels.runtime.launch import runs_kernels

__all__ = ["Activation", "gated_activation", "rounded_activation", "soft_cap_"]

Activation = Literal["gelu_tanh", "silu"]


def gated_activation(gate_up: Tensor, activation: Activation = "gelu_tanh") -> Tensor:
    """Product act(gate) * up [..., I] of gate_up [..., 2I], gate half first, in the same dtype."""
    if runs_kernels(gate_up) and gate_up.dtype is not torch.float64:
        from hydraspec_kernels.activation.kernel import gated_activation_cuda  # Triton

        return gated_activation_cuda(gate_up, activation)
    return gated_activation_reference(gate_up, activation)


def rounded_activation(gate_up: Tensor, activation: Activation, rounding: Rounding) -> RoundedRows:
    """`gated_activation` of gate_up [T, 2I] on CUDA, rounded to e4m3 for the product that reads it,
    each group or row by a scale of its own (`quantised.rounding_before`)."""
    from hydraspec_kernels.activation.kernel import rounded_activation_cuda  # Triton

    return rounded_activation_cuda(gate_up, activation, rounding)


def soft_cap_(logits: Tensor, softcap: float) -> Tensor:
    """Replaces contiguous logits [..., N] by softcap * tanh(logits / softcap); returns them.

    Half precision on CUDA takes one pass over memory, and rounds once; elsewhere each of the three
    operators rounds.
    """
    if runs_kernels(logits) and logits.dtype in (torch.bfloat16, torch.float16):
        from hydraspec_kernels.activation.softcap_kernel import soft_cap_cuda_  # Triton

        return soft_cap_cuda_(logits, softcap)
    return soft_cap_reference_(logits, softcap)
