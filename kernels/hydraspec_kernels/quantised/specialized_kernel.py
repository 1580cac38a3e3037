"""Rounded rows times an FP8 matrix on Hopper's FP8 tensor cores, warp-specialised: one warp copies.

A program owns R0 + R1 + R2 rows of the matrix, powers of two, in units of 64; zeros fill the last.
Each four of its other warps multiply them with up to 64 rows of x. With few rows of x the matrix is
the left operand, whose products are of 64 rows, so that rows of x that are not there cost nothing.
Tensor cores sum FP8 products with some 14 bits, so every step of 128 columns is a sum of its own,
which is scaled and added in float32. Gluon has no interpreter: only tests on the device run this.
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
from hydraspec_kernels.quantised.plan import (
    LEAST_SCALES,
    MOST_LEFT_ROWS,
    STEP,
    UNIT_ROWS,
    SpecializedTiles,
)
from hydraspec_kernels.quantised.records import QuantisedMatrix, RoundedRows
from hydraspec_kernels.runtime.gluon_kernel import (
    load_tile,
    start_next,
    view_tiles,
    wait_for_inputs,
)
from hydraspec_kernels.runtime.launch import NUM_SMS
from hydraspec_kernels.runtime.launch_kernel import dependent_launch

ROWS = gl.constexpr(UNIT_ROWS)  # of a unit of the matrix, and of x for four warps
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
def _copy_x(x, x_scales, xs, of_x, slot, filled, m, k, BK: gl.constexpr, GROUPS: gl.constexpr):
    """Starts copying step k of rows of x from m on, and their scales of it, into a slot."""
    load_tile(x, [m, k * BK], filled, xs.index(slot))
    if GROUPS:
        load_tile(x_scales, [k, m], filled, of_x.index(slot))


@gluon.jit
def _copy_steps(
    x, x_scales, weight_0, weight_1, weight_2, xs, of_x, ws, filled, free, m, low, steps, tiles,
    R0: gl.constexpr, R1: gl.constexpr, R2: gl.constexpr, UNITS: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, BYTES: gl.constexpr, GROUPS: gl.constexpr, PDL: gl.constexpr,
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
        k = low + i % steps
        _copy_x(x, x_scales, xs, of_x, i, filled.index(i), m, k, BK, GROUPS)
    slot = 0
    phase = 0
    for i in range(first, total):
        n, k, at = (program + i // steps * programs) * R, low + i % steps, filled.index(slot)
        mbarrier.wait(free.index(slot), phase)
        mbarrier.expect(at, BYTES)
        _copy_rows(weight_0, weight_1, weight_2, ws, slot, at, n, k * BK, R0, R1, R2, UNITS, BK)
        _copy_x(x, x_scales, xs, of_x, slot, at, m, k, BK, GROUPS)
        slot += 1
        phase = gl.where(slot == STAGES, phase ^ 1, phase)
        slot = gl.where(slot == STAGES, 0, slot)


@gluon.jit
def _load_scales(
    scales, n, k, N, stride_scales, WIDTH: gl.constexpr, SHARED: gl.constexpr, BLOCKS: gl.constexpr
):
    """Scales of step k of the one or two blocks of SHARED rows in which rows n to n + WIDTH of the
    matrix lie; 1 for all if blocks have none."""
    if BLOCKS:
        first, last = gl.minimum(n, N - 1) // SHARED, gl.minimum(n + WIDTH, N) - 1
        one = gl.load(scales + first * stride_scales + k)
        other = gl.load(scales + last // SHARED * stride_scales + k)
    else:
        one, other = 1.0, 1.0
    return one, other


@gluon.jit
def _product(w, v, y, LEFT: gl.constexpr):
    """Starts multiplying rows of the matrix with rows of x; LEFT: the former are the left operand.
    Returns the product, of the shape and layout of y."""
    if LEFT:
        return warpgroup_mma(w, v.permute((1, 0)), y, use_acc=False, is_async=True)
    else:
        return warpgroup_mma(v, w.permute((1, 0)), y, use_acc=False, is_async=True)


@gluon.jit
def _read_scales(
    of_x, slot, OF_TILE: gl.constexpr, BM: gl.constexpr, LAYOUT: gl.constexpr, LEFT: gl.constexpr,
    GROUPS: gl.constexpr,
):  # fmt: skip
    """Scales of BM rows of x from OF_TILE on, in a slot, as a row if LEFT, else as a column; 1 for
    all if a step has none."""
    if GROUPS:
        row = of_x.index(slot).slice(OF_TILE, BM, 1)
        return row.load(LAYOUT) if LEFT else row.permute((1, 0)).load(LAYOUT)
    else:
        return 1.0


@gluon.jit
def _add_step(
    y, part, scale, of_matrix, n,
    LEFT: gl.constexpr, SHARED: gl.constexpr, BLOCKS: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """y + part, scaled if rows of x or blocks of the matrix (see `_load_scales`) have a scale for
    the step. LEFT: rows of the matrix, from n on, are the first axis."""
    OF_X: gl.constexpr = 0 if LEFT else 1
    OF_ROWS: gl.constexpr = 1 - OF_X
    LAYOUT: gl.constexpr = y.type.layout
    if BLOCKS:
        one, other = of_matrix
        row = n + gl.arange(0, y.shape[OF_X], gl.SliceLayout(OF_ROWS, LAYOUT))
        of_rows = gl.where(row // SHARED == n // SHARED, one, other).expand_dims(OF_ROWS)
        scale = scale * of_rows if GROUPS else of_rows
    return y + part * scale if BLOCKS or GROUPS else y + part


@gluon.jit
def _finish(
    out, y, x_scales, scales, n0, m0, stop, M, N, stride_scales,
    LEFT: gl.constexpr, SHARED: gl.constexpr, BLOCKS: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """Scales y by row and by column, if those were not scales of steps, and stores it to columns n0
    to `stop`, in rows from m0, of this program's range of K of out. LEFT: see `_add_step`."""
    OF_X: gl.constexpr = 0 if LEFT else 1
    OF_ROWS: gl.constexpr = 1 - OF_X
    WIDTH: gl.constexpr = y.shape[OF_X]
    BM: gl.constexpr = y.shape[OF_ROWS]
    LAYOUT: gl.constexpr = y.type.layout
    if not BLOCKS:
        n = n0 + gl.arange(0, WIDTH, gl.SliceLayout(OF_ROWS, LAYOUT))
        of_rows = gl.load(scales + n // SHARED * stride_scales, mask=n < N, other=0.0)
        y = y * of_rows.expand_dims(OF_ROWS)
    if not GROUPS:
        m = m0 + gl.arange(0, BM, gl.SliceLayout(OF_X, LAYOUT))
        y = y * gl.load(x_scales + m).expand_dims(OF_X)
    v = y.to(out.dtype.element_ty)
    if out.dtype.element_ty.primitive_bitwidth == 16:  # 16 bytes per thread
        if LEFT:
            v = gl.convert_layout(v, gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1]))
        else:
            v = gl.convert_layout(v, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
    STORED: gl.constexpr = v.type.layout
    n = n0 + gl.arange(0, WIDTH, gl.SliceLayout(OF_ROWS, STORED))
    m = m0 + gl.arange(0, BM, gl.SliceLayout(OF_X, STORED))
    to = (gl.program_id(1).to(gl.int64) * M + m).expand_dims(OF_X) * N + n.expand_dims(OF_ROWS)
    real = (n < gl.minimum(stop, N)).expand_dims(OF_ROWS) & (m < M).expand_dims(OF_X)
    gl.store(out + to, v, mask=real)


@gluon.jit
def _multiply(
    out, x_scales, scales, xs, of_x, ws, filled, free, m0, M, N, stride_scales, low, steps, tiles,
    OF_TILE: gl.constexpr, BM: gl.constexpr, R: gl.constexpr, UNITS: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, LEFT: gl.constexpr, SHARED: gl.constexpr, BLOCKS: gl.constexpr,
    GROUPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The program of four multiplying warps, which have BM rows of a tile of x from OF_TILE on.

    Of a tile's rows of the matrix, the first product has WIDE and each other one 64.
    """
    TILES: gl.constexpr = ws.layout
    WIDE: gl.constexpr = ROWS if LEFT or UNITS == 1 else 2 * ROWS
    PARTS: gl.constexpr = UNITS if LEFT else (UNITS + 1) // 2
    L0: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM if LEFT else WIDE, 32])
    L1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM if LEFT else ROWS, 32])
    SHAPE_0: gl.constexpr = [ROWS, BM] if LEFT else [BM, WIDE]
    SHAPE_1: gl.constexpr = [ROWS, BM] if LEFT else [BM, ROWS]
    m0 += OF_TILE
    wait_for_inputs(PDL)
    slot = 0
    phase = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        n0 = tile * R
        n1, n2, stop = n0 + WIDE, n0 + WIDE + ROWS, n0 + R
        y0 = gl.zeros(SHAPE_0, gl.float32, L0)
        y1 = gl.zeros(SHAPE_1, gl.float32, L1)
        y2 = gl.zeros(SHAPE_1, gl.float32, L1)
        for i in range(steps):
            at, k = slot * UNITS, low + i
            s0 = _load_scales(scales, n0, k, N, stride_scales, WIDE, SHARED, BLOCKS)
            s1 = _load_scales(scales, n1, k, N, stride_scales, ROWS, SHARED, BLOCKS and PARTS > 1)
            s2 = _load_scales(scales, n2, k, N, stride_scales, ROWS, SHARED, BLOCKS and PARTS > 2)
            mbarrier.wait(filled.index(slot), phase)
            v = xs.index(slot).slice(OF_TILE, BM)
            p0 = _product(view_tiles(ws.index(at), 1, WIDE, BK, TILES).index(0), v, y0, LEFT)
            if PARTS > 1:
                p1 = _product(ws.index(at + WIDE // ROWS), v, y1, LEFT)
            if PARTS > 2:
                p2 = _product(ws.index(at + 2), v, y2, LEFT)
            x0 = _read_scales(of_x, slot, OF_TILE, BM, L0, LEFT, GROUPS)
            x1 = _read_scales(of_x, slot, OF_TILE, BM, L1, LEFT, GROUPS and PARTS > 1)
            if PARTS > 2:
                p0, p1, p2 = warpgroup_mma_wait(0, deps=(p0, p1, p2))
            elif PARTS > 1:
                p0, p1 = warpgroup_mma_wait(0, deps=(p0, p1))
            else:
                p0 = warpgroup_mma_wait(0, deps=(p0,))
            mbarrier.arrive(free.index(slot), count=1)
            y0 = _add_step(y0, p0, x0, s0, n0, LEFT, SHARED, BLOCKS, GROUPS)
            if PARTS > 1:
                y1 = _add_step(y1, p1, x1, s1, n1, LEFT, SHARED, BLOCKS, GROUPS)
            if PARTS > 2:
                y2 = _add_step(y2, p2, x1, s2, n2, LEFT, SHARED, BLOCKS, GROUPS)
            slot += 1
            phase = gl.where(slot == STAGES, phase ^ 1, phase)
            slot = gl.where(slot == STAGES, 0, slot)
        _finish(
            out, y0, x_scales, scales, n0, m0, stop, M, N, stride_scales,
            LEFT, SHARED, BLOCKS, GROUPS,
        )  # fmt: skip
        if PARTS > 1:
            _finish(
                out, y1, x_scales, scales, n1, m0, stop, M, N, stride_scales,
                LEFT, SHARED, BLOCKS, GROUPS,
            )  # fmt: skip
        if PARTS > 2:
            _finish(
                out, y2, x_scales, scales, n2, m0, stop, M, N, stride_scales,
                LEFT, SHARED, BLOCKS, GROUPS,
            )  # fmt: skip


@gluon.jit(do_not_specialize=["M"])
def _specialized_kernel(
    # [splits, M, N]
    out,
    # [M or more, K] e4m3 in tiles [BM, 128]
    x,
    # [groups, NEXT_GROUP] float32, in rows [1, BM or more] if there are scales for each step
    x_scales,
    # [N, K] e4m3 in tiles [R0, 128], [R1, 128] and [R2, 128]
    weight_0,
    weight_1,
    weight_2,
    # [R, C] float32, of SHARED rows each
    scales,
    M, N, K, stride_scales,
    BM: gl.constexpr, R0: gl.constexpr, R1: gl.constexpr, R2: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, LEFT: gl.constexpr, SHARED: gl.constexpr, BLOCKS: gl.constexpr,
    GROUPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    start_next(PDL)
    R: gl.constexpr = R0 + R1 + R2
    UNITS: gl.constexpr = (R + ROWS - 1) // ROWS
    SCALES: gl.constexpr = x_scales.block_type.shape[1] if GROUPS else 0
    BYTES: gl.constexpr = BK * (BM + R) + 4 * SCALES
    split, splits = gl.program_id(1), gl.num_programs(1)
    all_steps = gl.cdiv(K, BK)
    low = split * all_steps // splits
    steps = (split + 1) * all_steps // splits - low
    tiles, m = gl.cdiv(N, R), gl.program_id(2) * BM
    xs = gl.allocate_shared_memory(x.dtype, [STAGES, BM, BK], x.layout)
    ws = gl.allocate_shared_memory(x.dtype, [STAGES * UNITS, ROWS, BK], x.layout)
    if GROUPS:
        of_x = gl.allocate_shared_memory(gl.float32, [STAGES, 1, SCALES], x_scales.layout)
    else:
        of_x = xs  # not used
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(filled.index(i), count=1)
        mbarrier.init(free.index(i), count=(BM + ROWS - 1) // ROWS)
    if R % ROWS:
        ZEROS: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
        zeros = gl.zeros([ROWS, BK], gl.float32, ZEROS).to(x.dtype)
        for i in gl.static_range(STAGES):
            ws.index(i * UNITS + UNITS - 1).store(zeros)
    fence_async_shared()
    if BM <= ROWS:
        gl.warp_specialize(
            [
                (_multiply, (
                    out, x_scales, scales, xs, of_x, ws, filled, free, m, M, N, stride_scales,
                    low, steps, tiles,
                    0, BM, R, UNITS, BK, STAGES, LEFT, SHARED, BLOCKS, GROUPS, PDL,
                )),
                (_copy_steps, (
                    x, x_scales, weight_0, weight_1, weight_2, xs, of_x, ws, filled, free, m,
                    low, steps, tiles, R0, R1, R2, UNITS, BK, STAGES, BYTES, GROUPS, PDL,
                )),
            ],
            [1],
            [COPY_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (
                    out, x_scales, scales, xs, of_x, ws, filled, free, m, M, N, stride_scales,
                    low, steps, tiles,
                    0, ROWS, R, UNITS, BK, STAGES, LEFT, SHARED, BLOCKS, GROUPS, PDL,
                )),
                (_multiply, (
                    out, x_scales, scales, xs, of_x, ws, filled, free, m, M, N, stride_scales,
                    low, steps, tiles,
                    ROWS, ROWS, R, UNITS, BK, STAGES, LEFT, SHARED, BLOCKS, GROUPS, PDL,
                )),
                (_copy_steps, (
                    x, x_scales, weight_0, weight_1, weight_2, xs, of_x, ws, filled, free, m,
                    low, steps, tiles, R0, R1, R2, UNITS, BK, STAGES, BYTES, GROUPS, PDL,
                )),
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
    by_group = matrix.rounding.kind == "group"
    layout = gl.NVMMASharedLayout.get_default_for([tiles.m, STEP], gl.float8e4nv)
    of_step = [1, max(tiles.m, LEAST_SCALES)]
    line = gl.NVMMASharedLayout.get_default_for(of_step, gl.float32)
    data, missing = matrix.data, 3 - len(tiles.columns)
    weights = [TensorDescriptor.from_tensor(data, [r, STEP], layout) for r in tiles.columns]
    columns = (*tiles.columns, *[0] * missing)
    programs, blocks = triton.cdiv(n, sum(columns)), triton.cdiv(count, tiles.m)
    _specialized_kernel[min(programs, NUM_SMS), tiles.splits, blocks](
        out,
        TensorDescriptor.from_tensor(numbers, [tiles.m, STEP], layout),
        TensorDescriptor.from_tensor(scales, of_step, line) if by_group else scales,
        *(*weights, *[None] * missing),
        matrix.scales,
        *(count, n, matrix.width, matrix.scales.stride(0)),
        BM=tiles.m,
        R0=columns[0],
        R1=columns[1],
        R2=columns[2],
        BK=STEP,
        STAGES=tiles.stages,
        LEFT=tiles.m <= MOST_LEFT_ROWS,
        SHARED=matrix.rows,
        BLOCKS=matrix.scales.shape[-1] > 1,
        GROUPS=by_group,
        num_warps=4,
        maxnreg=tiles.registers,
        **dependent_launch(numbers),
    )
    return out
