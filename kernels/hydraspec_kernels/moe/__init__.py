"""Mixture of experts: the weighted sum of the chosen experts (`routing` chooses them)."""

from __future__ import annotations

import torch
from torch import Tensor

from hydraspec_kernels.activation import gated_activation, gated_silu
from hydraspec_kernels.moe.cpu import Gated, moe_dense, moe_gather
from hydraspec_kernels.moe.routing import route, route_grouped
from hydraspec_kernels.runtime.launch import runs_kernels

__all__ = ["moe", "route", "route_grouped"]


def moe(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gated: Gated = gated_activation,
) -> Tensor:
    """x [T, D], weights and experts [T, k], gate_up [E, D, 2I], down [E, I, D] -> [T, D].

    gated joins the gate and up halves, [..., 2I] -> [..., I].
    """
    if runs_kernels(x) and x.dtype is not torch.float64 and gated in (gated_activation, gated_silu):
        from hydraspec_kernels.moe.kernel import moe_cuda  # Triton, where there is a GPU

        return moe_cuda(x, weights, experts, gate_up, down, uses_silu=gated is gated_silu)
    # Gathering copies T * k experts and computes as many; running all reads E in place and
    # computes T times E.
    few = 2 * experts.numel() <= gate_up.shape[0]
    return (moe_gather if few else moe_dense)(x, weights, experts, gate_up, down, gated)
