"""Fused decode: from a layer's projection to the attention's result in one kernel.

A program attends QUERIES queries of one KV head of one request over its share of the visible keys.
It norms and rotates those queries itself, and writes the new keys and values of its share to the
cache before it reads them there: no other program reads them, except that tiles of one request that
share a new key all write the same numbers. Splits are added up in their order, by the program that
ends last for a tile or by a second kernel.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from hydraspec_kernels.attention import tiling as cuts
from hydraspec_kernels.attention.counters import zero_counters
from hydraspec_kernels.attention.key_loop_kernel import attend_keys, key_blocks
from hydraspec_kernels.attention.plan import DevicePlan, Projection, QkvShape
from hydraspec_kernels.attention.qkv_kernel import (
    load_heads,
    norm_weights,
    rotate_heads,
    write_new,
)
from hydraspec_kernels.attention.results_kernel import clear_rest, store_result, store_split
from hydraspec_kernels.attention.splits_kernel import add_splits, split_keys
from hydraspec_kernels.attention.tiles_kernel import find_rows, prefetch_keys
from hydraspec_kernels.quantised.records import Rounding
from hydraspec_kernels.quantised.round_kernel import empty_rounded
from hydraspec_kernels.runtime.launch import shared_bytes
from hydraspec_kernels.runtime.launch_kernel import dependent_launch, start_next, wait_for_inputs


@triton.jit
def _prefetch_share(
    keys, table, seq_lens, starts, request, tile, split, num_rows, num_requests, split_shift,
    least_share, table_width, num_blocks,
    GROUP: tl.constexpr, WINDOW: tl.constexpr, QUERIES: tl.constexpr, BLOCK_N: tl.constexpr,
    ONE_ROW: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, MASK: tl.constexpr, PREFETCHED: tl.constexpr,
):  # fmt: skip
    """Brings the first keys and values of a split into the L2."""
    TOKEN: tl.constexpr = 2 * NUM_KV_HEADS * HEAD_DIM
    _, rows, length = find_rows(seq_lens, starts, request, num_rows, num_requests, ONE_ROW, ".cg")
    begin, limit, share = split_keys(
        length, rows, tile, split_shift, least_share, GROUP, WINDOW, QUERIES, BLOCK_N, MASK
    )
    begin += split * share
    prefetch_keys(
        keys, keys + TOKEN // 2, table, begin, tl.minimum(limit, begin + share),
        table_width, num_blocks, BLOCK_SIZE, TOKEN, HEAD_DIM, False, PREFETCHED,
    )  # fmt: skip


@triton.jit
def _repeat(q, QUERIES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr):
    """Repeats each row of q [QUERIES, BLOCK] BLOCK_M / QUERIES times -> [BLOCK_M, BLOCK]."""
    if BLOCK_M != QUERIES:
        q = tl.broadcast_to(q[:, None, :], (QUERIES, BLOCK_M // QUERIES, BLOCK))
        q = tl.reshape(q, (BLOCK_M, BLOCK))
    return q


@triton.jit
def _query_heads(tile, kv_head, QUERIES: tl.constexpr, BLOCK_M: tl.constexpr, GROUP: tl.constexpr):
    """Row within the request, and head, of each query [BLOCK_M] of a tile."""
    f = tile * QUERIES + tl.arange(0, BLOCK_M) // (BLOCK_M // QUERIES)
    return f // GROUP, kv_head * GROUP + f % GROUP


@triton.jit(
    do_not_specialize=[
        *("num_rows", "num_requests", "split_shift", "least_share"),
        *("table_stride", "table_width", "num_blocks"),
    ]
)
def _decode_kernel(
    out,  # [T, Hq, H]
    scales,  # [Hq * H / ROUNDED, NEXT_GROUP] float32, of results in e4m3
    partial,  # [S, T, Hq, H] float32, then log2 of the sums [S, T, Hq]
    arrived,  # [tiles, Hkv] int32, zero before and after
    cache,  # [rows, 2, Hkv, H], read and written
    qkv,  # [T, heads, H], rows qkv_stride apart
    cos,  # [T, H]
    sin,  # [T, H]
    cache_rows,  # [T]
    kv_scales,  # [2, Hkv] float32, of an e4m3 cache
    q_weight,  # [H]
    k_weight,  # [H]
    block_table,  # [B, P], rows table_stride apart
    seq_lens,  # [B]
    starts,  # [B+1]; not read with ONE_ROW
    num_rows,
    num_requests,
    split_shift,  # log2 of S
    least_share,  # keys of a split
    qkv_stride,
    table_stride,
    table_width,  # P
    num_blocks,  # of the cache
    scale,  # times log2(e)
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,  # of a head
    WINDOW: tl.constexpr,  # 0: none
    MASK: tl.constexpr,  # a RowMask
    BLOCK_SIZE: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    VALUE_NORM: tl.constexpr,
    K_EQ_V: tl.constexpr,
    WRITES: tl.constexpr,
    ONE_ROW: tl.constexpr,
    ROW_TILES: tl.constexpr,  # of a request
    QUERIES: tl.constexpr,  # of a program
    BLOCK_M: tl.constexpr,  # the tensor cores' minimum: queries are repeated
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_NEW: tl.constexpr,  # new rows of a request
    TRANSPOSED: tl.constexpr,  # queries are columns
    ADDS: tl.constexpr,  # this kernel adds up the splits
    ROUNDED: tl.constexpr,  # results that share a scale; 0: they are not rounded to e4m3
    PREFETCHED: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    HEAD_DIM: tl.constexpr = 2 * HALF
    kv_head, split = tl.program_id(1), tl.program_id(2)
    request, tile = tl.program_id(0) // ROW_TILES, tl.program_id(0) % ROW_TILES
    keys = cache + kv_head * HEAD_DIM
    table = block_table + request.to(tl.int64) * table_stride
    if PDL:  # most keys were written by earlier steps
        _prefetch_share(
            keys, table, seq_lens, starts, request, tile, split, num_rows, num_requests,
            split_shift, least_share, table_width, num_blocks, GROUP, WINDOW, QUERIES, BLOCK_N,
            ONE_ROW, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, MASK, PREFETCHED,
        )  # fmt: skip
    q_weight_a, q_weight_b = norm_weights(q_weight, Q_NORM, QUERIES, HALF, BLOCK_H)
    k_weight_a, k_weight_b = norm_weights(k_weight, WRITES and K_NORM, 2 * BLOCK_NEW, HALF, BLOCK_H)
    wait_for_inputs(PDL)
    start, rows, length = find_rows(seq_lens, starts, request, num_rows, num_requests, ONE_ROW, "")
    if not ONE_ROW and (split == 0) & (tl.program_id(0) == (num_requests - 1) * ROW_TILES):
        clear_rest(
            out, scales, start + rows, num_rows, kv_head, NUM_HEADS, GROUP, HEAD_DIM, QUERIES,
            2 * BLOCK_H, ROUNDED,
        )  # fmt: skip
    first, limit, share = split_keys(
        length, rows, tile, split_shift, least_share, GROUP, WINDOW, QUERIES, BLOCK_N, MASK
    )
    begin, all_keys = first + split * share, limit - first
    if (tile * QUERIES // GROUP >= rows) | ((split > 0) & (begin >= limit)):
        return
    limit = tl.minimum(limit, begin + share)
    block = key_blocks(table, begin + tl.arange(0, BLOCK_N), limit, BLOCK_SIZE)
    row, head = _query_heads(tile, kv_head, QUERIES, QUERIES, GROUP)
    at_query = (start + row).to(tl.int64) * qkv_stride + head * HEAD_DIM
    a, b, c, s = load_heads(
        qkv, cos, sin, at_query, start + row, row < rows, QUERIES, HALF, BLOCK_H
    )
    if WRITES and limit > length - rows:
        write_new(
            cache, qkv, cos, sin, cache_rows, kv_scales, k_weight_a, k_weight_b, eps, qkv_stride,
            kv_head, start, rows, length, begin, limit, NUM_HEADS, NUM_KV_HEADS, HALF,
            K_NORM, VALUE_NORM, K_EQ_V, BLOCK_NEW, BLOCK_H,
        )  # fmt: skip
    q_a, q_b, _ = rotate_heads(a, b, c, s, q_weight_a, q_weight_b, eps, Q_NORM, HALF)
    tl.debug_barrier()  # all threads read what any of this program's threads wrote
    q_a, q_b = _repeat(q_a, QUERIES, BLOCK_M, BLOCK_H), _repeat(q_b, QUERIES, BLOCK_M, BLOCK_H)
    row, head = _query_heads(tile, kv_head, QUERIES, BLOCK_M, GROUP)
    inside = (row < rows) & (tl.arange(0, BLOCK_M) % (BLOCK_M // QUERIES) == 0)
    position = length - rows + row
    if MASK == "block":  # all see the last key
        position = tl.zeros_like(position) + length
    mean_a, mean_b, size = attend_keys(
        q_a, q_b, keys, kv_scales, kv_head, table, block, begin, limit, position, scale,
        NUM_KV_HEADS, HALF, WINDOW if MASK == "causal" else 0, BLOCK_SIZE, BLOCK_M, BLOCK_N,
        BLOCK_H, TRANSPOSED, PRECISION,
    )  # fmt: skip
    at_out = (start + row).to(tl.int64) * NUM_HEADS + head
    if share >= all_keys:  # the only split of this tile
        store_result(
            out, scales, at_out, mean_a.to(qkv.dtype.element_ty), mean_b.to(qkv.dtype.element_ty),
            inside, NUM_HEADS, HALF, BLOCK_M, BLOCK_H, ROUNDED,
        )  # fmt: skip
        return
    store_split(
        out, scales, partial, arrived + tl.program_id(0) * NUM_KV_HEADS + kv_head, at_out, mean_a,
        mean_b, size, inside, split, share, all_keys, split_shift, num_rows, NUM_HEADS, HALF,
        BLOCK_M, BLOCK_H, ADDS, ROUNDED, qkv.dtype.element_ty,
    )  # fmt: skip


def _check(
    projection: Projection, cache: Tensor, plan: DevicePlan, shape: QkvShape, writes: bool
) -> None:
    projection.check(shape, cache, writes=writes)
    plan.check_cache(cache, projection.qkv.shape[0])
    assert (shape.num_heads, shape.head_dim) == (plan.shape.num_heads, plan.shape.head_dim)
    assert cache.shape[1:] == (2, plan.shape.num_kv_heads, plan.shape.head_dim), cache.shape
    assert not writes or projection.cache_rows.stride(0) == 1
    assert projection.qkv.dtype is projection.cos.dtype is projection.sin.dtype


def attend_projection_kernel(
    projection: Projection,
    cache: Tensor,
    plan: DevicePlan,
    shape: QkvShape,
    *,
    writes: bool,
    rounding: Rounding | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """See `attention.attend_projection`; the plan must satisfy `supports_decode`. With a rounding:
    the memory of numbers and of scales of `RoundedRows`."""
    _check(projection, cache, plan, shape, writes)
    qkv = projection.qkv
    group, num_rows, device = plan.shape, qkv.shape[0], qkv.device
    width, heads = group.head_dim, group.num_heads
    scales = None
    if rounding is None:
        out = qkv.new_empty(num_rows, heads * width)
    else:
        rounded = empty_rounded(num_rows, heads * width, rounding, qkv)
        out, scales = rounded.padded, rounded.by_group
    found = out if scales is None else (out, scales)
    if num_rows == 0:
        return found
    max_keys = plan.block_table.shape[1] * group.block_size
    busy = plan.num_busy or plan.num_requests
    cut = cuts.decode_tiling(
        group, plan.max_rows, busy, qkv.dtype, max_keys=max_keys, room=shared_bytes(device)
    )
    row_tiles = triton.cdiv(cuts.queries_of(group, plan.max_rows), cut.block_m)
    tiles = plan.num_requests * row_tiles
    arrived = zero_counters(device)
    partial = arrived.view(torch.float32)  # unused without splits
    queries = cuts.program_queries(group, plan.max_rows, cut.block_m)
    least_share = cuts.least_share(group, cut)
    if cut.splits > 1:
        assert cut.adds_apart or tiles * group.num_kv_heads <= len(arrived)
        size = num_rows * heads * cut.splits * (width + 1)
        partial = torch.empty(size, dtype=torch.float32, device=device)
    _decode_kernel[(tiles, group.num_kv_heads, cut.splits)](
        out,
        scales,
        partial,
        arrived,
        cache,
        qkv,
        projection.cos,
        projection.sin,
        projection.cache_rows,
        shape.kv_scales,
        shape.q_weight,
        shape.k_weight if writes else None,
        plan.block_table,
        plan.seq_lens,
        plan.starts,
        num_rows,
        plan.num_requests,
        cut.splits.bit_length() - 1,
        least_share,
        qkv.stride(0),
        plan.block_table.stride(0),
        plan.block_table.shape[1],
        cache.shape[0] // group.block_size,
        group.scale * math.log2(math.e),
        shape.eps,
        NUM_HEADS=heads,
        NUM_KV_HEADS=group.num_kv_heads,
        HALF=width // 2,
        WINDOW=group.window or 0,
        MASK=group.mask,
        BLOCK_SIZE=group.block_size,
        Q_NORM=shape.q_weight is not None,
        K_NORM=shape.k_weight is not None,
        VALUE_NORM=shape.value_norm,
        K_EQ_V=shape.k_eq_v,
        WRITES=writes,
        ROW_TILES=row_tiles,
        ONE_ROW=plan.query_start_loc is None,
        QUERIES=queries,
        BLOCK_M=cut.block_m,
        BLOCK_N=cut.block_n,
        BLOCK_H=max(16, triton.next_power_of_2(width // 2)),
        BLOCK_NEW=triton.next_power_of_2(plan.max_rows),
        TRANSPOSED=cut.transposed,
        ADDS=not cut.adds_apart,
        ROUNDED=0 if rounding is None else rounding.group,
        PREFETCHED=max(16, cut.prefetched // (4 * triton.next_power_of_2(width))),
        PRECISION="ieee" if qkv.dtype is torch.float32 else "tf32",
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
        **dependent_launch(qkv),
    )
    if cut.splits > 1 and cut.adds_apart:
        add_splits(
            out,
            scales,
            partial,
            plan,
            num_rows=num_rows,
            dtype=qkv.dtype,
            splits=cut.splits,
            least_share=least_share,
            row_tiles=row_tiles,
            queries=queries,
            block_n=cut.block_n,
        )
    return found
