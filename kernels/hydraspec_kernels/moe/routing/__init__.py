"""Routers of mixtures of experts: softmax, and DeepSeek's sigmoid over groups."""

from __future__ import annotations

import torch
from torch import Tensor

from hydraspec_kernels.moe.routing.reference import route_grouped_reference, route_reference
from hydraspec_kernels.runtime.launch import runs_kernels

__all__ = ["route", "route_grouped"]


def route(logits: Tensor, k: int, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Router logits [T, E] -> weights [T, k] float32 (or wider) and experts [T, k]; scale [E]
    comes last.
    """
    if runs_kernels(logits) and logits.dtype is not torch.float64:
        from hydraspec_kernels.moe.routing.kernel import route_cuda  # Triton, where there is a GPU

        return route_cuda(logits, k, scale)
    return route_reference(logits, k, scale)


def route_grouped(
    logits: Tensor, bias: Tensor, k: int, num_groups: int, kept_groups: int
) -> tuple[Tensor, Tensor]:
    """Router logits [T, E] and selection bias [E] -> sigmoid scores [T, k], not renormalised, and
    experts [T, k] out of the kept_groups best groups.
    """
    # Narrow scores tie, and then only the reference's order is the reference's choice.
    if runs_kernels(logits) and logits.dtype is torch.float32:
        from hydraspec_kernels.moe.routing.kernel import route_grouped_cuda  # Triton

        return route_grouped_cuda(logits, bias, k, num_groups, kept_groups)
    return route_grouped_reference(logits, bias, k, num_groups, kept_groups)
