"""Rounded rows times an FP8 matrix on Hopper's FP8 tensor cores, warp-specialised: one warp copies.

A program owns R0 + R1 + R2 rows of the matrix, powers of two. Its other warps multiply them with up
to 128 rows of x, in units of 64 as the left operand: few rows of x take little power, and so do the
zeros that fill the last unit. Tensor cores sum FP8 products
with some 14 bits, so every step of 128 columns is a sum of its own, which is scaled and added in
float32. Gluon has no interpreter: only tests on the device run this.
"""

from __future__ import annotations

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from hydraspec_kernels.linear.specialized_kernel import COPY_REGISTERS
from hydraspec_kernels.quantised.e4m3_kernel import NEXT_GROUP
from hydraspec_kernels.quantised.plan import STEP, UNIT_ROWS, SpecializedTiles
from hydraspec_kernels.quantised.records import QuantisedMatrix, RoundedRows
from hydraspec_kernels.runtime.gluon_kernel import (
    load_tile,
    start_next,
    view_tiles,
    wait_for_inputs,
)
from hydraspec_kernels.runtime.launch import NUM_SMS
from hydraspec_kernels.runtime.launch_kernel import dependent_launch

ROWS = gl.constexpr(UNIT_ROWS)  # of the matrix, which four warps multiply at once
SECOND_REGISTERS = gl.constexpr(224)  # of a thread of the second four multiplying warps


