"""Causal attention over a paged KV cache: variable rows a request, sliding windows, grouped heads.

A plan is made once per KV group and forward pass (`plan_attention`) and used by every layer of
the group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hydraspec_kernels.attention import latent as latent_attention
from hydraspec_kernels.attention import prefill as prefill_attention
from hydraspec_kernels.attention.paged.cpu import attend, gather_kv, paged_attention_cpu
from hydraspec_kernels.attention.paged.plan import (
    AttentionPlan,
    DevicePlan,
    GroupShape,
    Tile,
    TiledPlan,
    plan_attention,
)
from hydraspec_kernels.attention.paged.reference import planned_attention_reference
from hydraspec_kernels.runtime import breaks

__all__ = [
    "AttentionPlan",
    "DevicePlan",
    "GroupShape",
    "Tile",
    "TiledPlan",
    "attend",
    "gather_kv",
    "paged_attention",
    "plan_attention",
]


def paged_attention(query: Tensor, cache: Tensor, plan: AttentionPlan) -> Tensor:
    """query [T, Hq, H] over cache [rows, 2, Hkv, H] (contiguous) -> [T, Hq * H].

    A latent plan reads cache [rows, 1, H] and yields [T, Hq * latent_dim]. A capture in pieces is
    cut here.
    """
    return breaks.run(_attend, query, cache, plan)


def _attend(query: Tensor, cache: Tensor, plan: AttentionPlan) -> Tensor:
    if isinstance(plan, TiledPlan):
        return paged_attention_cpu(query, cache, plan)
    if query.dtype is torch.float64:  # the kernels add up in float32
        return planned_attention_reference(query, cache, plan)
    if latent_attention.fits(query, plan):
        from hydraspec_kernels.attention.latent.kernel import latent_attention_kernel

        return latent_attention_kernel(query, cache, plan)
    if prefill_attention.fits(query, plan):
        from hydraspec_kernels.attention.prefill.kernel import prefill_attention_kernel

        return prefill_attention_kernel(query, cache, plan)
    from hydraspec_kernels.attention.paged.kernel import paged_attention_kernel  # needs triton

    return paged_attention_kernel(query, cache, plan)
