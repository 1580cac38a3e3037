"""Paged attention in Triton, for decode, verify and prefill rows.

With few rows per request the grid names requests, and the visible keys are divided among S splits.
With many rows the grid is an upper bound, and a program looks its request up in query_start_loc.
Where some requests have few rows and others many, two launches may attend them (`splits_of_few`).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from hydraspec_kernels.attention import tiling as cuts
from hydraspec_kernels.attention.plan import DevicePlan
from hydraspec_kernels.attention.splits_kernel import combine_splits
from hydraspec_kernels.attention.tiles_kernel import (
    NO_KEY,
    clear_queries,
    find_keys,
    find_request,
    find_rows,
    load_rows,
    newest_keys,
    own_rows,
    prefetch_keys,
    sum_rows,
    times_scale,
)
from hydraspec_kernels.runtime.launch_kernel import dependent_launch, start_next, wait_for_inputs

VARYING = ["num_rows", "num_requests", "row_tiles", "splits", "table_stride", "table_width"]


@triton.jit(do_not_specialize=[*VARYING, "num_blocks"])
def _attention_kernel(
    out,  # [T, Hq, Hv]
    partial,  # [N, Hq, S, Hv] float32, then maxima and sums [2, N, Hq, S]; SPLIT only (`sum_rows`)
    query,  # [T, Hq, H], rows query_stride apart
    cache,  # [rows, 2, Hkv, H]; latent: [rows, 1, H]
    kv_scales,  # [2, Hkv] float32, of an e4m3 cache
    block_table,  # [B, P], rows table_stride apart
    seq_lens,  # [B]
    starts,  # [B+1]; not read with ONE_ROW
    sees_until,  # [T]; read with MASK "until" alone
    num_rows,  # T
    num_requests,
    row_tiles,  # of a request; unless BLOCK_B
    splits,  # S
    query_stride,
    table_stride,
    table_width,  # P
    num_blocks,  # of the cache
    scale,  # times log2(e)
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,  # leading part of a key, loaded apart from the rest
    LATENT: tl.constexpr,  # that part is the value too
    WINDOW: tl.constexpr,  # 0: none
    MASK: tl.constexpr,  # "causal", "block" or "causal_block"; "until": causal, and sees_until
    BLOCK_SIZE: tl.constexpr,
    ONE_ROW: tl.constexpr,
    ONLY: tl.constexpr,  # the requests attended: "all", or see `own_rows`
    SPLIT: tl.constexpr,  # S > 1
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,  # for the rest of a key; 0: none
    BLOCK_B: tl.constexpr,  # more than B: look requests up; 0: the grid names them
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    TOKEN: tl.constexpr = HEAD_DIM if LATENT else 2 * NUM_KV_HEADS * HEAD_DIM
    kv_head, split = tl.program_id(1), tl.program_id(2)
    keys, values = cache + kv_head * HEAD_DIM, cache + (NUM_KV_HEADS + kv_head) * HEAD_DIM
    if BLOCK_B == 0:
        request, tile = tl.program_id(0) // row_tiles, tl.program_id(0) % row_tiles
        table = block_table + request.to(tl.int64) * table_stride
        if PDL:  # most keys were written by earlier steps
            _, rows, length = find_rows(
                seq_lens, starts, request, num_rows, num_requests, ONE_ROW, ".cg"
            )
            begin, limit = find_keys(
                length, rows, tile, split, splits, GROUP, WINDOW, SPLIT, BLOCK_M, BLOCK_N, MASK
            )
            if ONLY == "few":  # many programs have no rows
                rows = own_rows(rows, request, num_requests, ONLY)
                limit = tl.where(tile * BLOCK_M // GROUP < rows, limit, begin)
            prefetch_keys(
                keys, values, table, begin, limit, table_width, num_blocks,
                BLOCK_SIZE, TOKEN, HEAD_DIM, LATENT, 2 * BLOCK_N,
            )  # fmt: skip
    wait_for_inputs(PDL)
    if BLOCK_B > 0:  # the last tiles of a request see most keys: they go first
        unit = tl.num_programs(0) - 1 - tl.program_id(0)
        request, tile = find_request(starts, unit, num_requests, GROUP, BLOCK_M, BLOCK_B)
        table = block_table + request.to(tl.int64) * table_stride
    start, rows, length = find_rows(seq_lens, starts, request, num_rows, num_requests, ONE_ROW, "")
    if not SPLIT and BLOCK_B == 0 and not ONE_ROW:  # else other programs clear unused rows
        stop, last = start + rows, tl.program_id(0) == (num_requests - 1) * row_tiles
        until = tl.where(last, num_rows, stop)
        clear_queries(out, stop, until, kv_head, NUM_HEADS, GROUP, VALUE_DIM, BLOCK_M, BLOCK_V)
    if tile * BLOCK_M // GROUP >= own_rows(rows, request, num_requests, ONLY):
        return
    f = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row, head = f // GROUP, kv_head * GROUP + f % GROUP
    inside = row < rows
    at_query = (start + row).to(tl.int64) * query_stride + head * HEAD_DIM
    q = load_rows(query, at_query, inside, 0, VALUE_DIM, BLOCK_V)
    if BLOCK_R > 0:
        q_rest = load_rows(query, at_query, inside, VALUE_DIM, HEAD_DIM - VALUE_DIM, BLOCK_R)
    begin, limit = find_keys(
        length, rows, tile, split, splits, GROUP, WINDOW, SPLIT, BLOCK_M, BLOCK_N, MASK
    )
    position = length - rows + row
    scale = times_scale(scale, kv_scales, kv_head)
    newest = newest_keys(sees_until, start + row, position, limit, inside, MASK)
    top, total = tl.full([BLOCK_M], NO_KEY, tl.float32), tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for at in tl.range(begin, limit, BLOCK_N):
        j = at + tl.arange(0, BLOCK_N)
        seen = j < limit
        block = tl.load(table + j // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
        at_key = (block * BLOCK_SIZE + j % BLOCK_SIZE) * TOKEN
        k = load_rows(keys, at_key, seen, 0, VALUE_DIM, BLOCK_V).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if BLOCK_R > 0:
            k_rest = load_rows(keys, at_key, seen, VALUE_DIM, HEAD_DIM - VALUE_DIM, BLOCK_R)
            scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision=PRECISION)
        visible = j[None, :] <= newest[:, None]
        if WINDOW > 0 and (MASK == "causal" or MASK == "until"):
            visible = visible & (j[None, :] > position[:, None] - WINDOW)
        scores = tl.where(visible, scores * scale, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        fade = tl.exp2(top - new_top)
        total = total * fade + tl.sum(weights, 1)
        v = k if LATENT else load_rows(values, at_key, seen, 0, VALUE_DIM, BLOCK_V).to(q.dtype)
        acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
        top = new_top
    acc = times_scale(acc, kv_scales, NUM_KV_HEADS + kv_head)
    if SPLIT:
        first, parts = sum_rows(start, num_rows, request, num_requests, ONLY)
        at_split = ((first + row).to(tl.int64) * NUM_HEADS + head) * splits + split
        size = parts.to(tl.int64) * NUM_HEADS * splits
        _store_sums(partial, at_split, size, acc, top, total, inside, VALUE_DIM, BLOCK_V)
    else:
        acc /= tl.where(total > 0, total, 1.0)[:, None]
        at_out = (start + row).to(tl.int64) * NUM_HEADS + head
        _store_rows(out, at_out, acc, inside, VALUE_DIM, BLOCK_V)


@triton.jit
def _store_rows(to, at, acc, inside, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Stores the first WIDTH columns of rows acc [N, BLOCK], each as row `at` of `to`."""
    d = tl.arange(0, BLOCK)
    mask = inside[:, None] & (d < WIDTH)[None, :]
    tl.store(to + at[:, None] * WIDTH + d[None, :], acc.to(to.dtype.element_ty), mask=mask)


