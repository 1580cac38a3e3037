"""Latent attention of few rows per request, in 16 bits, warp-specialised.

A program attends 64 queries of one request (query f: row f // G, head f % G) over its share of the
keys, 64 at a time. One group of four warps computes scores and weights, and sums the left half of
the values; a second one sums the right half; a third one copies keys, two tiles of them in flight.
Gluon has no interpreter: only tests on the device run this.
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from hydraspec_kernels.attention.hopper_tiling import WGMMA_ROWS as TILE
from hydraspec_kernels.attention.hopper_tiling import latent_splits
from hydraspec_kernels.attention.plan import DevicePlan
from hydraspec_kernels.attention.splits_kernel import combine_splits
from hydraspec_kernels.attention.tiles_kernel import NO_KEY
from hydraspec_kernels.runtime.gluon_kernel import start_next, wait_for_inputs
from hydraspec_kernels.runtime.launch_kernel import dependent_launch

TILE_ROWS = gl.constexpr(TILE)  # queries of a program, and keys of a tile
SLOTS = gl.constexpr(2)  # for tiles of keys
# Registers of a thread in the group that only sums, and in the group that copies. The group that
# computes weights has the rest.
SUM_REGISTERS = gl.constexpr(192)
COPY_REGISTERS = gl.constexpr(64)
LAUNCH = {"num_warps": 4, "maxnreg": 168}

# Layouts of a copied tile (few rows per thread, full lines), of scores, and of half the sums.
COPIED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16]))
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
BY_SCORES = gl.constexpr(gl.SliceLayout(1, SCORES.value))
BY_SUMS = gl.constexpr(gl.SliceLayout(1, SUMS.value))


@gluon.jit
def _copy_rows(to, base, rows, exists, FIRST: gl.constexpr):
    """Starts copying columns from FIRST on of the rows that begin at `rows`, or zeros if absent."""
    d = FIRST + gl.arange(0, to.shape[1], gl.SliceLayout(0, COPIED))
    async_copy.async_copy_global_to_shared(to, base + rows[:, None] + d[None, :], exists[:, None])


@gluon.jit
def _copy_keys(
    left, right, rest, filled, free, cache, table, begin, limit,
    BLOCK_SIZE: gl.constexpr, WIDTH: gl.constexpr, RANK: gl.constexpr,
):  # fmt: skip
    """The program of the copying group: copies tile after tile, as slots become free."""
    slot = 0
    phase = 1
    for at in range(begin, limit, TILE_ROWS):
        j = at + gl.arange(0, TILE_ROWS, gl.SliceLayout(1, COPIED))
        seen = j < limit
        block = gl.load(table + j // BLOCK_SIZE, mask=seen, other=0).to(gl.int64)
        rows = (block * BLOCK_SIZE + j % BLOCK_SIZE) * WIDTH
        mbarrier.wait(free.index(slot), phase)
        _copy_rows(left.index(slot), cache, rows, seen, 0)
        _copy_rows(rest.index(slot), cache, rows, seen, RANK)
        _copy_rows(right.index(slot), cache, rows, seen, RANK // 2)
        async_copy.mbarrier_arrive(filled.index(slot), increment_count=False)
        slot ^= 1
        phase = gl.where(slot == 0, phase ^ 1, phase)
    async_copy.wait_group(0)


@gluon.jit
def _score(q_left, q_right, q_rest, left, right, rest, filled, phase, SLOT: gl.constexpr):
    """Waits for the slot, and starts the three products of its scores."""
    mbarrier.wait(filled.index(SLOT), phase)
    fence_async_shared()
    s = gl.zeros([TILE_ROWS, TILE_ROWS], gl.float32, SCORES)
    s = warpgroup_mma(q_left, left.index(SLOT).permute((1, 0)), s, use_acc=False, is_async=True)
    s = warpgroup_mma(q_rest, rest.index(SLOT).permute((1, 0)), s, is_async=True)
    return warpgroup_mma(q_right, right.index(SLOT).permute((1, 0)), s, is_async=True)


@gluon.jit
def _weigh(s, at, oldest, newest, top, total, scale):
    """Weights of a tile's keys, the factor of the earlier sums, the new maxima and sums."""
    if at + TILE_ROWS > oldest:
        j = at + gl.arange(0, TILE_ROWS, gl.SliceLayout(0, SCORES))
        s = gl.where(j[None, :] <= newest[:, None], s, float("-inf"))
    new_top = gl.maximum(top, gl.max(s, 1) * scale)
    p = gl.exp2(s * scale - new_top[:, None])
    fade = gl.exp2(top - new_top)
    return p, fade, new_top, total * fade + gl.sum(p, 1)


