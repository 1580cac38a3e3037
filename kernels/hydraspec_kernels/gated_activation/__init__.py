"""gelu_tanh(gate) * up."""

from __future__ import annotations

from torch import Tensor

from hydraspec_kernels.gated_activation.reference import gated_activation_reference

__all__ = ["gated_activation"]


def gated_activation(gate_up: Tensor) -> Tensor:
    """gate_up [..., 2I], gate half first -> [..., I] in the same dtype."""
    return gated_activation_reference(gate_up)
