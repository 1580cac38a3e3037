"""Decode and verify rows from a layer's projection to the attention's result, in one kernel.

A program attends BLOCK_M queries of one KV head of one request, as in `paged_attention`, over its
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
PREFETCHED = 128 << 10
ADDED = 4096  # times four: partial results that are read at once in adding up
MOST_ADDED = 512  # times four: results that they make
# Tiles of a launch with splits are fewer than the programs that fill the device.
COUNTERS = 1024

_counters: dict[torch.device, Tensor] = {}


@triton.jit
def _block_of(j, BLOCK_SIZE: tl.constexpr):
    """j // BLOCK_SIZE of j >= 0; the compiler does not know the sign."""
    return (j.to(tl.uint32) // BLOCK_SIZE).to(tl.int32)


@triton.jit
def _split_keys(
    length, rows, tile, split_shift,
    GROUP: tl.constexpr, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """First key of a tile, behind its last, and keys of a split."""
    begin, limit = find_keys(length, rows, tile, 0, 1, GROUP, WINDOW, False, BLOCK_M, BLOCK_N)
    share = (tl.maximum(limit - begin, 0) + (1 << split_shift) - 1) >> split_shift
    return begin, limit, tl.maximum(share, BLOCK_N)


@triton.jit
def _attend(
    q_a, q_b, keys, table, begin, limit, position, scale,
    NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr, WINDOW: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Mean values [BLOCK_M, BLOCK_H] in halves over keys begin..limit, log2 of the weights' sum.

    Keys and values come in halves, all in one layout: a thread computes few addresses.
    """
    VALUES: tl.constexpr = 2 * NUM_KV_HEADS * HALF  # behind the keys
    newest = tl.minimum(position, limit - 1)
    top = tl.full([BLOCK_M], NO_KEY, tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc_a = tl.zeros([BLOCK_M, BLOCK_H], tl.float32)
    acc_b = tl.zeros([BLOCK_M, BLOCK_H], tl.float32)
    j = begin + tl.arange(0, BLOCK_N)
    # A step ahead, so that loads of keys need not wait for it.
    block = tl.load(table + _block_of(j, BLOCK_SIZE), mask=j < limit, other=0)
    for at in tl.range(begin, limit, BLOCK_N):
        j = at + tl.arange(0, BLOCK_N)
        seen = j < limit
        at_key = (block.to(tl.int32) * BLOCK_SIZE + (j & (BLOCK_SIZE - 1))).to(tl.int64)
        at_key *= 2 * VALUES
        ahead = j + BLOCK_N
        block = tl.load(table + _block_of(ahead, BLOCK_SIZE), mask=ahead < limit, other=0)
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
def _add_up(
    out, partial, sums, start, rows, tile, kv_head, size_of_split, used,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_S: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The results of a tile from what its first `used` splits left; CHUNK times four at a time, so
    that all loads of a step are under way at once.
    """
    s, four = tl.arange(0, BLOCK_S)[:, None], tl.arange(0, 4)
    queries = tl.minimum(rows * GROUP - tile * BLOCK_M, BLOCK_M)
    for at in range(0, queries * (BLOCK_V // 4), CHUNK):
        flat = at + tl.arange(0, CHUNK)
        f, d = tile * BLOCK_M + flat // (BLOCK_V // 4), flat % (BLOCK_V // 4) * 4
        row, head = f // GROUP, kv_head * GROUP + f % GROUP
        at_out = (start + row).to(tl.int64) * NUM_HEADS + head
        at_split = at_out[None, :] + s * size_of_split
        mask = (row < rows)[None, :] & (s < used)
        size = tl.load(sums + at_split, mask=mask, other=NO_KEY, cache_modifier=".cg")
        at_part = (at_split * HEAD_DIM + d[None, :])[:, :, None] + four[None, None, :]
        inside = d[:, None] + four[None, :] < HEAD_DIM
        part = tl.load(
            partial + at_part,
            mask=mask[:, :, None] & inside[None],
            other=0.0,
            cache_modifier=".cg",
        )
        weight = tl.exp2(size - tl.max(size, 0)[None, :])
        weight *= (1.0 / tl.sum(weight, 0))[None, :]
        result = tl.sum(part * weight[:, :, None], 0).to(out.dtype.element_ty)
        to = out + (at_out * HEAD_DIM + d)[:, None] + four[None, :]
        tl.store(to, result, mask=(row < rows)[:, None] & inside)


@triton.jit(
    do_not_specialize=[
        *("num_rows", "num_requests", "split_shift"),
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
    BLOCK_M: tl.constexpr,
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
            length, rows, tile, split_shift, GROUP, WINDOW, BLOCK_M, BLOCK_N
        )
        begin += split * share
        prefetch_keys(
            keys, keys + NUM_KV_HEADS * HEAD_DIM, table, begin, tl.minimum(limit, begin + share),
            table_width, num_blocks, BLOCK_SIZE, TOKEN, HEAD_DIM, False, PREFETCHED,
        )  # fmt: skip
    q_weight_a, q_weight_b = norm_weights(q_weight, Q_NORM, BLOCK_M, HALF, BLOCK_H)
    k_weight_a, k_weight_b = norm_weights(k_weight, WRITES and K_NORM, 2 * BLOCK_NEW, HALF, BLOCK_H)
    wait_for_inputs(PDL)
    start, rows, length = find_rows(seq_lens, starts, request, num_rows, num_requests, ONE_ROW, "")
    if not ONE_ROW and split == 0:  # rows of nobody
        last = tl.program_id(0) == (num_requests - 1) * ROW_TILES
        until = tl.where(last, num_rows, start + rows)
        clear_queries(
            out, start + rows, until, kv_head, NUM_HEADS, GROUP, HEAD_DIM, BLOCK_M, 2 * BLOCK_H
        )
    first, limit, share = _split_keys(
        length, rows, tile, split_shift, GROUP, WINDOW, BLOCK_M, BLOCK_N
    )
    begin, all_keys = first + split * share, limit - first
    if (tile * BLOCK_M // GROUP >= rows) | ((split > 0) & (begin >= limit)):
        return
    limit = tl.minimum(limit, begin + share)

    f = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row, head = f // GROUP, kv_head * GROUP + f % GROUP
    inside = row < rows
    at_query = (start + row).to(tl.int64) * qkv_stride + head * HEAD_DIM
    a, b, c, s = load_heads(qkv, cos, sin, at_query, start + row, inside, BLOCK_M, HALF, BLOCK_H)
    if WRITES and limit > length - rows:
        write_new(
            cache, qkv, cos, sin, slots, k_weight_a, k_weight_b, eps, qkv_stride, kv_head,
            start, rows, length, begin, limit, NUM_HEADS, NUM_KV_HEADS, HALF,
            K_NORM, VALUE_NORM, K_EQ_V, BLOCK_NEW, BLOCK_H,
        )  # fmt: skip
    q_a, q_b, _ = turn_heads(a, b, c, s, q_weight_a, q_weight_b, eps, Q_NORM, HALF)
    tl.debug_barrier()  # what this program wrote, all of it reads
    mean_a, mean_b, size = _attend(
        q_a, q_b, keys, table, begin, limit, length - rows + row, scale,
        NUM_KV_HEADS, HALF, WINDOW, BLOCK_SIZE, BLOCK_M, BLOCK_N, BLOCK_H, PRECISION,
    )  # fmt: skip

    i = tl.arange(0, BLOCK_H)[None, :]
    mask = inside[:, None] & (i < HALF)
    at_out = (start + row).to(tl.int64) * NUM_HEADS + head
    if share >= all_keys:  # nobody else has a part of this
        to = out + at_out[:, None] * HEAD_DIM + i
        tl.store(to, mean_a.to(out.dtype.element_ty), mask=mask)
        tl.store(to + HALF, mean_b.to(out.dtype.element_ty), mask=mask)
        return
    size_of_split = num_rows.to(tl.int64) * NUM_HEADS
    at_split = split * size_of_split + at_out
    sums = partial + (size_of_split << split_shift) * HEAD_DIM
    tl.store(partial + at_split[:, None] * HEAD_DIM + i, mean_a, mask=mask)
    tl.store(partial + at_split[:, None] * HEAD_DIM + HALF + i, mean_b, mask=mask)
    tl.store(sums + at_split, size, mask=inside)
    tl.debug_barrier()
    counter = arrived + tl.program_id(0) * NUM_KV_HEADS + kv_head
    used = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") + 1
    if used * share >= all_keys:  # the last one
        tl.debug_barrier()
        tl.store(counter, 0)
        _add_up(
            out, partial, sums, start, rows, tile, kv_head, size_of_split, used,
            NUM_HEADS, GROUP, HEAD_DIM, BLOCK_M, 2 * BLOCK_H, BLOCK_S, CHUNK,
        )  # fmt: skip


def _zero_counters(device: torch.device) -> Tensor:
    """Kernels of one device follow one another, and each leaves the counters as it found them."""
    counters = _counters.get(device)
    if counters is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("attention must run once before its first capture")
        counters = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
        _counters[device] = counters
    return counters


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
    row_tiles = triton.cdiv(plan.max_rows * heads // group.num_kv_heads, cut.block_m)
    tiles = plan.num_requests * row_tiles
    partial = arrived = out
    if cut.splits > 1:
        assert tiles * group.num_kv_heads <= COUNTERS
        arrived = _zero_counters(device)
        size = num_rows * heads * cut.splits * (width + 1)
        partial = torch.empty(size, dtype=torch.float32, device=device)
    block_s = max(4, cut.splits)
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
        BLOCK_M=cut.block_m,
        BLOCK_N=cut.block_n,
        BLOCK_H=max(16, triton.next_power_of_2(width // 2)),
        BLOCK_NEW=triton.next_power_of_2(plan.max_rows),
        BLOCK_S=block_s,
        PREFETCHED=max(16, PREFETCHED // (4 * triton.next_power_of_2(width))),
        CHUNK=min(ADDED // block_s, MOST_ADDED),
        PRECISION="ieee" if qkv.dtype is torch.float32 else "tf32",
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
        **dependent_launch(qkv),
    )
    return out
