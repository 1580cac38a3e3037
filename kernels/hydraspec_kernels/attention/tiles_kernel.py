"""Rows and keys that a program attends, and how it loads them; parts of the Triton kernels.

A program attends BLOCK_M queries of one KV head of one request. Queries are counted row by row, and
head by head within the group (query f: row f // G, head f % G), so that the heads of a group share
every key they read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hydraspec_kernels.attention import tiling
from hydraspec_kernels.runtime.launch_kernel import prefetch_l2_where

# Initial maximum of a query's scores. Finite, so that no difference of two maxima is NaN.
NO_KEY = tl.constexpr(-1.0e38)
FEW_ROWS = tl.constexpr(tiling.FEW_ROWS)


@triton.jit
def load_rows(base, at, exists, FIRST: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Columns [N, BLOCK] from FIRST on of rows that begin at `at`; zeros after WIDTH columns."""
    d = tl.arange(0, BLOCK)
    mask = exists[:, None]
    if BLOCK != WIDTH:
        mask = mask & (d < WIDTH)[None, :]
    return tl.load(base + at[:, None] + (FIRST + d)[None, :], mask=mask, other=0.0)


@triton.jit
def times_scale(x, kv_scales, at):
    """The product of x and one of an e4m3 cache's scales [2 * Hkv]; x if there are none."""
    if kv_scales is None:
        return x
    else:
        return x * tl.load(kv_scales + at)


@triton.jit
def find_request(
    starts, unit, num_requests, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_B: tl.constexpr
):
    """The request of a tile, and the tile's index within the request.

    Request b's tiles are numbered from starts[b] * G // BLOCK_M + b on, which leaves room for all
    of them; request B stands for the rows after the last request.
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
    """First row, number of rows and length of a request; request B: the rows after the last one."""
    exists = request < num_requests
    length = tl.load(seq_lens + request, mask=exists, other=0, cache_modifier=CACHE).to(tl.int32)
    start, rows = request, 1
    if not ONE_ROW:
        start = tl.load(starts + request, cache_modifier=CACHE).to(tl.int32)
        stop = tl.load(starts + request + 1, mask=exists, other=0, cache_modifier=CACHE)
        rows = tl.where(exists, stop.to(tl.int32), num_rows) - start
    return start, rows, length


@triton.jit
def own_rows(rows, request, num_requests, ONLY: tl.constexpr):
    """The number of rows of a request; 0 if another launch attends it. ONLY: "few", requests with
    at most FEW_ROWS rows; "many", the others, and the rows after the last request; "all"."""
    if ONLY == "few":
        return tl.where(rows <= FEW_ROWS, rows, 0)
    elif ONLY == "many":
        return tl.where((rows <= FEW_ROWS) & (request < num_requests), 0, rows)
    else:
        return rows


@triton.jit
def sum_rows(start, num_rows, request, num_requests, ONLY: tl.constexpr):
    """The first of a request's rows among those that splits store sums of, and their number: the
    rows of the step, or with ONLY "few" FEW_ROWS of each request."""
    if ONLY == "few":
        return request * FEW_ROWS, num_requests * FEW_ROWS
    else:
        return start, num_rows


@triton.jit
def find_keys(
    length, rows, tile, split, splits,
    GROUP: tl.constexpr, WINDOW: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Keys begin..limit that this split reads, of those that some query of the tile sees.

    Other keys are not read: their blocks may be freed and hold anything.
    """
    last_row = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, rows - 1)
    begin, limit = 0, length - rows + last_row + 1
    if MASK == "block" or MASK == "until":
        limit = length
    if WINDOW > 0:
        if MASK == "causal" or MASK == "until":
            begin = tl.maximum(length - rows + tile * BLOCK_M // GROUP - WINDOW + 1, 0)
        else:
            begin = tl.maximum(length - rows - WINDOW, 0)
    if SPLIT:
        share = tl.maximum(tl.cdiv(tl.maximum(limit - begin, 0), splits), BLOCK_N)
        begin += split * share
        limit = tl.minimum(limit, begin + share)
    return begin, limit


@triton.jit
def newest_keys(sees_until, row, position, limit, inside, MASK: tl.constexpr):
    """The last key before `limit` that each query of a tile sees; MASK "until" reads it by row."""
    if MASK == "block":
        return tl.minimum(tl.maximum(position, limit), limit - 1)
    elif MASK == "until":
        until = tl.load(sees_until + row, mask=inside, other=0).to(tl.int32)
        return tl.minimum(tl.maximum(position, until), limit - 1)
    else:
        return tl.minimum(position, limit - 1)


@triton.jit
def prefetch_keys(
    keys, values, table, begin, limit, table_width, num_blocks,
    BLOCK_SIZE: tl.constexpr, TOKEN: tl.constexpr, WIDTH: tl.constexpr, LATENT: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    """Brings the first COUNT keys and values into the L2.

    This runs before the inputs are complete, so that any value of an input gives valid addresses.
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
    prefetch_l2_where(keys + at, wanted)
    if not LATENT:
        prefetch_l2_where(values + at, wanted)


@triton.jit
def clear_queries(
    out, first_row, stop_row, kv_head,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Stores zeros for the queries of one KV head in rows first_row..stop_row."""
    d = tl.arange(0, BLOCK_V)
    for at in range(0, (stop_row - first_row) * GROUP, BLOCK_M):
        f = at + tl.arange(0, BLOCK_M)
        row = first_row + f // GROUP
        at_out = (row.to(tl.int64) * NUM_HEADS + kv_head * GROUP + f % GROUP) * VALUE_DIM
        mask = (row < stop_row)[:, None] & (d < VALUE_DIM)[None, :]
        zeros = tl.zeros([BLOCK_M, BLOCK_V], out.dtype.element_ty)
        tl.store(out + at_out[:, None] + d[None, :], zeros, mask=mask)
