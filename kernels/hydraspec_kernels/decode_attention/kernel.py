"""Decode and verify rows from a layer's projection to the attention's result, in one kernel.

A program attends QUERIES queries of one KV head of one request, as in `paged_attention`, over its
share of the visible keys. It norms and rotates those queries itself, and writes the new keys and
values among its share to the cache before it reads them there: nobody else reads what it writes,
and tiles of one request that share a new key write the same numbers. The program that comes last
to a tile adds up the shares, in their order.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from hydraspec_kernels.decode_attention import tiling as cuts
from hydraspec_kernels.decode_attention.arguments import check_arguments
from hydraspec_kernels.decode_attention.counters import zero_counters
from hydraspec_kernels.launch.kernel import dependent_launch, start_next, wait_for_inputs
from hydraspec_kernels.paged_attention.kernel import (
    NO_KEY,
    clear_queries,
    find_keys,
    find_rows,
    load_rows,
    prefetch_keys,
)
from hydraspec_kernels.paged_attention.plan import DevicePlan
from hydraspec_kernels.qkv_write.kernel import load_heads, norm_weights, turn_heads, write_new
from hydraspec_kernels.qkv_write.reference import QkvShape

# Bytes in half precision that a program brings into the L2 while the kernel in front runs; those of
# all programs fit there several times.
PREFETCHED = 64 << 10
ADDED_SPLITS, ADDED = 4, 512  # parts of four times as many results are added up at once


@triton.jit
def _blocks(table, j, limit, BLOCK_SIZE: tl.constexpr):
    """Blocks of keys j >= 0. Divided without a sign, of which the compiler does not know."""
    return tl.load(table + (j.to(tl.uint32) // BLOCK_SIZE).to(tl.int32), mask=j < limit, other=0)


@triton.jit
def _repeat(q, QUERIES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr):
    """[QUERIES, BLOCK] -> [BLOCK_M, BLOCK], each row as often as there is room."""
    if BLOCK_M != QUERIES:
        q = tl.broadcast_to(q[:, None, :], (QUERIES, BLOCK_M // QUERIES, BLOCK))
        q = tl.reshape(q, (BLOCK_M, BLOCK))
    return q


@triton.jit
def _query_heads(tile, kv_head, QUERIES: tl.constexpr, BLOCK_M: tl.constexpr, GROUP: tl.constexpr):
    """Row of its request and head of each query [BLOCK_M] of a tile."""
    f = tile * QUERIES + tl.arange(0, BLOCK_M) // (BLOCK_M // QUERIES)
    return f // GROUP, kv_head * GROUP + f % GROUP


@triton.jit
def _split_keys(
    length, rows, tile, split_shift, least_share,
    GROUP: tl.constexpr, WINDOW: tl.constexpr, QUERIES: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """First key of a tile, behind its last, and keys of a split."""
    begin, limit = find_keys(length, rows, tile, 0, 1, GROUP, WINDOW, False, QUERIES, BLOCK_N)
    share = (tl.maximum(limit - begin, 0) + (1 << split_shift) - 1) >> split_shift
    return begin, limit, tl.maximum(share, least_share)


@triton.jit
def _attend(
    q_a, q_b, keys, table, block, begin, limit, position, scale,
    NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr, WINDOW: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Mean values [BLOCK_M, BLOCK_H] in halves over keys begin..limit, log2 of the weights' sum.

    block [BLOCK_N] is of the first keys: the table is read a step ahead, so that no key waits.

    Keys and values come in halves, all in one layout: a thread computes few addresses.
    """
    VALUES: tl.constexpr = 2 * NUM_KV_HEADS * HALF  # behind the keys
    newest = tl.minimum(position, limit - 1)
    top = tl.full([BLOCK_M], NO_KEY, tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc_a = tl.zeros([BLOCK_M, BLOCK_H], tl.float32)
    acc_b = tl.zeros([BLOCK_M, BLOCK_H], tl.float32)
    for at in tl.range(begin, limit, BLOCK_N):
        j = at + tl.arange(0, BLOCK_N)
        seen = j < limit
        at_key = (block.to(tl.int32) * BLOCK_SIZE + (j & (BLOCK_SIZE - 1))).to(tl.int64)
        at_key *= 2 * VALUES
        block = _blocks(table, j + BLOCK_N, limit, BLOCK_SIZE)
        k_a = load_rows(keys, at_key, seen, 0, HALF, BLOCK_H)
        k_b = load_rows(keys, at_key, seen, HALF, HALF, BLOCK_H)
        v_a = load_rows(keys, at_key, seen, VALUES, HALF, BLOCK_H)
        v_b = load_rows(keys, at_key, seen, VALUES + HALF, HALF, BLOCK_H)
        scores = tl.dot(q_a, tl.trans(k_a), input_precision=PRECISION)
        scores = tl.dot(q_b, tl.trans(k_b), scores, input_precision=PRECISION)
        visible = j[None, :] <= newest[:, None]
        if WINDOW > 0:
            visible = visible & (j[None, :] > position[:, None] - WINDOW)
        scores = tl.where(visible, scores * scale, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        fade = tl.exp2(top - new_top)[:, None]
        total = total * fade + weights
        weights = weights.to(v_a.dtype)
        acc_a = tl.dot(weights, v_a, acc_a * fade, input_precision=PRECISION)
        acc_b = tl.dot(weights, v_b, acc_b * fade, input_precision=PRECISION)
        top = new_top
    whole = tl.sum(total, 1)
    some = tl.where(whole > 0, whole, 1.0)
    size = tl.where(whole > 0, top + tl.log2(some), NO_KEY)
    inverse = (1.0 / some)[:, None]
    return acc_a * inverse, acc_b * inverse, size


@triton.jit
def _store_halves(
    to, at, a, b, exists, HALF: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr
):
    """Rows `at` [BLOCK_M] of heads."""
    i = tl.arange(0, BLOCK_H)[None, :]
    mask = exists[:, None] & (i < HALF)
    to += at.to(tl.int64)[:, None] * (2 * HALF) + i
    tl.store(to, a.to(to.dtype.element_ty), mask=mask)
    tl.store(to + HALF, b.to(to.dtype.element_ty), mask=mask)


@triton.jit
def _arrive(counter, share, all_keys):
    """How many splits a tile has, for the one that comes last, which sets the counter back; 0 for
    the others. The last one can read what all of them stored.
    """
    tl.debug_barrier()  # all threads have stored
    used = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") + 1
    last = used * share >= all_keys
    tl.debug_barrier()
    tl.store(counter, 0, mask=last)
    return tl.where(last, used, 0)


@triton.jit
def _add_up(
    out, partial, sums, start, rows, tile, kv_head, size_of_split, used,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    QUERIES: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_S: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The results of a tile from what its first `used` splits left: BLOCK_S splits of CHUNK times
    four results at a time, whose loads are all under way at once.
    """
    four = tl.arange(0, 4)
    queries = tl.minimum(rows * GROUP - tile * QUERIES, QUERIES)
    for at in range(0, queries * (BLOCK_V // 4), CHUNK):
        flat = at + tl.arange(0, CHUNK)
        f, d = tile * QUERIES + flat // (BLOCK_V // 4), flat % (BLOCK_V // 4) * 4
        row, head = f // GROUP, kv_head * GROUP + f % GROUP
        at_out = (start + row).to(tl.int64) * NUM_HEADS + head
        inside = d[:, None] + four[None, :] < HEAD_DIM
        top = tl.full([CHUNK], NO_KEY, tl.float32)
        whole = tl.zeros([CHUNK], tl.float32)
        acc = tl.zeros([CHUNK, 4], tl.float32)
        for first in range(0, used, BLOCK_S):
            s = first + tl.arange(0, BLOCK_S)[:, None]
            at_split = at_out[None, :] + s * size_of_split
            mask = (row < rows)[None, :] & (s < used)
            size = tl.load(sums + at_split, mask=mask, other=NO_KEY, cache_modifier=".cg")
            at_part = (at_split * HEAD_DIM + d[None, :])[:, :, None] + four[None, None, :]
            part = tl.load(
                partial + at_part,
                mask=mask[:, :, None] & inside[None],
                other=0.0,
                cache_modifier=".cg",
            )
            new_top = tl.maximum(top, tl.max(size, 0))
            weight = tl.exp2(size - new_top[None, :])
            fade = tl.exp2(top - new_top)
            whole = whole * fade + tl.sum(weight, 0)
            acc = acc * fade[:, None] + tl.sum(part * weight[:, :, None], 0)
            top = new_top
        result = (acc * (1.0 / whole)[:, None]).to(out.dtype.element_ty)
        to = out + (at_out * HEAD_DIM + d)[:, None] + four[None, :]
        tl.store(to, result, mask=(row < rows)[:, None] & inside)


@triton.jit(
    do_not_specialize=[
        *("num_rows", "num_requests", "split_shift", "least_share"),
        *("table_stride", "table_width", "num_blocks"),
    ]
)
def _decode_kernel(
    out,  # [T, Hq, H]
    partial,  # [S, T, Hq, H] float32, then log2 of the sums [S, T, Hq]
    arrived,  # [tiles, Hkv] int32, zero before and after
    cache,  # [rows, 2, Hkv, H], read and written
    qkv,  # [T, heads, H], rows qkv_stride apart
    cos,  # [T, H]
    sin,  # [T, H]
    slots,  # [T]
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
    BLOCK_SIZE: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    VALUE_NORM: tl.constexpr,
    K_EQ_V: tl.constexpr,
    WRITES: tl.constexpr,
    ONE_ROW: tl.constexpr,
    ROW_TILES: tl.constexpr,  # of a request
    QUERIES: tl.constexpr,  # of a program
    BLOCK_M: tl.constexpr,  # what the tensor cores take: queries are repeated
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_NEW: tl.constexpr,  # new rows of a request
    BLOCK_S: tl.constexpr,
    PREFETCHED: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    HEAD_DIM: tl.constexpr = 2 * HALF
    TOKEN: tl.constexpr = 2 * NUM_KV_HEADS * HEAD_DIM
    kv_head, split = tl.program_id(1), tl.program_id(2)
    request, tile = tl.program_id(0) // ROW_TILES, tl.program_id(0) % ROW_TILES
    keys = cache + kv_head * HEAD_DIM
    table = block_table + request.to(tl.int64) * table_stride
    if PDL:  # most of what it reads has been there for long
        _, rows, length = find_rows(
            seq_lens, starts, request, num_rows, num_requests, ONE_ROW, ".cg"
        )
        begin, limit, share = _split_keys(
            length, rows, tile, split_shift, least_share, GROUP, WINDOW, QUERIES, BLOCK_N
        )
        begin += split * share
        prefetch_keys(
            keys, keys + TOKEN // 2, table, begin, tl.minimum(limit, begin + share),
            table_width, num_blocks, BLOCK_SIZE, TOKEN, HEAD_DIM, False, PREFETCHED,
        )  # fmt: skip
    q_weight_a, q_weight_b = norm_weights(q_weight, Q_NORM, QUERIES, HALF, BLOCK_H)
    k_weight_a, k_weight_b = norm_weights(k_weight, WRITES and K_NORM, 2 * BLOCK_NEW, HALF, BLOCK_H)
    wait_for_inputs(PDL)
    start, rows, length = find_rows(seq_lens, starts, request, num_rows, num_requests, ONE_ROW, "")
    last = tl.program_id(0) == (num_requests - 1) * ROW_TILES
    if not ONE_ROW and last & (split == 0):  # rows of nobody
        clear_queries(
            out, start + rows, num_rows, kv_head, NUM_HEADS, GROUP, HEAD_DIM, QUERIES, 2 * BLOCK_H
        )
    first, limit, share = _split_keys(
        length, rows, tile, split_shift, least_share, GROUP, WINDOW, QUERIES, BLOCK_N
    )
    begin, all_keys = first + split * share, limit - first
    if (tile * QUERIES // GROUP >= rows) | ((split > 0) & (begin >= limit)):
        return
    limit = tl.minimum(limit, begin + share)
    block = _blocks(table, begin + tl.arange(0, BLOCK_N), limit, BLOCK_SIZE)
    row, head = _query_heads(tile, kv_head, QUERIES, QUERIES, GROUP)
    at_query = (start + row).to(tl.int64) * qkv_stride + head * HEAD_DIM
    a, b, c, s = load_heads(
        qkv, cos, sin, at_query, start + row, row < rows, QUERIES, HALF, BLOCK_H
    )
    if WRITES and limit > length - rows:
        write_new(
            cache, qkv, cos, sin, slots, k_weight_a, k_weight_b, eps, qkv_stride, kv_head,
            start, rows, length, begin, limit, NUM_HEADS, NUM_KV_HEADS, HALF,
            K_NORM, VALUE_NORM, K_EQ_V, BLOCK_NEW, BLOCK_H,
        )  # fmt: skip
    q_a, q_b, _ = turn_heads(a, b, c, s, q_weight_a, q_weight_b, eps, Q_NORM, HALF)
    tl.debug_barrier()  # what this program wrote, all of it reads
    q_a, q_b = _repeat(q_a, QUERIES, BLOCK_M, BLOCK_H), _repeat(q_b, QUERIES, BLOCK_M, BLOCK_H)
    row, head = _query_heads(tile, kv_head, QUERIES, BLOCK_M, GROUP)
    inside = (row < rows) & (tl.arange(0, BLOCK_M) % (BLOCK_M // QUERIES) == 0)
    mean_a, mean_b, size = _attend(
        q_a, q_b, keys, table, block, begin, limit, length - rows + row, scale,
        NUM_KV_HEADS, HALF, WINDOW, BLOCK_SIZE, BLOCK_M, BLOCK_N, BLOCK_H, PRECISION,
    )  # fmt: skip
    if share >= all_keys:  # nobody else has a part of this
        at_out = (start + row).to(tl.int64) * NUM_HEADS + head
        _store_halves(out, at_out, mean_a, mean_b, inside, HALF, BLOCK_M, BLOCK_H)
        return
    size_of_split = num_rows.to(tl.int64) * NUM_HEADS
    at_split = split * size_of_split + (start + row) * NUM_HEADS + head
    sums = partial + (size_of_split << split_shift) * HEAD_DIM
    _store_halves(partial, at_split, mean_a, mean_b, inside, HALF, BLOCK_M, BLOCK_H)
    tl.store(sums + at_split, size, mask=inside)
    used = _arrive(arrived + tl.program_id(0) * NUM_KV_HEADS + kv_head, share, all_keys)
    if used > 0:
        _add_up(
            out, partial, sums, start, rows, tile, kv_head, size_of_split, used,
            NUM_HEADS, GROUP, HEAD_DIM, QUERIES, 2 * BLOCK_H, BLOCK_S, CHUNK,
        )  # fmt: skip


def attend_projection_kernel(
    qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, cache: Tensor, plan: DevicePlan,
    shape: QkvShape, *, writes: bool,
) -> Tensor:  # fmt: skip
    """See `hydraspec_kernels.decode_attention.attend_projection`; the plan fits."""
    check_arguments(qkv, cos, sin, slots, cache, plan, shape, writes)
    group, num_rows, device = plan.shape, qkv.shape[0], qkv.device
    width, heads = group.head_dim, group.num_heads
    out = qkv.new_empty(num_rows, heads * width)
    if num_rows == 0:
        return out
    cut = cuts.decode_tiling(group, plan.max_rows, plan.num_requests, qkv.dtype)
    row_tiles = triton.cdiv(cuts.queries_of(group, plan.max_rows), cut.block_m)
    tiles = plan.num_requests * row_tiles
    arrived = zero_counters(device)
    partial = arrived.view(torch.float32)  # not touched without splits
    if cut.splits > 1:
        assert tiles * group.num_kv_heads <= len(arrived)
        size = num_rows * heads * cut.splits * (width + 1)
        partial = torch.empty(size, dtype=torch.float32, device=device)
    _decode_kernel[(tiles, group.num_kv_heads, cut.splits)](
        out,
        partial,
        arrived,
        cache,
        qkv,
        cos,
        sin,
        slots,
        shape.q_weight,
        shape.k_weight if writes else None,
        plan.block_table,
        plan.seq_lens,
        plan.seq_lens if plan.query_start_loc is None else plan.query_start_loc,
        num_rows,
        plan.num_requests,
        cut.splits.bit_length() - 1,
        cuts.least_share(group, cut),
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
        BLOCK_SIZE=group.block_size,
        Q_NORM=shape.q_weight is not None,
        K_NORM=shape.k_weight is not None,
        VALUE_NORM=shape.value_norm,
        K_EQ_V=shape.k_eq_v,
        WRITES=writes,
        ROW_TILES=row_tiles,
        ONE_ROW=plan.query_start_loc is None,
        QUERIES=cuts.program_queries(group, plan.max_rows, cut.block_m),
        BLOCK_M=cut.block_m,
        BLOCK_N=cut.block_n,
        BLOCK_H=max(16, triton.next_power_of_2(width // 2)),
        BLOCK_NEW=triton.next_power_of_2(plan.max_rows),
        BLOCK_S=ADDED_SPLITS,
        PREFETCHED=max(16, PREFETCHED // (4 * triton.next_power_of_2(width))),
        CHUNK=ADDED,
        PRECISION="ieee" if qkv.dtype is torch.float32 else "tf32",
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
        **dependent_launch(qkv),
    )
    return out