@gluon.jit
def _copy_rows(
    weight_0, weight_1, weight_2, ws, slot, filled, n, k,
    R0: gl.constexpr, R1: gl.constexpr, R2: gl.constexpr, UNITS: gl.constexpr, BK: gl.constexpr,
):  # fmt: skip
    """Starts copying step k of rows n to n + R0 + R1 + R2 of the matrix into a slot."""
    TILES: gl.constexpr = ws.layout
    at = slot * UNITS
    if R0 > ROWS:
        load_tile(weight_0, [n, k], filled, view_tiles(ws.index(at), 1, R0, BK, TILES).index(0))
    else:
        load_tile(weight_0, [n, k], filled, ws.index(at).slice(0, R0))
    if R1:
        to = ws.index(at + R0 // ROWS)
        load_tile(weight_1, [n + R0, k], filled, to.slice(R0 % ROWS, R1))
    if R2:
        to = ws.index(at + (R0 + R1) // ROWS)
        load_tile(weight_2, [n + R0 + R1, k], filled, to.slice((R0 + R1) % ROWS, R2))


@gluon.jit
def _copy_steps(
    x, weight_0, weight_1, weight_2, xs, ws, filled, free, m, low, steps, tiles,
    R0: gl.constexpr, R1: gl.constexpr, R2: gl.constexpr, UNITS: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, BYTES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The program of the copying warp: copies all steps of all tiles, as slots become free."""
    R: gl.constexpr = R0 + R1 + R2
    program, programs = gl.program_id(0), gl.num_programs(0)
    total = gl.cdiv(tiles - program, programs) * steps
    first = gl.minimum(total, STAGES)
    for i in range(first):
        n, k, at = (program + i // steps * programs) * R, (low + i % steps) * BK, filled.index(i)
        mbarrier.expect(at, BYTES)
        _copy_rows(weight_0, weight_1, weight_2, ws, i, at, n, k, R0, R1, R2, UNITS, BK)
    wait_for_inputs(PDL)
    for i in range(first):
        load_tile(x, [m, (low + i % steps) * BK], filled.index(i), xs.index(i))
    slot = 0
    phase = 0
    for i in range(first, total):
        n, k, at = (program + i // steps * programs) * R, (low + i % steps) * BK, filled.index(slot)
        mbarrier.wait(free.index(slot), phase)
        mbarrier.expect(at, BYTES)
        _copy_rows(weight_0, weight_1, weight_2, ws, slot, at, n, k, R0, R1, R2, UNITS, BK)
        load_tile(x, [m, k], at, xs.index(slot))
        slot += 1
        phase = gl.where(slot == STAGES, phase ^ 1, phase)
        slot = gl.where(slot == STAGES, 0, slot)


@gluon.jit
def _row_scales(
    scales, n, k, N, stride_scales, LAYOUT: gl.constexpr, SHARED: gl.constexpr, BLOCKS: gl.constexpr
):
    """Scales [64] of step k of rows of the matrix from n on, which lie in at most two blocks of
    SHARED rows; 1 for all if blocks have none."""
    if BLOCKS:
        first, last = gl.minimum(n, N - 1) // SHARED, gl.minimum(n + ROWS, N) - 1
        row = n + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
        one = gl.load(scales + first * stride_scales + k)
        other = gl.load(scales + last // SHARED * stride_scales + k)
        return gl.where(row // SHARED == first, one, other)
    else:
        return 1.0


@gluon.jit
def _add_step(y, part, x_scale, row_scale, BLOCKS: gl.constexpr, GROUPS: gl.constexpr):
    """y + part [64, BM], scaled if rows of x or blocks of the matrix have a scale for the step."""
    if BLOCKS:
        if GROUPS:
            y += part * (x_scale[None, :] * row_scale[:, None])
        else:
            y += part * row_scale[:, None]
    elif GROUPS:
        y += part * x_scale[None, :]
    else:
        y += part
    return y


@gluon.jit
def _finish(
    out, y, x_scales, scales, n0, m0, M, N, stride_scales,
    R: gl.constexpr, BM: gl.constexpr, SHARED: gl.constexpr, BLOCKS: gl.constexpr,
    GROUPS: gl.constexpr,
):  # fmt: skip
    """Scales y [64, BM] by row and by column, if those were not scales of steps, and stores its
    first R rows to columns from n0, in rows from m0, of this program's range of K of out."""
    LAYOUT: gl.constexpr = y.type.layout
    if not BLOCKS:
        n = n0 + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
        y = y * gl.load(scales + n // SHARED * stride_scales, mask=n < N, other=0.0)[:, None]
    if not GROUPS:
        m = m0 + gl.arange(0, BM, gl.SliceLayout(0, LAYOUT))
        y = y * gl.load(x_scales + m)[None, :]
    v = y.to(out.dtype.element_ty)
    if out.dtype.element_ty.primitive_bitwidth == 16:  # 16 bytes per thread
        v = gl.convert_layout(v, gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1]))
    STORED: gl.constexpr = v.type.layout
    of_unit = gl.arange(0, ROWS, gl.SliceLayout(1, STORED))
    m = m0 + gl.arange(0, BM, gl.SliceLayout(0, STORED))
    to = (gl.program_id(1).to(gl.int64) * M + m)[None, :] * N + (n0 + of_unit)[:, None]
    real = ((of_unit < R) & (n0 + of_unit < N))[:, None] & (m < M)[None, :]
    gl.store(out + to, v, mask=real)


@gluon.jit
def _multiply(
    out, x_scales, scales, xs, ws, filled, free, m0, M, N, stride_scales, low, steps, tiles,
    FIRST: gl.constexpr, COUNT: gl.constexpr, BM: gl.constexpr, R: gl.constexpr,
    UNITS: gl.constexpr, STAGES: gl.constexpr, SHARED: gl.constexpr, BLOCKS: gl.constexpr,
    GROUPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The program of four multiplying warps, which have COUNT units of a tile from FIRST on."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 32])
    MINE: gl.constexpr = R - FIRST * ROWS  # rows of the matrix from the first of these units on
    x_at = x_scales + m0 + gl.arange(0, BM, gl.SliceLayout(0, L))
    wait_for_inputs(PDL)
    slot = 0
    phase = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        n = tile * R + FIRST * ROWS
        y0 = gl.zeros((ROWS, BM), gl.float32, L)
        y1 = gl.zeros((ROWS, BM), gl.float32, L)
        y2 = gl.zeros((ROWS, BM), gl.float32, L)
        for i in range(steps):
            k, at = low + i, slot * UNITS + FIRST
            x_scale = gl.load(x_at + k * NEXT_GROUP) if GROUPS else 0.0
            s0 = _row_scales(scales, n, k, N, stride_scales, L, SHARED, BLOCKS)
            if COUNT > 1:
                s1 = _row_scales(scales, n + ROWS, k, N, stride_scales, L, SHARED, BLOCKS)
            if COUNT > 2:
                s2 = _row_scales(scales, n + 2 * ROWS, k, N, stride_scales, L, SHARED, BLOCKS)
            mbarrier.wait(filled.index(slot), phase)
            v = xs.index(slot).permute((1, 0))
            p0 = warpgroup_mma(ws.index(at), v, y0, use_acc=False, is_async=True)
            if COUNT > 1:
                p1 = warpgroup_mma(ws.index(at + 1), v, y1, use_acc=False, is_async=True)
            if COUNT > 2:
                p2 = warpgroup_mma(ws.index(at + 2), v, y2, use_acc=False, is_async=True)
                p0, p1, p2 = warpgroup_mma_wait(0, deps=(p0, p1, p2))
            elif COUNT > 1:
                p0, p1 = warpgroup_mma_wait(0, deps=(p0, p1))
            else:
                p0 = warpgroup_mma_wait(0, deps=(p0,))
            mbarrier.arrive(free.index(slot), count=1)
            y0 = _add_step(y0, p0, x_scale, s0, BLOCKS, GROUPS)
            if COUNT > 1:
                y1 = _add_step(y1, p1, x_scale, s1, BLOCKS, GROUPS)
            if COUNT > 2:
                y2 = _add_step(y2, p2, x_scale, s2, BLOCKS, GROUPS)
            slot += 1
            phase = gl.where(slot == STAGES, phase ^ 1, phase)
            slot = gl.where(slot == STAGES, 0, slot)
        _finish(
            out, y0, x_scales, scales, n, m0, M, N, stride_scales, MINE, BM, SHARED, BLOCKS, GROUPS
        )
        if COUNT > 1:
            _finish(
                out, y1, x_scales, scales, n + ROWS, m0, M, N, stride_scales,
                MINE - ROWS, BM, SHARED, BLOCKS, GROUPS,
            )  # fmt: skip
        if COUNT > 2:
            _finish(
                out, y2, x_scales, scales, n + 2 * ROWS, m0, M, N, stride_scales,
                MINE - 2 * ROWS, BM, SHARED, BLOCKS, GROUPS,
            )  # fmt: skip


@gluon.jit(do_not_specialize=["M"])
def _specialized_kernel(
    # [splits, M, N]
    out,
    # [M or more, K] e4m3 in tiles [BM, 128]
    x,
    # [groups, NEXT_GROUP] float32
    x_scales,
    # [N, K] e4m3 in tiles [R0, 128], [R1, 128] and [R2, 128]
    weight_0,
    weight_1,
    weight_2,
    # [R, C] float32, of SHARED rows each
    scales,
    M, N, K, stride_scales,
    BM: gl.constexpr, R0: gl.constexpr, R1: gl.constexpr, R2: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, SHARED: gl.constexpr, BLOCKS: gl.constexpr, GROUPS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    start_next(PDL)
    R: gl.constexpr = R0 + R1 + R2
    UNITS: gl.constexpr = (R + ROWS - 1) // ROWS
    HALVES: gl.constexpr = BM > 64 and UNITS > 1  # each four warps have half of the units
    BYTES: gl.constexpr = BK * (BM + R)
    split, splits = gl.program_id(1), gl.num_programs(1)
    all_steps = gl.cdiv(K, BK)
    low = split * all_steps // splits
    steps = (split + 1) * all_steps // splits - low
    tiles, m = gl.cdiv(N, R), gl.program_id(2) * BM
    xs = gl.allocate_shared_memory(x.dtype, [STAGES, BM, BK], x.layout)
    ws = gl.allocate_shared_memory(x.dtype, [STAGES * UNITS, ROWS, BK], x.layout)
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(filled.index(i), count=1)
        mbarrier.init(free.index(i), count=2 if HALVES else 1)
    if R % ROWS:
        ZEROS: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
        zeros = gl.zeros([ROWS, BK], gl.float32, ZEROS).to(x.dtype)
        for i in gl.static_range(STAGES):
            ws.index(i * UNITS + UNITS - 1).store(zeros)
    fence_async_shared()
    if not HALVES:
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (
                        out, x_scales, scales, xs, ws, filled, free, m, M, N, stride_scales,
                        low, steps, tiles,
                        0, UNITS, BM, R, UNITS, STAGES, SHARED, BLOCKS, GROUPS, PDL,
                    ),
                ),
                (
                    _copy_steps,
                    (
                        x, weight_0, weight_1, weight_2, xs, ws, filled, free, m, low, steps, tiles,
                        R0, R1, R2, UNITS, BK, STAGES, BYTES, PDL,
                    ),
                ),
            ],
            [1],
            [COPY_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (
                        out, x_scales, scales, xs, ws, filled, free, m, M, N, stride_scales,
                        low, steps, tiles,
                        0, UNITS // 2, BM, R, UNITS, STAGES, SHARED, BLOCKS, GROUPS, PDL,
                    ),
                ),
                (
                    _multiply,
                    (
                        out, x_scales, scales, xs, ws, filled, free, m, M, N, stride_scales,
                        low, steps, tiles, UNITS // 2, UNITS - UNITS // 2,
                        BM, R, UNITS, STAGES, SHARED, BLOCKS, GROUPS, PDL,
                    ),
                ),
                (
                    _copy_steps,
                    (
                        x, weight_0, weight_1, weight_2, xs, ws, filled, free, m, low, steps, tiles,
                        R0, R1, R2, UNITS, BK, STAGES, BYTES, PDL,
                    ),
                ),
            ],
            [4, 1],
            [SECOND_REGISTERS, COPY_REGISTERS],
        )  # fmt: skip


