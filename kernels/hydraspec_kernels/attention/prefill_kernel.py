"""Attention of many queries, warp-specialised: one warp copies, two groups of four warps multiply.

A program takes tiles one after another, of M queries of one KV head of one request, counted as in
`tiles_kernel`. With heads up to 256 wide each group of warps has 64 queries; with wider heads both
have the same 64, and half of the values each. Where requests have few rows, the keys of a tile are
divided among S splits, whose sums are added up by a second kernel. Where only some have few,
another launch may attend them (`splits_of_few`). Gluon has no interpreter: only tests on the device
run this.
"""

from __future__ import annotations

import math

import triton
from torch import Tensor, empty, float16, float32
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from hydraspec_kernels.attention import tiling
from hydraspec_kernels.attention.counters import zero_counters
from hydraspec_kernels.attention.hopper_tiling import (
    WGMMA_ROWS,
    prefill_splits,
    prefill_tiling,
    tiles_of_few,
)
from hydraspec_kernels.attention.paged_kernel import attend_few_rows
from hydraspec_kernels.attention.plan import DevicePlan
from hydraspec_kernels.attention.prefill_copy_kernel import (
    CHUNK,
    GROUP_QUERIES,
    copy_tiles,
    find_keys,
    next_slot,
    receive,
    share_keys,
)
from hydraspec_kernels.attention.splits_kernel import combine_splits
from hydraspec_kernels.attention.tiles_kernel import NO_KEY
from hydraspec_kernels.attention.tiling import FULL_DEVICE
from hydraspec_kernels.runtime.gluon_kernel import start_next, view_tiles, wait_for_inputs
from hydraspec_kernels.runtime.launch_kernel import dependent_launch

RUN = gl.constexpr(4)  # numbers of a row that a thread stores at once
# Registers of a thread in the groups that multiply, and in the warp that copies.
REGISTERS, COPY_REGISTERS = gl.constexpr(240), gl.constexpr(24)
LAUNCH = {"num_warps": 4, "maxnreg": 168}


