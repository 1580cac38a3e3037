"""Experts with quantised matrices, without shapes that depend on routing.

On CUDA a grouped kernel reads the narrow numbers of the chosen experts (`plan`). Elsewhere, and for
formats without a kernel, experts are unpacked: the chosen ones if few are used, else all of them.
Every expert rounds its rows and its inner rows as its checkpoint says.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hydraspec_kernels.activation import Activation, gated_activation
from hydraspec_kernels.moe.plan import Experts, Maxima, have_kernel, inner_maxima
from hydraspec_kernels.quantised import quantised_linear
from hydraspec_kernels.runtime.launch import runs_kernels

# Numbers of a chunk of experts held at once where all of them run: weights, and rows of each.
MAX_CHUNK_NUMBERS = 1 << 26
_NARROW = (torch.bfloat16, torch.float16)


def quantised_moe(
    x: Tensor,
    w: Tensor,
    e: Tensor,
    experts: Experts,
    activation: Activation,
    maxima: Maxima | None = None,
) -> Tensor:
    """Weighted sum [T, D] of the k chosen experts of each row of x [T, D]; w and e [T, k].

    maxima: largest magnitudes of whole inner rows from a rank's part of them, where ranks divide
    the inner width; None: they do not.
    """
    if runs_kernels(x) and x.dtype in _NARROW and have_kernel(experts):
        from hydraspec_kernels.moe.quantised_kernel import quantised_moe_cuda  # Triton

        return quantised_moe_cuda(x, w, e, experts, activation, maxima)
    (rows, k), width = e.shape, x.shape[1]
    count, inner = experts[0].data.shape[:2]
    if 2 * e.numel() <= count:
        each = x[:, None].expand(rows, k, width).reshape(rows * k, 1, width)
        out = _outputs(each, _chosen(experts, e.reshape(-1)), activation, maxima)
        return torch.bmm(w.to(x.dtype)[:, None], out.view(rows, k, width)).squeeze(1)
    share = w.new_zeros(rows, count).scatter_(1, e, w).to(x.dtype).t()[:, :, None]
    step = max(1, MAX_CHUNK_NUMBERS // (2 * max(inner, width) * (rows + max(inner, width))))
    total = torch.zeros_like(x)
    for start in range(0, count, step):
        part = slice(start, min(start + step, count))
        each = x.expand(part.stop - start, *x.shape)
        out = _outputs(each, _chosen(experts, part), activation, maxima)
        total.add_(out.mul_(share[part]).sum(0))
    return total


def _chosen(experts: Experts, which: Tensor | slice) -> Experts:
    gate, up, down = experts
    return gate.of_experts(which), up.of_experts(which), down.of_experts(which)


def _outputs(x: Tensor, experts: Experts, activation: Activation, maxima: Maxima | None) -> Tensor:
    """Outputs [E, T, D] of E experts for x [E, T, D]."""
    gate, up, down = experts
    both = torch.cat((quantised_linear(x, gate), quantised_linear(x, up)), -1)
    inner = gated_activation(both.flatten(0, 1), activation).unflatten(0, x.shape[:2])
    return quantised_linear(inner, down, inner_maxima(inner, down, maxima))
