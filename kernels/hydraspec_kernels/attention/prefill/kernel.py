"""Attention of many rows a request: one warp copies, two groups of four only multiply.

A program takes tile after tile: M queries of one KV head of one request, counted as in
`paged_attention`. Of heads up to 256 wide each group of warps has 64 queries; of wider ones both
have the same 64, and half of the values each. Keys and values come page by page through a ring of
slots. Gluon has no interpreter: only tests on the device run this.
"""

from __future__ import annotations

import math

import triton
from torch import Tensor, float16
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from hydraspec_kernels.attention.copies.kernel import (
    CHUNK,
    GROUP_QUERIES,
    copy_tiles,
    find_keys,
    hear,
    next_slot,
)
from hydraspec_kernels.attention.decode.counters import zero_counters
from hydraspec_kernels.attention.paged.kernel import check_arguments
from hydraspec_kernels.attention.paged.plan import DevicePlan
from hydraspec_kernels.attention.prefill import FULL_DEVICE, QUERIES, tiling
from hydraspec_kernels.runtime.launch_kernel import dependent_launch

RUN = gl.constexpr(4)  # numbers of a row that a thread stores at once
NO_KEY = gl.constexpr(-1.0e38)  # the maximum of a query that has seen no key
# Of a thread: of the groups that multiply, and of the warp that copies.
REGISTERS, COPY_REGISTERS = gl.constexpr(240), gl.constexpr(24)
LAUNCH = {"num_warps": 4, "maxnreg": 168}