@triton.jit
def _store_sums(
    partial, at, size, acc, top, total, inside, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Stores the sums of a split, their maxima and weights' sums, `size` of each in all."""
    _store_rows(partial, at, acc, inside, WIDTH, BLOCK)
    stats = partial + size * WIDTH
    tl.store(stats + at, top, mask=inside)
    tl.store(stats + size + at, total, mask=inside)


def paged_attention_kernel(
    query: Tensor, cache: Tensor, plan: DevicePlan, kv_scales: Tensor | None = None
) -> Tensor:
    """Attention of query [T, Hq, H] over cache [rows, 2, Hkv, H] or [rows, 1, H] -> [T, Hq * Hv].
    kv_scales [2, Hkv] are those of an e4m3 cache.

    A row of the query is contiguous; T may exceed the plan's number of rows.
    """
    plan.check(query, cache)
    shape, num_rows = plan.shape, query.shape[0]
    value_dim = shape.latent_dim or shape.head_dim
    out = query.new_empty(num_rows, shape.num_heads * value_dim)
    if num_rows == 0:
        return out
    cut, row_tiles = cuts.paged_tiling(shape, plan.max_rows, plan.num_requests, query.dtype), 0
    if plan.max_rows <= cuts.MOST_SPLIT_ROWS:
        row_tiles = triton.cdiv(cuts.queries_of(shape, plan.max_rows), cut.block_m)
    apart = cuts.splits_of_few(plan, query.dtype) > 1
    only = "many" if apart else "all"
    _attend(out, query, cache, plan, kv_scales, cut, row_tiles=row_tiles, only=only)
    if apart:
        attend_few_rows(out, query, cache, plan, kv_scales)
    return out


def attend_few_rows(
    out: Tensor, query: Tensor, cache: Tensor, plan: DevicePlan, kv_scales: Tensor | None = None
) -> None:
    """Computes the rows of out [T, Hq * H] of the requests with at most FEW_ROWS rows, whose keys
    are divided; other rows are left alone."""
    cut = cuts.few_rows_tiling(plan, query.dtype)
    assert cut.splits > 1
    row_tiles = triton.cdiv(cuts.queries_of(plan.shape, cuts.FEW_ROWS), cut.block_m)
    _attend(out, query, cache, plan, kv_scales, cut, row_tiles=row_tiles, only="few")


def _attend(
    out: Tensor,
    query: Tensor,
    cache: Tensor,
    plan: DevicePlan,
    kv_scales: Tensor | None,
    cut: cuts.Tiling,
    *,
    row_tiles: int,
    only: str,
) -> None:
    """Computes the rows of `only` some requests, and adds up splits; row_tiles: tiles of each
    request, 0: they are looked up."""
    shape, few_rows = plan.shape, cuts.FEW_ROWS if only == "few" else 0
    value_dim = shape.latent_dim or shape.head_dim
    partial = out
    if cut.splits > 1:
        rows = plan.num_requests * few_rows or query.shape[0]
        size = rows * shape.num_heads * cut.splits * (value_dim + 2)
        partial = torch.empty(size, dtype=torch.float32, device=query.device)
    _launch(out, partial, query, cache, kv_scales, plan, cut, row_tiles=row_tiles, only=only)
    if cut.splits > 1:
        block_d = min(128, triton.next_power_of_2(value_dim))
        combine_splits(out, partial, plan, splits=cut.splits, block_d=block_d, few_rows=few_rows)


def _launch(
    out: Tensor,
    partial: Tensor,
    query: Tensor,
    cache: Tensor,
    kv_scales: Tensor | None,
    plan: DevicePlan,
    cut: cuts.Tiling,
    *,
    row_tiles: int,
    only: str,
) -> None:
    """Launches the kernel; see `_attend`."""
    shape, num_rows, num_requests = plan.shape, query.shape[0], plan.num_requests
    group, value_dim = shape.num_heads // shape.num_kv_heads, shape.latent_dim or shape.head_dim
    rest = shape.head_dim - value_dim
    if row_tiles:
        block_b, tiles = 0, num_requests * row_tiles
    else:
        block_b = max(64, triton.next_power_of_2(num_requests + 1))
        tiles = num_rows * group // cut.block_m + num_requests + 1
    _attention_kernel[(tiles, shape.num_kv_heads, cut.splits)](
        out,
        partial,
        query,
        cache,
        kv_scales,
        plan.block_table,
        plan.seq_lens,
        plan.starts,
        plan.sees_until,
        num_rows,
        num_requests,
        row_tiles,
        cut.splits,
        query.stride(0),
        plan.block_table.stride(0),
        plan.block_table.shape[1],
        cache.shape[0] // shape.block_size,
        shape.scale * math.log2(math.e),
        NUM_HEADS=shape.num_heads,
        NUM_KV_HEADS=shape.num_kv_heads,
        HEAD_DIM=shape.head_dim,
        VALUE_DIM=value_dim,
        LATENT=shape.latent_dim is not None,
        WINDOW=shape.window or 0,
        MASK=shape.mask if plan.sees_until is None else "until",
        BLOCK_SIZE=shape.block_size,
        ONE_ROW=plan.query_start_loc is None,
        ONLY=only,
        SPLIT=cut.splits > 1,
        BLOCK_M=cut.block_m,
        BLOCK_N=cut.block_n,
        BLOCK_V=max(16, triton.next_power_of_2(value_dim)),
        BLOCK_R=max(16, triton.next_power_of_2(rest)) if rest else 0,
        BLOCK_B=block_b,
        PRECISION="ieee" if query.dtype is torch.float32 else "tf32",
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
        **dependent_launch(query),
    )
