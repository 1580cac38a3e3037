"""Causal attention over a paged KV cache: variable rows a request, sliding windows, grouped heads.

A plan is made once per KV group and forward pass (`plan_attention`) and used by every layer of
the group.
"""

from __future__ import annotations

from torch import Tensor

from hydraspec_kernels.paged_attention.cpu import attend, gather_kv, paged_attention_cpu
from hydraspec_kernels.paged_attention.plan import AttentionPlan, GroupShape, Tile, plan_attention

__all__ = [
    "AttentionPlan",
    "GroupShape",
    "Tile",
    "attend",
    "gather_kv",
    "paged_attention",
    "plan_attention",
]


def paged_attention(query: Tensor, cache: Tensor, plan: AttentionPlan) -> Tensor:
    """query [T, Hq, H] over cache [rows, 2, Hkv, H] (contiguous) -> [T, Hq * H].

    A latent plan reads cache [rows, 1, H] and yields [T, Hq * latent_dim].
    """
    return paged_attention_cpu(query, cache, plan)
