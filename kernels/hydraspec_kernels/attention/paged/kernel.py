"""Paged attention in Triton: one kernel for decode, verify and prefill rows, and one that adds up
splits.

A program attends BLOCK_M queries of one KV head of one request. Queries are counted row by row and
head by head within the group (query f: row f // G, head f % G), so that a group's heads share every
key they read. Few rows a request: the grid names requests, and the visible keys are divided among
S programs. Many rows: the grid is a bound, and a program looks its request up in query_start_loc.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from hydraspec_kernels.attention.paged import tiling as cuts
from hydraspec_kernels.attention.paged.plan import DevicePlan
from hydraspec_kernels.runtime.launch_kernel import dependent_launch, start_next, wait_for_inputs

# The maximum of a query that has seen no key. Finite, so that no difference of two is NaN.
NO_KEY = tl.constexpr(-1.0e38)


@triton.jit
def load_rows(base, at, exists, FIRST: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """[N, BLOCK]: WIDTH numbers from FIRST on of the cache rows that begin at `at`, else zeros."""
    d = tl.arange(0, BLOCK)
    mask = exists[:, None]
    if BLOCK != WIDTH:
        mask = mask & (d < WIDTH)[None, :]
    return tl.load(base + at[:, None] + (FIRST + d)[None, :], mask=mask, other=0.0)


@triton.jit
def _find_request(
    starts, unit, num_requests, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_B: tl.constexpr
):
    """Which request a tile belongs to, and which of its tiles it is.

    Request b's tiles are numbered from starts[b] * G // BLOCK_M + b on, which leaves room for all
    of them; request B stands for the rows behind the last request.
    """
    index = tl.arange(0, BLOCK_B)
    start = tl.load(starts + index, mask=index <= num_requests, other=0).to(tl.int32)
    first = start * GROUP // BLOCK_M + index
    mine = (first <= unit) & (index <= num_requests)
    request = tl.sum(mine.to(tl.int32)) - 1
    return request, unit - tl.max(tl.where(mine, first, 0))


@triton.jit
def find_rows(
    seq_lens, starts, request, num_rows, num_requests, ONE_ROW: tl.constexpr, CACHE: tl.constexpr
):
    """First row, rows and length of a request; request B has the rows behind the last one."""
    exists = request < num_requests
    length = tl.load(seq_lens + request, mask=exists, other=0, cache_modifier=CACHE).to(tl.int32)
    start, rows = request, 1
    if not ONE_ROW:
        start = tl.load(starts + request, cache_modifier=CACHE).to(tl.int32)
        stop = tl.load(starts + request + 1, mask=exists, other=0, cache_modifier=CACHE)
        rows = tl.where(exists, stop.to(tl.int32), num_rows) - start
    return start, rows, length


@triton.jit
def find_keys(
    length, rows, tile, split, splits,
    GROUP: tl.constexpr, WINDOW: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Which keys begin..limit this split reads of those that some query of the tile sees.

    Others are not read: they may be freed, and hold anything.
    """
    last_row = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, rows - 1)
    begin, limit = 0, length - rows + last_row + 1
    if WINDOW > 0:
        begin = tl.maximum(length - rows + tile * BLOCK_M // GROUP - WINDOW + 1, 0)
    if SPLIT:
        share = tl.maximum(tl.cdiv(tl.maximum(limit - begin, 0), splits), BLOCK_N)
        begin += split * share
        limit = tl.minimum(limit, begin + share)
    return begin, limit


@triton.jit
def _prefetch(at, wanted):
    """Bring the 128 bytes at each wanted address into the L2."""
    tl.inline_asm_elementwise(
        "{.reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0;}",
        "=r,l,r",
        [at, wanted.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch_keys(
    keys, values, table, begin, limit, table_width, num_blocks,
    BLOCK_SIZE: tl.constexpr, TOKEN: tl.constexpr, WIDTH: tl.constexpr, LATENT: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    """Bring the first COUNT keys and values into the L2.

    This runs before the inputs can be relied on: whatever they hold, no address is outside.
    """
    LINE: tl.constexpr = 128 // (keys.dtype.element_ty.primitive_bitwidth // 8)
    LINES: tl.constexpr = triton.next_power_of_2(triton.cdiv(WIDTH, LINE))
    j = begin + tl.arange(0, COUNT)
    inside = (j >= 0) & (j < limit) & (j < table_width * BLOCK_SIZE)
    block = tl.load(table + j // BLOCK_SIZE, mask=inside, other=-1, cache_modifier=".cg")
    inside = inside & (block >= 0) & (block < num_blocks)
    line = tl.arange(0, LINES) * LINE
    wanted = inside[:, None] & (line < WIDTH)[None, :]
    at = (block.to(tl.int64) * BLOCK_SIZE + j % BLOCK_SIZE)[:, None] * TOKEN + line[None, :]
    _prefetch(keys + at, wanted)
    if not LATENT:
        _prefetch(values + at, wanted)


@triton.jit
def clear_queries(
    out, first_row, stop_row, kv_head,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Zeros for the queries of one KV head in rows first_row..stop_row."""
    d = tl.arange(0, BLOCK_V)
    for at in range(0, (stop_row - first_row) * GROUP, BLOCK_M):
        f = at + tl.arange(0, BLOCK_M)
        row = first_row + f // GROUP
        at_out = (row.to(tl.int64) * NUM_HEADS + kv_head * GROUP + f % GROUP) * VALUE_DIM
        mask = (row < stop_row)[:, None] & (d < VALUE_DIM)[None, :]
        zeros = tl.zeros([BLOCK_M, BLOCK_V], out.dtype.element_ty)
        tl.store(out + at_out[:, None] + d[None, :], zeros, mask=mask)


VARYING = ["num_rows", "num_requests", "row_tiles", "splits", "table_stride", "table_width"]


@triton.jit(do_not_specialize=[*VARYING, "num_blocks"])
def _attention_kernel(
    out,  # [T, Hq, Hv]
    partial,  # [T, Hq, S, Hv] float32, then maxima and sums [2, T, Hq, S]; SPLIT only
    query,  # [T, Hq, H], rows query_stride apart
    cache,  # [rows, 2, Hkv, H]; latent: [rows, 1, H]
    block_table,  # [B, P], rows table_stride apart
    seq_lens,  # [B]
    starts,  # [B+1]; not read with ONE_ROW
    num_rows,
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
    VALUE_DIM: tl.constexpr,  # the leading part of a key that is read apart from the rest
    LATENT: tl.constexpr,  # that part is the value, too
    WINDOW: tl.constexpr,  # 0: none
    BLOCK_SIZE: tl.constexpr,
    ONE_ROW: tl.constexpr,
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
        if PDL:  # most of what it reads has been there for long
            _, rows, length = find_rows(
                seq_lens, starts, request, num_rows, num_requests, ONE_ROW, ".cg"
            )
            begin, limit = find_keys(
                length, rows, tile, split, splits, GROUP, WINDOW, SPLIT, BLOCK_M, BLOCK_N
            )
            prefetch_keys(
                keys, values, table, begin, limit, table_width, num_blocks,
                BLOCK_SIZE, TOKEN, HEAD_DIM, LATENT, 2 * BLOCK_N,
            )  # fmt: skip
    wait_for_inputs(PDL)
    if BLOCK_B > 0:  # the last tiles of a request see most: they go first
        unit = tl.num_programs(0) - 1 - tl.program_id(0)
        request, tile = _find_request(starts, unit, num_requests, GROUP, BLOCK_M, BLOCK_B)
        table = block_table + request.to(tl.int64) * table_stride
    start, rows, length = find_rows(seq_lens, starts, request, num_rows, num_requests, ONE_ROW, "")
    if not SPLIT and BLOCK_B == 0 and not ONE_ROW:  # elsewhere others see to rows of nobody
        stop, last = start + rows, tl.program_id(0) == (num_requests - 1) * row_tiles
        until = tl.where(last, num_rows, stop)
        clear_queries(out, stop, until, kv_head, NUM_HEADS, GROUP, VALUE_DIM, BLOCK_M, BLOCK_V)
    if tile * BLOCK_M // GROUP >= rows:
        return
    f = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row, head = f // GROUP, kv_head * GROUP + f % GROUP
    inside = row < rows
    at_query = (start + row).to(tl.int64) * query_stride + head * HEAD_DIM
    q = load_rows(query, at_query, inside, 0, VALUE_DIM, BLOCK_V)
    if BLOCK_R > 0:
        q_rest = load_rows(query, at_query, inside, VALUE_DIM, HEAD_DIM - VALUE_DIM, BLOCK_R)

    begin, limit = find_keys(
        length, rows, tile, split, splits, GROUP, WINDOW, SPLIT, BLOCK_M, BLOCK_N
    )
    position = length - rows + row
    newest = tl.minimum(position, limit - 1)
    top = tl.full([BLOCK_M], NO_KEY, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for at in tl.range(begin, limit, BLOCK_N):
        j = at + tl.arange(0, BLOCK_N)
        seen = j < limit
        block = tl.load(table + j // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
        at_key = (block * BLOCK_SIZE + j % BLOCK_SIZE) * TOKEN
        k = load_rows(keys, at_key, seen, 0, VALUE_DIM, BLOCK_V)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if BLOCK_R > 0:
            k_rest = load_rows(keys, at_key, seen, VALUE_DIM, HEAD_DIM - VALUE_DIM, BLOCK_R)
            scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision=PRECISION)
        visible = j[None, :] <= newest[:, None]
        if WINDOW > 0:
            visible = visible & (j[None, :] > position[:, None] - WINDOW)
        scores = tl.where(visible, scores * scale, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        fade = tl.exp2(top - new_top)
        total = total * fade + tl.sum(weights, 1)
        v = k if LATENT else load_rows(values, at_key, seen, 0, VALUE_DIM, BLOCK_V)
        acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
        top = new_top

    d = tl.arange(0, BLOCK_V)
    mask = inside[:, None] & (d < VALUE_DIM)[None, :]
    at_out = (start + row).to(tl.int64) * NUM_HEADS + head
    if SPLIT:
        at_split = at_out * splits + split
        tl.store(partial + at_split[:, None] * VALUE_DIM + d[None, :], acc, mask=mask)
        size = num_rows.to(tl.int64) * NUM_HEADS * splits
        stats = partial + size * VALUE_DIM
        tl.store(stats + at_split, top, mask=inside)
        tl.store(stats + size + at_split, total, mask=inside)
    else:
        acc /= tl.where(total > 0, total, 1.0)[:, None]
        result = acc.to(out.dtype.element_ty)
        tl.store(out + at_out[:, None] * VALUE_DIM + d[None, :], result, mask=mask)


@triton.jit(do_not_specialize=["num_rows", "num_requests", "splits"])
def combine_kernel(
    out,  # [T, Hq, Hv]
    partial,  # as above
    starts,  # [B+1]; not read with ONE_ROW
    num_rows,
    num_requests,
    splits,
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ONE_ROW: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait_for_inputs(PDL)
    used = num_rows
    if not ONE_ROW:  # nobody wrote the splits of rows behind the last request
        used = tl.load(starts + num_requests)
    at = tl.program_id(0).to(tl.int64)  # row * Hq + head
    s = tl.arange(0, BLOCK_S)
    split, exists = at * splits + s, s < splits
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    size = num_rows.to(tl.int64) * NUM_HEADS * splits
    top = tl.load(partial + size * VALUE_DIM + split, mask=exists, other=NO_KEY)
    total = tl.load(partial + size * (VALUE_DIM + 1) + split, mask=exists, other=0.0)
    part = split[:, None] * VALUE_DIM + d[None, :]
    mask = exists[:, None] & (d < VALUE_DIM)[None, :]
    acc = tl.load(partial + part, mask=mask, other=0.0)
    weight = tl.exp2(top - tl.max(top, 0))
    whole = tl.sum(total * weight, 0)
    result = tl.sum(acc * weight[:, None], 0) / tl.where(whole > 0, whole, 1.0)
    result = tl.where(at // NUM_HEADS < used, result, 0.0)
    tl.store(out + at * VALUE_DIM + d, result.to(out.dtype.element_ty), mask=d < VALUE_DIM)


def check_arguments(query: Tensor, cache: Tensor, plan: DevicePlan) -> None:
    shape = plan.shape
    assert query.dtype is cache.dtype
    assert query.shape[1:] == (shape.num_heads, shape.head_dim), query.shape
    assert query.stride()[1:] == (shape.head_dim, 1), "a row's heads are contiguous"
    assert cache.is_contiguous(), "tokens of the cache are contiguous"
    assert cache[0].numel() == shape.head_rows * shape.head_dim, cache.shape
    assert plan.block_table.stride(1) == 1, "rows of the block table are contiguous"
    if plan.query_start_loc is None:
        assert query.shape[0] == plan.num_requests, "without query_start_loc a row is a request"


def paged_attention_kernel(query: Tensor, cache: Tensor, plan: DevicePlan) -> Tensor:
    """query [T, Hq, H] over cache [rows, 2, Hkv, H] or [rows, 1, H] -> [T, Hq * Hv].

    A row of the query is contiguous, the cache is whole; T may be more than the plan's.
    """
    check_arguments(query, cache, plan)
    shape, num_rows, num_requests = plan.shape, query.shape[0], plan.num_requests
    group, value_dim = shape.num_heads // shape.num_kv_heads, shape.latent_dim or shape.head_dim
    rest = shape.head_dim - value_dim
    out = query.new_empty(num_rows, shape.num_heads * value_dim)
    if num_rows == 0:
        return out
    cut = cuts.tiling(shape, plan.max_rows, num_requests, query.dtype)
    if plan.max_rows <= cuts.MOST_SPLIT_ROWS:
        block_b, row_tiles = 0, triton.cdiv(plan.max_rows * group, cut.block_m)
        tiles = num_requests * row_tiles
    else:
        block_b, row_tiles = max(64, triton.next_power_of_2(num_requests + 1)), 0
        tiles = num_rows * group // cut.block_m + num_requests + 1
    partial = out
    if cut.splits > 1:
        size = num_rows * shape.num_heads * cut.splits * (value_dim + 2)
        partial = torch.empty(size, dtype=torch.float32, device=query.device)
    starts = plan.seq_lens if plan.query_start_loc is None else plan.query_start_loc
    options = dependent_launch(query)
    _attention_kernel[(tiles, shape.num_kv_heads, cut.splits)](
        out,
        partial,
        query,
        cache,
        plan.block_table,
        plan.seq_lens,
        starts,
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
        BLOCK_SIZE=shape.block_size,
        ONE_ROW=plan.query_start_loc is None,
        SPLIT=cut.splits > 1,
        BLOCK_M=cut.block_m,
        BLOCK_N=cut.block_n,
        BLOCK_V=max(16, triton.next_power_of_2(value_dim)),
        BLOCK_R=max(16, triton.next_power_of_2(rest)) if rest else 0,
        BLOCK_B=block_b,
        PRECISION="ieee" if query.dtype is torch.float32 else "tf32",
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
        **options,
    )
    if cut.splits > 1:
        block_d = min(128, triton.next_power_of_2(value_dim))
        combine_kernel[(num_rows * shape.num_heads, triton.cdiv(value_dim, block_d))](
            out,
            partial,
            starts,
            num_rows,
            num_requests,
            cut.splits,
            NUM_HEADS=shape.num_heads,
            VALUE_DIM=value_dim,
            ONE_ROW=plan.query_start_loc is None,
            BLOCK_S=8 if cut.splits <= 8 else cuts.MAX_SPLITS,
            BLOCK_D=block_d,
            num_warps=4,
            **options,
        )
    return out