@gluon.jit
def _control(INSTRUCTION: gl.constexpr):
    """One PTX instruction without operands."""
    gl.inline_asm_elementwise(INSTRUCTION, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _tile_layout():
    """Of 16-bit tiles whose chunks lie one behind the other."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@gluon.constexpr_function
def _row_layout(width, run):
    """Of [64, width] over four warps: rows are where a product's sums have them, `run` numbers of a
    row in a thread.
    """
    lanes = [[0, run], [0, 2 * run], [1, 0], [2, 0], [4, 0]]
    runs = [[0, 1 << i] for i in range(run.bit_length() - 1)]
    along = [[0, 4 * run << i] for i in range((width // run // 4).bit_length() - 1)]
    warps = [[16, 0], [32, 0]]
    return gl.DistributedLinearLayout([*runs, *along, [8, 0]], lanes, warps, [], [64, width])


if hasattr(gl.shared_memory_descriptor, "reinterpret"):  # public since Triton 3.9

    @gluon.jit
    def _seen_as(memory, COUNT: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr):
        """The same shared memory as COUNT tiles [ROWS, WIDTH]."""
        return memory.reinterpret(memory.dtype, [COUNT, ROWS, WIDTH], _tile_layout())

else:

    @gluon.jit
    def _seen_as(memory, COUNT: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr):
        """The same shared memory as COUNT tiles [ROWS, WIDTH]."""
        return memory._reinterpret(memory.dtype, [COUNT, ROWS, WIDTH], _tile_layout())


@gluon.jit
def _give_back(free, slot, COUNT: gl.constexpr, SLOTS: gl.constexpr):
    """The COUNT slots in front of `slot` have been read."""
    for i in gl.static_range(COUNT):
        at = slot - COUNT + i
        mbarrier.arrive(free.index(gl.where(at < 0, at + SLOTS, at)), count=1)


@gluon.jit
def _weigh(
    s, top, total, at, position, oldest, scale,
    N: gl.constexpr, WINDOW: gl.constexpr, SPAN: gl.constexpr,
):  # fmt: skip
    """Weights of a block of scores, maxima and sums with them, and how much the sums so far fade.

    Queries stand at oldest to oldest + SPAN; only blocks that one of them sees a part of are
    masked. What queries behind the request's last row see does not matter.
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
def _multiply(
    out, work, queries, keys, scale, WHICH: gl.constexpr,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, WINDOW: gl.constexpr,
    PAGE: gl.constexpr, M: gl.constexpr, N: gl.constexpr, WIDTH: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """One of the two groups of four warps."""
    qs, q_filled, q_free = queries
    ring, filled, free = keys
    PARTS: gl.constexpr = DIM // WIDTH
    Q: gl.constexpr = WHICH if PARTS == 1 else 0
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    BY_SCORE: gl.constexpr = gl.SliceLayout(1, SCORES)
    BY_SUM: gl.constexpr = gl.SliceLayout(1, SUMS)
    ROWS: gl.constexpr = _row_layout(WIDTH, RUN.value)
    slots = _seen_as(ring, SLOTS, N, WIDTH)
    q = _seen_as(qs, M // GROUP_QUERIES * PARTS, GROUP_QUERIES, WIDTH)
    slot, phase, q_phase, heard = 0, 0, 0, 1
    kv_head, tile_at, start, rows, length = hear(work, 0)
    # bound: the copying warp's trips, after which it tells of a tile without rows
    while rows > 0:
        first, limit = find_keys(length, rows, tile_at, M, GROUP, WINDOW, PAGE)
        q_at = tile_at + Q * GROUP_QUERIES
        _, own_limit = find_keys(length, rows, q_at, GROUP_QUERIES, GROUP, WINDOW, PAGE)
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
                _give_back(free, slot, PARTS, SLOTS)
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
                _give_back(free, slot, PARTS, SLOTS)
            else:  # the other group's queries see more
                for _part in gl.static_range(2 * PARTS):
                    mbarrier.wait(filled.index(slot), phase)
                    slot, phase = next_slot(slot, phase, SLOTS)
                    _give_back(free, slot, 1, SLOTS)
        inverse = 1 / gl.where(total > 0, total, 1.0)
        mean = (acc * gl.convert_layout(inverse, BY_SUM)[:, None]).to(out.dtype.element_ty)
        f = q_at + gl.arange(0, GROUP_QUERIES, gl.SliceLayout(1, ROWS))
        d = (0 if PARTS == 1 else WHICH * WIDTH) + gl.arange(0, WIDTH, gl.SliceLayout(0, ROWS))
        head = ((start + f // GROUP).to(gl.int64) * KV_HEADS + kv_head) * GROUP + f % GROUP
        to = out + head[:, None] * DIM + d[None, :]
        gl.store(to, gl.convert_layout(mean, ROWS), mask=(f // GROUP < rows)[:, None])
        kv_head, tile_at, start, rows, length = hear(work, heard)
        heard ^= 1


@gluon.jit(do_not_specialize=["num_rows", "num_requests", "units", "table_stride"])
def _prefill_kernel(
    # [T, Hq * H]
    out,
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
    # [2] zeros: tiles taken beyond a program's first, programs that have ended
    counters,
    num_rows, num_requests, units, table_stride,
    scale,  # times log2(e)
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, WINDOW: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, PAGE: gl.constexpr, M: gl.constexpr, N: gl.constexpr,
    WIDTH: gl.constexpr, SLOTS: gl.constexpr, BLOCK_B: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    if PDL:
        _control("griddepcontrol.launch_dependents; // dummy $0")
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
    filled = gl.allocate_shared_memory(gl.int64, [SLOTS + 1, 1], BAR)  # the last: to be mended
    free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BAR)
    tile = gl.allocate_shared_memory(gl.int32, [8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    told = gl.allocate_shared_memory(gl.int64, [1], BAR)
    heard = gl.allocate_shared_memory(gl.int64, [1], BAR)
    for i in gl.static_range(GROUPS):
        mbarrier.init(q_filled.index(i), count=1)
        mbarrier.init(q_free.index(i), count=2 // GROUPS)
    for i in gl.static_range(SLOTS):
        mbarrier.init(filled.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    mbarrier.init(filled.index(SLOTS), count=DIM // WIDTH)
    mbarrier.init(told, count=1)
    mbarrier.init(heard, count=2)
    fence_async_shared()
    if PDL:
        _control("griddepcontrol.wait; // dummy $0")
    work, queries, keys = (tile, told, heard), (qs, q_filled, q_free), (ring, filled, free)
    sizes = (num_rows, num_requests, units)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    out, work, queries, keys, scale, 0,
                    KV_HEADS, GROUP, DIM, WINDOW, PAGE, M, N, WIDTH, SLOTS,
                ),
            ),
            (
                _multiply,
                (
                    out, work, queries, keys, scale, 1,
                    KV_HEADS, GROUP, DIM, WINDOW, PAGE, M, N, WIDTH, SLOTS,
                ),
            ),
            (
                copy_tiles,
                (
                    query, cache, block_table, table_stride, seq_lens, starts, counters, work,
                    queries, keys, sizes, KV_HEADS, GROUP, DIM, WINDOW, BLOCK_SIZE, PAGE, M, N,
                    WIDTH, SLOTS, BLOCK_B,
                ),
            ),
        ],
        [4, 1],
        [REGISTERS, COPY_REGISTERS],
    )  # fmt: skip


def prefill_attention_kernel(query: Tensor, cache: Tensor, plan: DevicePlan) -> Tensor:
    """What `paged_attention` specifies, of what `fits`."""
    check_arguments(query, cache, plan)
    shape, num_rows, num_requests = plan.shape, query.shape[0], plan.num_requests
    group, cut = shape.num_heads // shape.num_kv_heads, tiling(shape)
    out = query.new_empty(num_rows, shape.num_heads * shape.head_dim)
    if num_rows == 0:
        return out
    element = gl.float16 if query.dtype is float16 else gl.bfloat16
    q_tile, page = [QUERIES // group, group, CHUNK.value], [cut.page, CHUNK.value]
    q_layout = gl.NVMMASharedLayout.get_default_for(q_tile, element)
    layout = gl.NVMMASharedLayout.get_default_for(page, element)
    units = num_rows * group // cut.m + num_requests + 1
    _prefill_kernel[(min(FULL_DEVICE, units * shape.num_kv_heads),)](
        out,
        TensorDescriptor.from_tensor(query, q_tile, q_layout),
        TensorDescriptor.from_tensor(cache.view(len(cache), -1), page, layout),
        plan.block_table,
        plan.seq_lens,
        plan.query_start_loc,
        zero_counters(query.device),
        *(num_rows, num_requests, units, plan.block_table.stride(0)),
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
        BLOCK_B=max(64, triton.next_power_of_2(num_requests + 1)),
        **LAUNCH,
        **dependent_launch(query),
    )
    return out
