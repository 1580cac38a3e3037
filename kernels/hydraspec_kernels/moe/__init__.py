"""Mixture of experts: routers, and the weighted sum of the chosen experts."""

from __future__ import annotations

import torch
from torch import Tensor

from hydraspec_kernels.activation import Activation
from hydraspec_kernels.moe.cpu import moe_dense, moe_gather
from hydraspec_kernels.moe.quantised import quantised_moe
from hydraspec_kernels.moe.reference import route_grouped_reference, route_reference
from hydraspec_kernels.runtime.launch import runs_kernels

__all__ = ["moe", "quantised_moe", "route", "route_grouped"]


def route(logits: Tensor, k: int, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax router: logits [T, E] -> weights [T, k] float32 (or wider) of the k best experts,
    which are made to sum to 1, then multiplied by scale [E]; and experts [T, k].
    """
    if runs_kernels(logits) and logits.dtype is not torch.float64:
        from hydraspec_kernels.moe.routing_kernel import route_cuda  # Triton, where there is a GPU

        return route_cuda(logits, k, scale)
    return route_reference(logits, k, scale)


def route_grouped(
    logits: Tensor, bias: Tensor, k: int, num_groups: int, kept_groups: int
) -> tuple[Tensor, Tensor]:
    """DeepSeek's router: logits [T, E] and selection bias [E] -> sigmoid scores [T, k], not
    renormalised, and experts [T, k] of the kept_groups best groups.
    """
    # Narrow scores tie, and the kernel breaks ties in another order than the reference.
    if runs_kernels(logits) and logits.dtype is torch.float32:
        from hydraspec_kernels.moe.routing_kernel import route_grouped_cuda  # Triton, as above

        return route_grouped_cuda(logits, bias, k, num_groups, kept_groups)
    return route_grouped_reference(logits, bias, k, num_groups, kept_groups)


def moe(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: Activation = "gelu_tanh",
) -> Tensor:
    """Weighted sum [T, D] of the k chosen experts of each row of x [T, D]; weights and experts
    [T, k], gate_up [E, D, 2I], down [E, I, D].
    """
    if runs_kernels(x) and x.dtype is not torch.float64:
        from hydraspec_kernels.moe.kernel import moe_cuda  # Triton, as above

        return moe_cuda(x, weights, experts, gate_up, down, activation)
    # moe_gather copies and computes T * k experts; moe_dense reads E in place and computes T * E.
    few = 2 * experts.numel() <= gate_up.shape[0]
    return (moe_gather if few else moe_dense)(x, weights, experts, gate_up, down, activation)