@gluon.jit
def _sum(acc, p, fade, weights, fades, values, ready, taken, turn, SLOT: gl.constexpr):
    """Shares the weights with the other group, scales acc [64, Hv / 2], and starts its product."""
    mbarrier.wait(taken, turn)
    weights.store(p.to(weights.dtype))
    fades.store(fade)
    fence_async_shared()
    mbarrier.arrive(ready, count=1)
    acc = acc * gl.convert_layout(fade, BY_SUMS)[:, None]
    return warpgroup_mma(weights, values.index(SLOT), acc, is_async=True)


@gluon.jit
def _store(
    out, partial, acc, tile, split, splits, start, rows, num_rows, FIRST: gl.constexpr,
    GROUP: gl.constexpr, RANK: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Stores one half of a tile's sums with SPLIT, else of its results."""
    f = tile * TILE_ROWS + gl.arange(0, TILE_ROWS, BY_SUMS)
    d = FIRST + gl.arange(0, RANK // 2, gl.SliceLayout(0, SUMS))
    at = (start + f // GROUP).to(gl.int64) * GROUP + f % GROUP
    mask = (f // GROUP < rows)[:, None]
    if SPLIT:
        at = at * splits + split
        gl.store(partial + (at * RANK)[:, None] + d[None, :], acc, mask=mask)
    else:
        result = acc.to(out.dtype.element_ty)
        gl.store(out + (at * RANK)[:, None] + d[None, :], result, mask=mask)


@gluon.jit
def _attend(
    out, partial, q_left, q_right, q_rest, left, right, rest, weights, fades,
    filled, free, ready, taken, begin, limit, length, tile, split, splits, start, rows, num_rows,
    scale, GROUP: gl.constexpr, RANK: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """The program of the group that computes weights. It takes two tiles at a time: the weights of
    the first are computed while the tensor cores compute the scores of the second, those of the
    second while the tensor cores sum the first.
    """
    f = tile * TILE_ROWS + gl.arange(0, TILE_ROWS, BY_SCORES)
    newest = gl.minimum(length - rows + f // GROUP, limit - 1)
    oldest = gl.minimum(length - rows + tile * TILE_ROWS // GROUP + 1, limit)
    top = gl.full([TILE_ROWS], NO_KEY, gl.float32, BY_SCORES)
    total = gl.zeros([TILE_ROWS], gl.float32, BY_SCORES)
    acc = gl.zeros([TILE_ROWS, RANK // 2], gl.float32, SUMS)
    async_copy.wait_group(0)  # queries
    fence_async_shared()
    gl.thread_barrier()
    phase = 0
    pairs = gl.maximum(limit - begin + TILE_ROWS - 1, 0) // (2 * TILE_ROWS)
    for i in range(pairs):
        at = begin + i * (2 * TILE_ROWS)
        s = _score(q_left, q_right, q_rest, left, right, rest, filled, phase, 0)
        t = _score(q_left, q_right, q_rest, left, right, rest, filled, phase, 1)
        s, t = warpgroup_mma_wait(3, deps=(s, t))
        p, fade, top, total = _weigh(s, at, oldest, newest, top, total, scale)
        acc = _sum(acc, p, fade, weights, fades, left, ready, taken, 1, 0)
        acc, t = warpgroup_mma_wait(1, deps=(acc, t))
        p, fade, top, total = _weigh(t, at + TILE_ROWS, oldest, newest, top, total, scale)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(free.index(0), count=1)
        acc = _sum(acc, p, fade, weights, fades, left, ready, taken, 0, 1)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(free.index(1), count=1)
        phase ^= 1
    at = begin + pairs * (2 * TILE_ROWS)
    turn = 1
    if at < limit:
        s = _score(q_left, q_right, q_rest, left, right, rest, filled, phase, 0)
        s = warpgroup_mma_wait(0, deps=(s,))
        p, fade, top, total = _weigh(s, at, oldest, newest, top, total, scale)
        acc = _sum(acc, p, fade, weights, fades, left, ready, taken, 1, 0)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        turn = 0
    if SPLIT:
        at = ((start + f // GROUP).to(gl.int64) * GROUP + f % GROUP) * splits + split
        size = num_rows.to(gl.int64) * GROUP * splits
        gl.store(partial + size * RANK + at, top, mask=f // GROUP < rows)
        gl.store(partial + size * (RANK + 1) + at, total, mask=f // GROUP < rows)
    else:
        inverse = 1.0 / gl.where(total > 0, total, 1.0)
        mbarrier.wait(taken, turn)
        fades.store(inverse)
        mbarrier.arrive(ready, count=1)
        acc = acc * gl.convert_layout(inverse, BY_SUMS)[:, None]
    _store(
        out, partial, acc, tile, split, splits, start, rows, num_rows, 0, GROUP, RANK, SPLIT
    )  # fmt: skip


@gluon.jit
def _attend_right(
    out, partial, right, weights, fades, free, ready, taken, begin, limit,
    tile, split, splits, start, rows, num_rows,
    GROUP: gl.constexpr, RANK: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """The program of the group that only sums: the right half of the values."""
    acc = gl.zeros([TILE_ROWS, RANK // 2], gl.float32, SUMS)
    slot = 0
    turn = 0
    for _ in range(begin, limit, TILE_ROWS):
        mbarrier.wait(ready, turn)
        acc = acc * fades.load(BY_SUMS)[:, None]
        acc = warpgroup_mma(weights, right.index(slot), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(taken, count=1)
        mbarrier.arrive(free.index(slot), count=1)
        turn ^= 1
        slot ^= 1
    if not SPLIT:
        mbarrier.wait(ready, turn)
        acc = acc * fades.load(BY_SUMS)[:, None]
    _store(
        out, partial, acc, tile, split, splits, start, rows, num_rows, RANK // 2,
        GROUP, RANK, SPLIT,
    )  # fmt: skip


@gluon.jit
def _clear(out, first_row, stop_row, GROUP: gl.constexpr, RANK: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([RANK // 128], [32], [4], [0])
    zeros = gl.zeros([RANK], out.dtype.element_ty, LAYOUT)
    for at in range(first_row * GROUP, stop_row * GROUP):
        gl.store(out + at.to(gl.int64) * RANK + gl.arange(0, RANK, LAYOUT), zeros)


@gluon.jit(do_not_specialize=["num_rows", "num_requests", "row_tiles", "splits", "table_stride"])
def _latent_kernel(
    out,  # [T, G, Hv]
    partial,  # [T, G, S, Hv] float32, then maxima and sums [2, T, G, S]; SPLIT only
    query,  # [T, G, H], rows query_stride apart
    cache,  # [rows, 1, H]
    block_table,  # [B, P], rows table_stride apart
    seq_lens,  # [B]
    starts,  # [B+1]; not read with ONE_ROW
    num_rows,
    num_requests,
    row_tiles,  # of a request
    splits,  # S
    query_stride,
    table_stride,
    scale,  # times log2(e)
    GROUP: gl.constexpr,
    WIDTH: gl.constexpr,  # H
    RANK: gl.constexpr,  # Hv
    BLOCK_SIZE: gl.constexpr,
    ONE_ROW: gl.constexpr,
    SPLIT: gl.constexpr,  # S > 1
    PDL: gl.constexpr,
):
    start_next(PDL)
    wait_for_inputs(PDL)
    request, tile = gl.program_id(0) // row_tiles, gl.program_id(0) % row_tiles
    split = gl.program_id(1)
    length = gl.load(seq_lens + request).to(gl.int32)
    start, rows = request, 1
    if not ONE_ROW:
        start = gl.load(starts + request).to(gl.int32)
        rows = gl.load(starts + request + 1).to(gl.int32) - start
    if not SPLIT and not ONE_ROW:  # else `combine_splits` clears the rows after the last request
        stop = gl.where(gl.program_id(0) == (num_requests - 1) * row_tiles, num_rows, 0)
        _clear(out, start + rows, stop, GROUP, RANK)
    if tile * TILE_ROWS // GROUP >= rows:
        return
    table = block_table + request.to(gl.int64) * table_stride
    last_row = gl.minimum((tile * TILE_ROWS + TILE_ROWS - 1) // GROUP, rows - 1)
    begin, limit = 0, length - rows + last_row + 1
    if SPLIT:
        share = gl.cdiv(gl.cdiv(gl.maximum(limit, 1), splits), TILE_ROWS) * TILE_ROWS
        begin = split * share
        limit = gl.minimum(limit, begin + share)
    TYPE: gl.constexpr = query.dtype.element_ty
    HALF: gl.constexpr = RANK // 2
    REST: gl.constexpr = WIDTH - RANK
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_left = gl.allocate_shared_memory(TYPE, [TILE_ROWS, HALF], SWIZZLED)
    q_right = gl.allocate_shared_memory(TYPE, [TILE_ROWS, HALF], SWIZZLED)
    q_rest = gl.allocate_shared_memory(TYPE, [TILE_ROWS, REST], SWIZZLED)
    left = gl.allocate_shared_memory(TYPE, [SLOTS, TILE_ROWS, HALF], SWIZZLED)
    right = gl.allocate_shared_memory(TYPE, [SLOTS, TILE_ROWS, HALF], SWIZZLED)
    rest = gl.allocate_shared_memory(TYPE, [SLOTS, TILE_ROWS, REST], SWIZZLED)
    weights = gl.allocate_shared_memory(TYPE, [TILE_ROWS, TILE_ROWS], SWIZZLED)
    fades = gl.allocate_shared_memory(
        gl.float32, [TILE_ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    filled = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(filled.index(i), count=128)  # each copying thread
        mbarrier.init(free.index(i), count=2)  # both groups
    mbarrier.init(ready, count=1)
    mbarrier.init(taken, count=1)
    f = tile * TILE_ROWS + gl.arange(0, TILE_ROWS, gl.SliceLayout(1, COPIED))
    at_query = (start + f // GROUP).to(gl.int64) * query_stride + f % GROUP * WIDTH
    _copy_rows(q_left, query, at_query, f // GROUP < rows, 0)
    _copy_rows(q_right, query, at_query, f // GROUP < rows, HALF)
    _copy_rows(q_rest, query, at_query, f // GROUP < rows, RANK)
    async_copy.commit_group()
    gl.warp_specialize(
        [
            (
                _attend,
                (
                    out, partial, q_left, q_right, q_rest, left, right, rest, weights, fades,
                    filled, free, ready, taken, begin, limit, length, tile, split, splits,
                    start, rows, num_rows, scale, GROUP, RANK, SPLIT,
                ),
            ),
            (
                _attend_right,
                (
                    out, partial, right, weights, fades, free, ready, taken, begin, limit,
                    tile, split, splits, start, rows, num_rows, GROUP, RANK, SPLIT,
                ),
            ),
            (
                _copy_keys,
                (
                    left, right, rest, filled, free, cache, table, begin, limit,
                    BLOCK_SIZE, WIDTH, RANK,
                ),
            ),
        ],
        [4, 4],
        [SUM_REGISTERS, COPY_REGISTERS],
    )  # fmt: skip


def latent_attention_kernel(query: Tensor, cache: Tensor, plan: DevicePlan) -> Tensor:
    """Attention [T, Hq * latent_dim] for a plan that satisfies `fits_latent`; see
    `attention.paged_attention`.
    """
    shape, num_rows = plan.shape, query.shape[0]
    plan.check(query, cache)
    heads, rank = shape.num_heads, shape.latent_dim
    assert rank is not None
    out = query.new_empty(num_rows, heads * rank)
    if num_rows == 0:
        return out
    splits = latent_splits(heads, plan.max_rows, plan.num_requests)
    row_tiles = triton.cdiv(plan.max_rows * heads, TILE)
    partial = out
    if splits > 1:
        size = num_rows * heads * splits * (rank + 2)
        partial = torch.empty(size, dtype=torch.float32, device=query.device)
    _latent_kernel[(plan.num_requests * row_tiles, splits)](
        out,
        partial,
        query,
        cache,
        plan.block_table,
        plan.seq_lens,
        plan.starts,
        num_rows,
        plan.num_requests,
        row_tiles,
        splits,
        query.stride(0),
        plan.block_table.stride(0),
        shape.scale * math.log2(math.e),
        GROUP=heads,
        WIDTH=shape.head_dim,
        RANK=rank,
        BLOCK_SIZE=shape.block_size,
        ONE_ROW=plan.query_start_loc is None,
        SPLIT=splits > 1,
        **LAUNCH,
        **dependent_launch(query),
    )
    if splits > 1:
        block_d = rank if splits <= 8 else rank // 2
        combine_splits(out, partial, plan, splits=splits, block_d=block_d)
    return out
