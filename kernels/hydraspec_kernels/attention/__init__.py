"""Attention over a paged KV cache: variable rows per request, sliding windows, GQA; causal, or for
blocks of drafted tokens (`RowMask`).

A plan is made once per KV group and forward pass (`plan_attention`) and used by every layer of the
group. `reference.py` specifies every operation; each kernel has a file:

| kernel | attends |
|---|---|
| decode | few rows per request, from the layer's projection on (norm, RoPE, cache write) |
| latent | few rows per request over a latent cache (DeepSeek), on Hopper |
| prefill | many queries of a request, on Hopper, over caches of the queries' type |
| paged | everything else |
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hydraspec_kernels.attention.cpu import hold_kv, paged_attention_cpu, with_gain, write_qkv_cpu
from hydraspec_kernels.attention.hopper_tiling import fits_latent, fits_prefill
from hydraspec_kernels.attention.plan import (
    AttentionPlan,
    DevicePlan,
    GroupShape,
    Projection,
    QkvShape,
    RowMask,
    RowSegment,
    Tile,
    TiledPlan,
    plan_attention,
)
from hydraspec_kernels.attention.reference import planned_attention_reference, write_qkv_reference
from hydraspec_kernels.attention.tiling import MOST_FUSED_ROWS, fits_decode, fits_rounding
from hydraspec_kernels.quantised.records import RoundedRows, Rounding
from hydraspec_kernels.quantised.reference import E4M3
from hydraspec_kernels.runtime import breaks
from hydraspec_kernels.runtime.launch import runs_kernels

__all__ = [
    "MOST_FUSED_ROWS",
    "AttentionPlan",
    "DevicePlan",
    "GroupShape",
    "Projection",
    "QkvShape",
    "RowMask",
    "RowSegment",
    "Tile",
    "TiledPlan",
    "attend_projection",
    "hold_kv",
    "paged_attention",
    "plan_attention",
    "with_gain",
    "write_qkv",
]


def paged_attention(
    query: Tensor, cache: Tensor, plan: AttentionPlan, kv_scales: Tensor | None = None
) -> Tensor:
    """Attention of query [T, Hq, H] over cache [rows, 2, Hkv, H] (contiguous) -> [T, Hq * H].

    A latent plan reads cache [rows, 1, H] and yields [T, Hq * latent_dim]. A piecewise capture
    leaves this call eager. A cache in e4m3 holds numbers to be multiplied by kv_scales [2, Hkv] in
    float32, those of keys, then of values.
    """
    return breaks.run(_attend, query, cache, plan, kv_scales)


def _attend(query: Tensor, cache: Tensor, plan: AttentionPlan, kv_scales: Tensor | None) -> Tensor:
    if isinstance(plan, TiledPlan):
        return paged_attention_cpu(query, cache, plan, kv_scales)
    if query.dtype is torch.float64:  # the kernels add up in float32
        return planned_attention_reference(query, cache, plan, kv_scales)
    if cache.dtype is E4M3:  # the prefill kernel converts no keys
        from hydraspec_kernels.attention.paged_kernel import paged_attention_kernel

        return paged_attention_kernel(query, cache, plan, kv_scales)
    if fits_latent(query, plan):
        from hydraspec_kernels.attention.latent_kernel import latent_attention_kernel as run
    elif fits_prefill(query, plan):
        from hydraspec_kernels.attention.prefill_kernel import prefill_attention_kernel as run
    else:
        from hydraspec_kernels.attention.paged_kernel import paged_attention_kernel as run
    return run(query, cache, plan)


def write_qkv(projection: Projection, cache: Tensor | None, shape: QkvShape) -> Tensor:
    """Norms and rotates the heads of a projection, and writes keys and values into the cache.

    Returns queries [T, Hq, H]. cache [rows, 2, Hkv, H] takes the key and value of token t at
    cache_rows[t]; -1 (a padding row) writes nothing. cache None: a layer that shares KV, whose
    projection holds query heads only and whose cache_rows are not read.
    """
    if runs_kernels(projection.qkv) and projection.qkv.dtype is not torch.float64:
        from hydraspec_kernels.attention.qkv_kernel import write_qkv_cuda  # Triton

        return write_qkv_cuda(projection, cache, shape)
    if projection.qkv.is_cuda or projection.has_padding or (shape.has_norms and shape.gain is None):
        return write_qkv_reference(projection, cache, shape)
    return write_qkv_cpu(projection, cache, shape)


def attend_projection(
    projection: Projection,
    cache: Tensor,
    plan: AttentionPlan,
    shape: QkvShape,
    *,
    writes: bool,
    rounding: Rounding | None = None,
) -> Tensor | RoundedRows:
    """Runs `write_qkv`, then `paged_attention`, in one kernel if that is faster -> [T, Hq * H],
    rounded as `rounding` says if that kernel can.

    cache is [rows, 2, Hkv, H]. writes false: a layer that shares KV, which only reads the cache.
    Each of the projection's cache rows is -1, or is given by its row's position in the plan's block
    table. If some request has more than MOST_FUSED_ROWS rows, requests may read keys and values
    that others of the call write. A piecewise capture leaves the attention eager.
    """
    narrow = projection.qkv.element_size() < 8
    if isinstance(plan, DevicePlan) and narrow and fits_decode(plan):
        args = projection, cache, plan, shape, writes
        if rounding is None or not fits_rounding(plan.shape, projection.qkv.shape[0], rounding):
            return breaks.run(_attend_fused, *args, None)
        numbers, scales = breaks.run(_attend_fused, *args, rounding)
        qkv = projection.qkv
        return RoundedRows(numbers, scales, qkv.shape[0], qkv.dtype)
    query = write_qkv(projection, cache if writes else None, shape)
    return paged_attention(query, cache, plan, shape.kv_scales)


def _attend_fused(
    projection: Projection,
    cache: Tensor,
    plan: DevicePlan,
    shape: QkvShape,
    writes: bool,
    rounding: Rounding | None,
) -> Any:
    from hydraspec_kernels.attention.decode_kernel import attend_projection_kernel  # Triton

    return attend_projection_kernel(
        projection, cache, plan, shape, writes=writes, rounding=rounding
    )