@gluon.constexpr_function
def _tile_layout():
    """The layout of 16-bit tiles whose chunks follow one another."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@gluon.constexpr_function
def _row_layout(width, run):
    """The layout of [64, width] over four warps with rows placed as in a product's sums, and `run`
    numbers of a row in each thread.
    """
    lanes = [[0, run], [0, 2 * run], [1, 0], [2, 0], [4, 0]]
    runs = [[0, 1 << i] for i in range(run.bit_length() - 1)]
    along = [[0, 4 * run << i] for i in range((width // run // 4).bit_length() - 1)]
    warps = [[16, 0], [32, 0]]
    return gl.DistributedLinearLayout([*runs, *along, [8, 0]], lanes, warps, [], [64, width])


@gluon.jit
def _release(free, slot, COUNT: gl.constexpr, SLOTS: gl.constexpr):
    """Releases the COUNT slots before `slot`."""
    for i in gl.static_range(COUNT):
        at = slot - COUNT + i
        mbarrier.arrive(free.index(gl.where(at < 0, at + SLOTS, at)), count=1)


@gluon.jit
def _weigh(
    s, top, total, at, position, oldest, scale,
    N: gl.constexpr, WINDOW: gl.constexpr, SPAN: gl.constexpr,
):  # fmt: skip
    """Weights of a block of scores, the new maxima and sums, and the factor of the earlier sums.

    Queries are at positions oldest to oldest + SPAN; only blocks that one of them sees in part are
    masked. Queries after the request's last row may see anything: they are not stored.
    """
    if at + N > oldest + 1:
        j = at + gl.arange(0, N, gl.SliceLayout(0, s.type.layout))
        s = gl.where(j[None, :] <= position[:, None], s, float("-inf"))
    if WINDOW > 0:
        newest = oldest + SPAN
        if at <= newest - WINDOW:
            j = at + gl.arange(0, N, gl.SliceLayout(0, s.type.layout))
            s = gl.where(j[None, :] > position[:, None] - WINDOW, s, float("-inf"))
    new_top = gl.maximum(top, gl.max(s, 1) * scale)
    weights = gl.exp2(s * scale - new_top[:, None])
    fade = gl.exp2(top - new_top)
    return weights, new_top, total * fade + gl.sum(weights, 1), fade


@gluon.jit
def _query_at(f, start, kv_head, KV_HEADS: gl.constexpr, GROUP: gl.constexpr):
    """Index in [T, Hq] of the queries f of a request whose first row is `start`."""
    return ((start + f // GROUP).to(gl.int64) * KV_HEADS + kv_head) * GROUP + f % GROUP


@gluon.jit
def _multiply(
    out, partial, work, queries, keys, scale, num_rows, splits, WHICH: gl.constexpr,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, WINDOW: gl.constexpr,
    PAGE: gl.constexpr, M: gl.constexpr, N: gl.constexpr, WIDTH: gl.constexpr, SLOTS: gl.constexpr,
    SPLIT: gl.constexpr,
):  # fmt: skip
    """The program of a multiplying group; WHICH is the group's number, 0 or 1."""
    qs, q_filled, q_free = queries
    ring, filled, free = keys
    PARTS: gl.constexpr = DIM // WIDTH
    Q: gl.constexpr = WHICH if PARTS == 1 else 0
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    BY_SCORE: gl.constexpr = gl.SliceLayout(1, SCORES)
    BY_SUM: gl.constexpr = gl.SliceLayout(1, SUMS)
    ROWS: gl.constexpr = _row_layout(WIDTH, RUN.value)
    slots = view_tiles(ring, SLOTS, N, WIDTH, _tile_layout())
    q = view_tiles(qs, M // GROUP_QUERIES * PARTS, GROUP_QUERIES, WIDTH, _tile_layout())
    slot, phase, q_phase, work_phase = 0, 0, 0, 1
    kv_head, tile_at, start, rows, length, split = receive(work, 0)
    # bound: the copying warp's trips, after which it announces a tile without rows
    while rows > 0:
        first, limit = find_keys(length, rows, tile_at, M, GROUP, WINDOW, PAGE)
        q_at = tile_at + Q * GROUP_QUERIES
        _, own_limit = find_keys(length, rows, q_at, GROUP_QUERIES, GROUP, WINDOW, PAGE)
        if SPLIT:
            first, limit = share_keys(first, limit, split, splits, N)
            own_limit = gl.minimum(own_limit, limit)
        oldest = length - rows + q_at // GROUP
        position = length - rows + (q_at + gl.arange(0, GROUP_QUERIES, BY_SCORE)) // GROUP
        top = gl.full((GROUP_QUERIES,), NO_KEY, gl.float32, BY_SCORE)
        total = gl.zeros((GROUP_QUERIES,), gl.float32, BY_SCORE)
        acc = gl.zeros((GROUP_QUERIES, WIDTH), gl.float32, SUMS)
        if first < limit:
            mbarrier.wait(q_filled.index(Q), q_phase)
            q_phase ^= 1
            if first >= own_limit:
                mbarrier.arrive(q_free.index(Q), count=1)
        for at in range(first, limit, N):
            if at < own_limit:
                s = gl.zeros((GROUP_QUERIES, N), gl.float32, SCORES)
                for part in gl.static_range(PARTS):
                    mbarrier.wait(filled.index(slot), phase)
                    k = slots.index(slot).permute((1, 0))
                    s = warpgroup_mma(
                        q.index(Q * PARTS + part), k, s, use_acc=part > 0, is_async=True
                    )
                    slot, phase = next_slot(slot, phase, SLOTS)
                s = warpgroup_mma_wait(0, deps=(s,))
                _release(free, slot, PARTS, SLOTS)
                if at + N >= own_limit:
                    mbarrier.arrive(q_free.index(Q), count=1)
                weights, top, total, fade = _weigh(
                    s, top, total, at, position, oldest, scale,
                    N, WINDOW, (GROUP_QUERIES - 1) // GROUP,
                )  # fmt: skip
                acc *= gl.convert_layout(fade, BY_SUM)[:, None]
                p = gl.convert_layout(
                    weights.to(out.dtype.element_ty), gl.DotOperandLayout(0, SUMS, 2)
                )
                for part in gl.static_range(PARTS):
                    mbarrier.wait(filled.index(slot), phase)
                    if PARTS == 1 or part == WHICH:
                        acc = warpgroup_mma(p, slots.index(slot), acc, is_async=True)
                    slot, phase = next_slot(slot, phase, SLOTS)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                _release(free, slot, PARTS, SLOTS)
            else:  # keys that only the other group's queries see
                for _part in gl.static_range(2 * PARTS):
                    mbarrier.wait(filled.index(slot), phase)
                    slot, phase = next_slot(slot, phase, SLOTS)
                    _release(free, slot, 1, SLOTS)
        if SPLIT:
            f = q_at + gl.arange(0, GROUP_QUERIES, BY_SUM)
            at = _query_at(f, start, kv_head, KV_HEADS, GROUP) * splits + split
            d = (0 if PARTS == 1 else WHICH * WIDTH) + gl.arange(0, WIDTH, gl.SliceLayout(0, SUMS))
            to = partial + at[:, None] * DIM + d[None, :]
            if first < limit:
                gl.store(to, acc, mask=(f // GROUP < rows)[:, None])
            if PARTS == 1 or WHICH == 0:
                f = q_at + gl.arange(0, GROUP_QUERIES, BY_SCORE)
                at = _query_at(f, start, kv_head, KV_HEADS, GROUP) * splits + split
                size = num_rows.to(gl.int64) * (KV_HEADS * GROUP) * splits
                gl.store(partial + size * DIM + at, top, mask=f // GROUP < rows)
                gl.store(partial + size * (DIM + 1) + at, total, mask=f // GROUP < rows)
        else:
            inverse = 1 / gl.where(total > 0, total, 1.0)
            mean = (acc * gl.convert_layout(inverse, BY_SUM)[:, None]).to(out.dtype.element_ty)
            f = q_at + gl.arange(0, GROUP_QUERIES, gl.SliceLayout(1, ROWS))
            d = (0 if PARTS == 1 else WHICH * WIDTH) + gl.arange(0, WIDTH, gl.SliceLayout(0, ROWS))
            at = _query_at(f, start, kv_head, KV_HEADS, GROUP)
            to = out + at[:, None] * DIM + d[None, :]
            gl.store(to, gl.convert_layout(mean, ROWS), mask=(f // GROUP < rows)[:, None])
        kv_head, tile_at, start, rows, length, split = receive(work, work_phase)
        work_phase ^= 1


SIZES = "num_rows", "num_requests", "units", "tiles", "splits", "table_stride"


@gluon.jit(do_not_specialize=SIZES)
def _prefill_kernel(
    # [T, Hq * H]
    out,
    # [T, Hq, S, H] float32 sums, none for splits without keys, then maxima and weights' sums
    # [2, T, Hq, S]; SPLIT only
    partial,
    # [T, Hq, H] in tiles [64 / G, G, 64]
    query,
    # [rows, 2 * Hkv * H] in tiles [PAGE, 64]
    cache,
    # [B, P], rows table_stride apart
    block_table,
    # [B]
    seq_lens,
    # [B+1]
    starts,
    # [2] zeros: tiles taken after each program's first, programs that have ended
    counters,
    num_rows, num_requests,
    units,  # tiles of all requests
    tiles,  # of each, with few rows
    splits,  # S
    table_stride,
    scale,  # times log2(e)
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, WINDOW: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, PAGE: gl.constexpr, M: gl.constexpr, N: gl.constexpr,
    WIDTH: gl.constexpr, SLOTS: gl.constexpr, BLOCK_B: gl.constexpr,
    FEW: gl.constexpr,  # rows of every request
    SKIPPED_ROWS: gl.constexpr,  # requests with at most so many are left to another launch
    SPLIT: gl.constexpr,  # S > 1
    PDL: gl.constexpr,
):  # fmt: skip
    start_next(PDL)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    GROUPS: gl.constexpr = M // GROUP_QUERIES  # of queries
    COUNT: gl.constexpr = GROUPS * (DIM // CHUNK)
    qs = gl.allocate_shared_memory(
        out.dtype.element_ty, [COUNT, GROUP_QUERIES // GROUP, GROUP, CHUNK], query.layout
    )
    q_filled = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], BAR)
    q_free = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], BAR)
    PIECES: gl.constexpr = SLOTS * (N // PAGE) * (WIDTH // CHUNK)
    ring = gl.allocate_shared_memory(out.dtype.element_ty, [PIECES, PAGE, CHUNK], cache.layout)
    filled = gl.allocate_shared_memory(gl.int64, [SLOTS + 1, 1], BAR)  # the last: to be cleared
    free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BAR)
    tile = gl.allocate_shared_memory(gl.int32, [8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    announced = gl.allocate_shared_memory(gl.int64, [1], BAR)
    received = gl.allocate_shared_memory(gl.int64, [1], BAR)
    for i in gl.static_range(GROUPS):
        mbarrier.init(q_filled.index(i), count=1)
        mbarrier.init(q_free.index(i), count=2 // GROUPS)
    for i in gl.static_range(SLOTS):
        mbarrier.init(filled.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    mbarrier.init(filled.index(SLOTS), count=DIM // WIDTH)
    mbarrier.init(announced, count=1)
    mbarrier.init(received, count=2)
    fence_async_shared()
    wait_for_inputs(PDL)
    work, queries, keys = (tile, announced, received), (qs, q_filled, q_free), (ring, filled, free)
    sizes = (num_rows, num_requests, units, tiles, splits)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    out, partial, work, queries, keys, scale, num_rows, splits, 0,
                    KV_HEADS, GROUP, DIM, WINDOW, PAGE, M, N, WIDTH, SLOTS, SPLIT,
                ),
            ),
            (
                _multiply,
                (
                    out, partial, work, queries, keys, scale, num_rows, splits, 1,
                    KV_HEADS, GROUP, DIM, WINDOW, PAGE, M, N, WIDTH, SLOTS, SPLIT,
                ),
            ),
            (
                copy_tiles,
                (
                    query, cache, block_table, table_stride, seq_lens, starts, counters, work,
                    queries, keys, sizes, KV_HEADS, GROUP, DIM, WINDOW, BLOCK_SIZE, PAGE, M, N,
                    WIDTH, SLOTS, BLOCK_B, FEW, SKIPPED_ROWS,
                ),
            ),
        ],
        [4, 1],
        [REGISTERS, COPY_REGISTERS],
    )  # fmt: skip


def prefill_attention_kernel(query: Tensor, cache: Tensor, plan: DevicePlan) -> Tensor:
    """Attention [T, Hq * H] for a plan that satisfies `fits_prefill`; see
    `attention.paged_attention`.
    """
    plan.check(query, cache)
    shape, num_rows, num_requests = plan.shape, query.shape[0], plan.num_requests
    group, cut = shape.num_heads // shape.num_kv_heads, prefill_tiling(shape)
    out = query.new_empty(num_rows, shape.num_heads * shape.head_dim)
    if num_rows == 0:
        return out
    element = gl.float16 if query.dtype is float16 else gl.bfloat16
    q_tile, page = [WGMMA_ROWS // group, group, CHUNK.value], [cut.page, CHUNK.value]
    q_layout = gl.NVMMASharedLayout.get_default_for(q_tile, element)
    layout = gl.NVMMASharedLayout.get_default_for(page, element)
    tiles, apart = tiles_of_few(shape, plan.max_rows), tiling.splits_of_few(plan, query.dtype) > 1
    splits = prefill_splits(
        shape,
        plan.max_rows,
        plan.num_busy or num_requests,
        plan.block_table.shape[1] * shape.block_size,
    )
    units = num_requests * max(1, tiles)
    if splits == 1:  # else the sum is where rows after the last request become zeros
        units += num_rows * group // cut.m + 1
    partial = out
    if splits > 1:
        size = num_rows * shape.num_heads * splits * (shape.head_dim + 2)
        partial = empty(size, dtype=float32, device=query.device)
    _prefill_kernel[(min(FULL_DEVICE, units * shape.num_kv_heads * splits),)](
        out,
        partial,
        TensorDescriptor.from_tensor(query, q_tile, q_layout),
        TensorDescriptor.from_tensor(cache.view(len(cache), -1), page, layout),
        plan.block_table,
        plan.seq_lens,
        plan.query_start_loc,
        zero_counters(query.device),
        *(num_rows, num_requests, units, tiles, splits, plan.block_table.stride(0)),
        shape.scale * math.log2(math.e),
        KV_HEADS=shape.num_kv_heads,
        GROUP=group,
        DIM=shape.head_dim,
        WINDOW=shape.window or 0,
        BLOCK_SIZE=shape.block_size,
        PAGE=cut.page,
        M=cut.m,
        N=cut.n,
        WIDTH=cut.width,
        SLOTS=cut.slots,
        BLOCK_B=64 if tiles else max(64, triton.next_power_of_2(num_requests + 1)),
        FEW=tiles > 0,
        SKIPPED_ROWS=tiling.FEW_ROWS if apart else 0,
        SPLIT=splits > 1,
        **LAUNCH,
        **dependent_launch(query),
    )
    if apart:
        attend_few_rows(out, query, cache, plan)
    if splits > 1:
        block_d = 256 if splits <= 8 else 128
        combine_splits(out, partial, plan, splits=splits, block_d=block_d, sparse=True)
    return out
