"""Attention as one gather and two batched products, in which the query heads of a KV head become
rows; before it, one norm and one rotation for queries and keys together.

At these sizes an operator call costs more than its work: on the CPU this takes a third of the
time of `scaled_dot_product_attention`, and repeating KV heads would cost three times as much at
eight requests.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from hydraspec_kernels.attention.e4m3 import read_kv, round_kv, store_rows, take_rows
from hydraspec_kernels.attention.plan import (
    AttentionPlan,
    GroupShape,
    Projection,
    QkvShape,
    Tile,
    TiledPlan,
)
from hydraspec_kernels.norms.cpu import NormGain, unit_norm_
from hydraspec_kernels.quantised.reference import E4M3
from hydraspec_kernels.rope.reference import apply_rope_reference


def gather_kv(
    cache: Tensor, shape: GroupShape, tile: Tile, kv_scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Transposed keys [b * Hkv, H, L] and values [b * Hkv, L, Hv] of a tile, in the mask's type."""
    if cache.dtype is E4M3:
        assert kv_scales is not None
        heads = (tile.num_requests, shape.num_kv_heads, tile.num_keys * shape.head_dim)
        numbers = take_rows(cache.view(-1, shape.head_dim), tile.kv_index).view(2, *heads)
        both = read_kv(numbers.transpose(0, 1), kv_scales, tile.mask.dtype)
        both = both.transpose(0, 1).contiguous()
    else:
        both = cache.view(-1, shape.head_dim).index_select(0, tile.kv_index)
    n, keys, dim = tile.num_requests * shape.num_kv_heads, tile.num_keys, shape.head_dim
    # Keys, then values. as_strided does in two calls what takes four with view and transpose.
    block = keys * dim
    if shape.latent_dim is not None:
        return (
            both.as_strided((n, dim, keys), (block, 1, dim), 0),
            both.as_strided((n, keys, shape.latent_dim), (block, dim, 1), 0),
        )
    return (
        both.as_strided((n, dim, keys), (block, 1, dim), 0),
        both.as_strided((n, keys, dim), (block, dim, 1), n * block),
    )


def attend(query: Tensor, keys: Tensor, values: Tensor, shape: GroupShape, tile: Tile) -> Tensor:
    """Attention of query [b * R, Hq, H] over gathered keys and values -> [b * R, Hq * Hv]."""
    b, heads, dim = tile.num_requests, shape.num_kv_heads, shape.head_dim
    rows, group = tile.row_stop - tile.row_start, shape.num_heads // shape.num_kv_heads
    if rows == 1:
        q = query.reshape(b * heads, group, dim)
    else:
        q = query.view(b, rows, heads, group, dim).transpose(1, 2)
        q = q.reshape(b * heads, rows * group, dim)
    scores = torch.baddbmm(tile.mask, q, keys, alpha=shape.scale)
    out = torch.bmm(torch.softmax(scores, -1), values)
    if rows == 1 or heads == 1:
        return out.view(b * rows, shape.num_heads * out.shape[-1])
    out = out.view(b, heads, rows, group, dim).transpose(1, 2)
    return out.reshape(b * rows, shape.num_heads * dim)


def hold_kv(plan: AttentionPlan, cache: Tensor, kv_scales: Tensor | None = None) -> AttentionPlan:
    """A plan for several passes over a cache that none of them writes: on the CPU its keys and
    values are gathered once, here. kv_scales [2, Hkv] are those of an e4m3 cache.
    """
    if isinstance(plan, TiledPlan):
        held = [gather_kv(cache, plan.shape, tile, kv_scales) for tile in plan.tiles]
        return replace(plan, held=held)
    return plan


def paged_attention_cpu(
    query: Tensor, cache: Tensor, plan: TiledPlan, kv_scales: Tensor | None = None
) -> Tensor:
    """Attention of query [T, Hq, H] -> [T, Hq * Hv]; see `attention.paged_attention`."""
    shape = plan.shape
    if len(plan.tiles) == 1:
        tile = plan.tiles[0]
        keys, values = plan.held[0] if plan.held else gather_kv(cache, shape, tile, kv_scales)
        return attend(query, keys, values, shape, tile)
    width = shape.num_heads * (shape.latent_dim or shape.head_dim)
    out = query.new_empty(plan.num_rows, width)
    for i, tile in enumerate(plan.tiles):
        rows = slice(tile.first_row, tile.first_row + tile.num_requests * tile.rows_per_request)
        part = slice(tile.row_start, tile.row_stop)
        by_request = (tile.num_requests, tile.rows_per_request)
        q = query[rows].unflatten(0, by_request)[:, part].flatten(0, 1)
        keys, values = plan.held[i] if plan.held else gather_kv(cache, shape, tile, kv_scales)
        done = attend(q, keys, values, shape, tile).view(tile.num_requests, -1, width)
        out[rows].view(*by_request, width)[:, part] = done
    return out


def with_gain(shape: QkvShape) -> QkvShape:
    """The heads with `gain` for `write_qkv_cpu`: norm weights with a row for each normed head."""
    if shape.q_weight is None:
        return shape
    rows = [shape.q_weight.expand(shape.num_heads, -1)]
    if shape.k_weight is not None:
        rows.append(shape.k_weight.expand(shape.num_kv_heads, -1))
        if shape.value_norm and not shape.k_eq_v:
            rows.append(torch.ones_like(shape.q_weight).expand(shape.num_kv_heads, -1))
    return replace(shape, gain=NormGain.of(torch.cat(rows), shape.eps))


def write_qkv_cpu(projection: Projection, cache: Tensor | None, shape: QkvShape) -> Tensor:
    """See `attention.write_qkv`; overwrites the projection, and no cache row may be -1."""
    n, kv, size, gain = shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.gain
    heads = projection.qkv.view(projection.qkv.shape[0], -1, size)
    values = None
    if cache is not None and shape.k_eq_v:
        values = heads[:, n:].clone()
        if gain is not None and shape.value_norm:
            unit_norm_(values, gain.floor).mul_(math.sqrt(size))
    rotated = heads if cache is None or shape.k_eq_v else heads[:, : n + kv]
    if gain is not None:
        unit_norm_(heads if shape.value_norm else rotated, gain.floor).mul_(gain.gain)
    apply_rope_reference(rotated, projection.cos, projection.sin)
    if cache is None:
        return heads
    if values is None:
        both = heads[:, n:].view(-1, 2, kv, size)
    else:
        both = torch.stack((heads[:, n:], values), 1)
    if cache.dtype is E4M3:
        assert shape.kv_scales is not None
        both = round_kv(both, shape.kv_scales)
    store_rows(cache, projection.cache_rows, both)
    return heads[:, :n]
