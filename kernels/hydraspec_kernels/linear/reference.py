"""Specification of the linears: a product, then a bias, a soft cap, a gated activation (Shazeer
2020), or the gate of a per-layer input (Gemma 3n).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hydraspec_kernels.activation import Activation, gated_activation, soft_cap_

__all__ = [
    "gated_linear_reference",
    "linear_partials_reference",
    "linear_reference",
    "scaled_gelu_linear_reference",
]


def linear_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None
) -> Tensor:
    """Linear map y = x [T, K] @ weight [K, N] + bias [N]; then softcap * tanh(y / softcap)."""
    y = torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)
    return y if softcap is None else soft_cap_(y, softcap)


def linear_partials_reference(x: Tensor, weight: Tensor) -> Tensor:
    """Product of x [T, K] and weight [K, N] as one partial sum, [1, T, N]."""
    return torch.mm(x, weight)[None]


def gated_linear_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation
) -> Tensor:
    """Product act(x @ gate) * (x @ up) for weight [K, 2I] and bias [2I], gate half first."""
    y = torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)
    return gated_activation(y, activation)


def scaled_gelu_linear_reference(x: Tensor, weight: Tensor, factor: Tensor) -> Tensor:
    """Product gelu_tanh(x @ weight) * factor, [T, N]."""
    return F.gelu(torch.mm(x, weight), approximate="tanh").mul_(factor)