def specialized_product(
    rows: RoundedRows, matrix: QuantisedMatrix, tiles: SpecializedTiles
) -> Tensor:
    """Product [T, N] of rounded rows with the matrix, in the dtype that they had, or partial sums
    [S, T, N] in float32 where the tiles split K."""
    numbers, scales = rows.padded, rows.by_group
    count, n = rows.count, matrix.data.shape[0]
    if tiles.splits > 1:
        out = scales.new_empty(tiles.splits, count, n)
    else:
        out = scales.new_empty(count, n, dtype=rows.dtype)
    layout = gl.NVMMASharedLayout.get_default_for([tiles.m, STEP], gl.float8e4nv)
    data, missing = matrix.data, 3 - len(tiles.columns)
    weights = [TensorDescriptor.from_tensor(data, [r, STEP], layout) for r in tiles.columns]
    columns = (*tiles.columns, *[0] * missing)
    programs, blocks = triton.cdiv(n, sum(columns)), triton.cdiv(count, tiles.m)
    _specialized_kernel[min(programs, NUM_SMS), tiles.splits, blocks](
        out,
        TensorDescriptor.from_tensor(numbers, [tiles.m, STEP], layout),
        scales,
        *(*weights, *[None] * missing),
        matrix.scales,
        *(count, n, matrix.width, matrix.scales.stride(0)),
        BM=tiles.m,
        R0=columns[0],
        R1=columns[1],
        R2=columns[2],
        BK=STEP,
        STAGES=tiles.stages,
        SHARED=matrix.rows,
        BLOCKS=matrix.scales.shape[-1] > 1,
        GROUPS=matrix.rounding.kind == "group",
        num_warps=4,
        maxnreg=tiles.registers,
        **dependent_launch(numbers),
    )
    return out
