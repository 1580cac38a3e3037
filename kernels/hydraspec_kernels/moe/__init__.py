"""Mixture of experts: routing and the weighted sum of the chosen experts."""

from __future__ import annotations

from torch import Tensor

from hydraspec_kernels.gated_activation import gated_activation
from hydraspec_kernels.moe.cpu import Gated, moe_dense, moe_gather
from hydraspec_kernels.moe.reference import route_grouped_reference, route_reference

__all__ = ["moe", "route", "route_grouped"]


def route(logits: Tensor, k: int, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Router logits [T, E] -> weights [T, k] float32 (or wider) and experts [T, k]; scale [E]
    comes last.
    """
    return route_reference(logits, k, scale)


def route_grouped(
    logits: Tensor, bias: Tensor, k: int, num_groups: int, kept_groups: int
) -> tuple[Tensor, Tensor]:
    """Router logits [T, E] and selection bias [E] -> sigmoid scores [T, k], not renormalised, and
    experts [T, k] out of the kept_groups best groups.
    """
    return route_grouped_reference(logits, bias, k, num_groups, kept_groups)


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
    # Gathering copies T * k experts and computes as many; running all reads E in place and
    # computes T times E.
    few = 2 * experts.numel() <= gate_up.shape[0]
    return (moe_gather if few else moe_dense)(x, weights, experts, gate_up, down, gated)
