"""Linear maps of few rows: x [T, K] times weight [K, N], and the next operators in the same kernel.

On CUDA a weight is the [K, N] view of [N, K] storage, as checkpoints hold it. Other strides, more
than 128 rows, and shapes at which the library is faster (see plan.py) run `torch.mm`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hydraspec_kernels.activation import Activation
from hydraspec_kernels.linear.plan import tiling_for
from hydraspec_kernels.linear.reference import (
    gated_linear_reference,
    linear_partials_reference,
    linear_reference,
    scaled_gelu_linear_reference,
)
from hydraspec_kernels.runtime.launch import runs_kernels

__all__ = ["Activation", "gated_linear", "linear", "linear_partials", "scaled_gelu_linear"]


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, softcap: float | None = None
) -> Tensor:
    """Linear map y = x [T, K] @ weight [K, N] + bias [N] -> [T, N] in x's dtype; with softcap
    softcap * tanh(y / softcap).
    """
    if runs_kernels(x):
        end = "" if softcap is None else "softcap"
        if tiling := tiling_for(x, weight, end):
            from hydraspec_kernels.linear.kernel import launch  # Triton

            out = x.new_empty(x.shape[0], weight.shape[1])
            return launch(out, x, weight, tiling, end=end, bias=bias, softcap=softcap)
    return linear_reference(x, weight, bias, softcap)


def linear_partials(x: Tensor, weight: Tensor) -> Tensor:
    """Partial sums [S, T, N] of x [T, K] @ weight [K, N], for the consumer to add up.

    S is fixed by shape and strides. The kernel's sums are float32; the library's is a single one in
    x's dtype, and the CPU's result is the whole sum [T, N].
    """
    if not runs_kernels(x):
        return torch.mm(x, weight)
    if tiling := tiling_for(x, weight, partials=True):
        from hydraspec_kernels.linear.kernel import launch  # Triton

        sizes = tiling.splits, x.shape[0], weight.shape[1]
        return launch(x.new_empty(sizes, dtype=torch.float32), x, weight, tiling)
    return linear_partials_reference(x, weight)


def gated_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: Activation
) -> Tensor:
    """Product act(x @ gate) * (x @ up) -> [T, I] for x [T, K], weight [K, 2I] and bias [2I], gate
    half first.
    """
    if runs_kernels(x) and (tiling := tiling_for(x, weight, activation)):
        from hydraspec_kernels.linear.kernel import launch  # Triton

        out = x.new_empty(x.shape[0], weight.shape[1] // 2)
        return launch(out, x, weight, tiling, end=activation, bias=bias)
    return gated_linear_reference(x, weight, bias, activation)


def scaled_gelu_linear(x: Tensor, weight: Tensor, factor: Tensor) -> Tensor:
    """Gated per-layer input gelu_tanh(x [T, K] @ weight [K, N]) * factor [T, N] -> [T, N].

    factor may be a view with any row stride, such as [:, layer] of [T, L, N].
    """
    if runs_kernels(x) and (tiling := tiling_for(x, weight, "scaled_gelu")):
        from hydraspec_kernels.linear.kernel import launch  # Triton

        out = x.new_empty(x.shape[0], weight.shape[1])
        return launch(out, x, weight, tiling, end="scaled_gelu", factor=factor)
    return scaled_gelu_linear_reference(x, weight, factor)
