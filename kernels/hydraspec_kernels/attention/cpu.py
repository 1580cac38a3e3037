"""Attention as one gather and two batched products; the query heads of a KV head become rows.

At these sizes an operator call costs more than its work: on the CPU this takes a third of the
time of `scaled_dot_product_attention`, and repeating KV heads would cost three times as much at
eight requests.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hydraspec_kernels.attention.plan import GroupShape, Tile, TiledPlan


def gather_kv(cache: Tensor, shape: GroupShape, tile: Tile) -> tuple[Tensor, Tensor]:
    """Transposed keys [b * Hkv, H, L] and values [b * Hkv, L, Hv] of a tile."""
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
    """query [b * R, Hq, H] against gathered keys and values -> [b * R, Hq * Hv]."""
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


def paged_attention_cpu(query: Tensor, cache: Tensor, plan: TiledPlan) -> Tensor:
    """query [T, Hq, H] -> [T, Hq * Hv]."""
    shape = plan.shape
    if len(plan.tiles) == 1:
        tile = plan.tiles[0]
        keys, values = gather_kv(cache, shape, tile)
        return attend(query, keys, values, shape, tile)
    width = shape.num_heads * (shape.latent_dim or shape.head_dim)
    out = query.new_empty(plan.num_rows, width)
    for tile in plan.tiles:
        rows = slice(tile.first_row, tile.first_row + tile.num_requests * tile.rows_per_request)
        part = slice(tile.row_start, tile.row_stop)
        by_request = (tile.num_requests, tile.rows_per_request)
        q = query[rows].unflatten(0, by_request)[:, part].flatten(0, 1)
        keys, values = gather_kv(cache, shape, tile)
        done = attend(q, keys, values, shape, tile).view(tile.num_requests, -1, width)
        out[rows].view(*by_request, width)[:, part] = done
    return out
