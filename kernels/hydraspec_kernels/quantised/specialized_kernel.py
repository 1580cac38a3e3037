"""Rounded rows times an FP8 matrix on Hopper's FP8 tensor cores, warp-specialised: one warp copies.

As `linear.specialized_kernel`, whose copying warp runs here too: a program owns R0 + R1 + R2 rows
of the matrix, which share a tile of x [BM, 128] as their left operand. Each four of the other warps
multiply 64 rows of x. Tensor cores sum FP8 products with some 14 bits, so every step of 128 columns
is a sum of its own, which is scaled and added in float32. Gluon has no interpreter: only tests on
the device run this.
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

from hydraspec_kernels.linear.specialized_kernel import COPY_REGISTERS, copy_steps, store_sums
from hydraspec_kernels.quantised.plan import STEP, SpecializedTiles
from hydraspec_kernels.quantised.records import QuantisedMatrix, RoundedRows
from hydraspec_kernels.runtime.gluon_kernel import start_next, wait_for_inputs
from hydraspec_kernels.runtime.launch import NUM_SMS
from hydraspec_kernels.runtime.launch_kernel import dependent_launch

ROWS_OF_WARPS = gl.constexpr(64)  # of x, which four warps multiply
SECOND_REGISTERS = gl.constexpr(224)  # of a thread of the warps with rows 64 to 127


@gluon.jit
def _block_scales(
    scales, n, k, N, stride_scales, R: gl.constexpr, ROWS: gl.constexpr, BLOCKS: gl.constexpr
):
    """Scales of step k of the one or two blocks in which R rows of the matrix lie, at most ROWS."""
    if BLOCKS:
        last = gl.minimum(n + R, N) - 1
        first = gl.load(scales + n // ROWS * stride_scales + k)
        second = gl.load(scales + last // ROWS * stride_scales + k)
    else:
        first, second = 1.0, 1.0
    return first, second


@gluon.jit
def _add_step(
    y, part, x_scale, first, second, n,
    R: gl.constexpr, ROWS: gl.constexpr, BLOCKS: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """y + part, scaled where rows of x or blocks of the matrix have a scale for the step."""
    LAYOUT: gl.constexpr = y.type.layout
    if BLOCKS:
        column = n + gl.arange(0, R, gl.SliceLayout(0, LAYOUT))
        of_column = gl.where(column // ROWS == n // ROWS, first, second)
        if GROUPS:
            x_scale = gl.convert_layout(x_scale, gl.SliceLayout(1, LAYOUT))
            y += part * (x_scale[:, None] * of_column[None, :])
        else:
            y += part * of_column[None, :]
    elif GROUPS:
        y += part * gl.convert_layout(x_scale, gl.SliceLayout(1, LAYOUT))[:, None]
    else:
        y += part
    return y


@gluon.jit
def _finish(
    out, y, x_scales, scales, n0, m0, M, N, stride_scales,
    R: gl.constexpr, ROWS: gl.constexpr, BLOCKS: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """Scales y [64, R] by row and by column, if those were not scales of steps, and stores it."""
    LAYOUT: gl.constexpr = y.type.layout
    if not BLOCKS:
        n = n0 + gl.arange(0, R, gl.SliceLayout(0, LAYOUT))
        y = y * gl.load(scales + n // ROWS * stride_scales, mask=n < N, other=0.0)[None, :]
    if not GROUPS:
        m = m0 + gl.arange(0, ROWS_OF_WARPS, gl.SliceLayout(1, LAYOUT))
        y = y * gl.load(x_scales + m, mask=m < M, other=0.0)[:, None]
    store_sums(out, y, n0, m0, M, N, R, ROWS_OF_WARPS)


@gluon.jit
def _multiply(
    out, x_scales, scales, xs, w0, w1, w2, filled, free, m0, M, N, groups, stride_scales, low,
    steps, tiles,
    FIRST: gl.constexpr, R0: gl.constexpr, R1: gl.constexpr, R2: gl.constexpr,
    STAGES: gl.constexpr, ROWS: gl.constexpr, BLOCKS: gl.constexpr, GROUPS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """The program of four multiplying warps, which have the 64 rows of a tile of x from FIRST on,
    16 each.
    """
    BM: gl.constexpr = ROWS_OF_WARPS
    L0: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, R0, 32])
    L1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, R1 if R1 else 8, 32])
    L2: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, R2 if R2 else 8, 32])
    m0 += FIRST
    m = m0 + gl.arange(0, BM, gl.SliceLayout(1, L0))
    x_at = x_scales + m * groups + low
    wait_for_inputs(PDL)
    slot = 0
    phase = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        n = tile * (R0 + R1 + R2)
        y0 = gl.zeros((BM, R0), gl.float32, L0)
        y1 = gl.zeros((BM, R1 if R1 else 8), gl.float32, L1)
        y2 = gl.zeros((BM, R2 if R2 else 8), gl.float32, L2)
        for i in range(steps):
            k = low + i
            x_scale = gl.load(x_at + i, mask=m < M, other=0.0) if GROUPS else 0.0
            a0, b0 = _block_scales(scales, n, k, N, stride_scales, R0, ROWS, BLOCKS)
            if R1:
                a1, b1 = _block_scales(scales, n + R0, k, N, stride_scales, R1, ROWS, BLOCKS)
            if R2:
                a2, b2 = _block_scales(scales, n + R0 + R1, k, N, stride_scales, R2, ROWS, BLOCKS)
            mbarrier.wait(filled.index(slot), phase)
            v = xs.index(slot).slice(FIRST, BM)
            p0 = warpgroup_mma(v, w0.index(slot).permute((1, 0)), y0, use_acc=False, is_async=True)
            if R1:
                p1 = warpgroup_mma(
                    v, w1.index(slot).permute((1, 0)), y1, use_acc=False, is_async=True
                )
            if R2:
                p2 = warpgroup_mma(
                    v, w2.index(slot).permute((1, 0)), y2, use_acc=False, is_async=True
                )
                p0, p1, p2 = warpgroup_mma_wait(0, deps=(p0, p1, p2))
            elif R1:
                p0, p1 = warpgroup_mma_wait(0, deps=(p0, p1))
            else:
                p0 = warpgroup_mma_wait(0, deps=(p0,))
            mbarrier.arrive(free.index(slot), count=1)
            y0 = _add_step(y0, p0, x_scale, a0, b0, n, R0, ROWS, BLOCKS, GROUPS)
            if R1:
                y1 = _add_step(y1, p1, x_scale, a1, b1, n + R0, R1, ROWS, BLOCKS, GROUPS)
            if R2:
                y2 = _add_step(y2, p2, x_scale, a2, b2, n + R0 + R1, R2, ROWS, BLOCKS, GROUPS)
            slot += 1
            phase = gl.where(slot == STAGES, phase ^ 1, phase)
            slot = gl.where(slot == STAGES, 0, slot)
        _finish(out, y0, x_scales, scales, n, m0, M, N, stride_scales, R0, ROWS, BLOCKS, GROUPS)
        if R1:
            n += R0
            _finish(out, y1, x_scales, scales, n, m0, M, N, stride_scales, R1, ROWS, BLOCKS, GROUPS)
        if R2:
            n += R1
            _finish(out, y2, x_scales, scales, n, m0, M, N, stride_scales, R2, ROWS, BLOCKS, GROUPS)


@gluon.jit(do_not_specialize=["M"])
def _specialized_kernel(
    # [splits, M, N]
    out,
    # [M or more, K] e4m3 in tiles [BM, 128]
    x,
    # [M, groups] float32
    x_scales,
    # [N, K] e4m3 in tiles [R0, 128], [R1, 128] and [R2, 128]
    weight_0,
    weight_1,
    weight_2,
    # [R, C] float32
    scales,
    M, N, K, groups, stride_scales,
    BM: gl.constexpr, XM: gl.constexpr, R0: gl.constexpr, R1: gl.constexpr, R2: gl.constexpr,
    BK: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr, BLOCKS: gl.constexpr,
    GROUPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    start_next(PDL)
    R: gl.constexpr = R0 + R1 + R2
    split, splits = gl.program_id(1), gl.num_programs(1)
    all_steps = gl.cdiv(K, BK)
    low = split * all_steps // splits
    steps = (split + 1) * all_steps // splits - low
    tiles, m = gl.cdiv(N, R), gl.program_id(2) * BM
    xs = gl.allocate_shared_memory(x.dtype, [STAGES, BM, BK], x.layout)
    w0 = gl.allocate_shared_memory(x.dtype, [STAGES, R0, BK], x.layout)
    w1, w2 = w0, w0
    if R1:
        w1 = gl.allocate_shared_memory(x.dtype, [STAGES, R1, BK], x.layout)
    if R2:
        w2 = gl.allocate_shared_memory(x.dtype, [STAGES, R2, BK], x.layout)
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(filled.index(i), count=1)
        mbarrier.init(free.index(i), count=BM // ROWS_OF_WARPS)
    if XM < BM:  # rows that are not copied stay zero, which takes the least power
        ZEROS: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
        zeros = gl.zeros([BM, BK], gl.float32, ZEROS).to(x.dtype)
        for i in gl.static_range(STAGES):
            xs.index(i).store(zeros)
    fence_async_shared()
    if BM == ROWS_OF_WARPS:
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (
                        out, x_scales, scales, xs, w0, w1, w2, filled, free, m, M, N, groups,
                        stride_scales, low, steps, tiles,
                        0, R0, R1, R2, STAGES, ROWS, BLOCKS, GROUPS, PDL,
                    ),
                ),
                (
                    copy_steps,
                    (
                        x, weight_0, weight_1, weight_2, xs, w0, w1, w2, filled, free, m, N, low,
                        steps, tiles, R0, R1, R2, BK, STAGES, 1, XM, BK * (XM + R), PDL,
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
                        out, x_scales, scales, xs, w0, w1, w2, filled, free, m, M, N, groups,
                        stride_scales, low, steps, tiles,
                        0, R0, R1, R2, STAGES, ROWS, BLOCKS, GROUPS, PDL,
                    ),
                ),
                (
                    _multiply,
                    (
                        out, x_scales, scales, xs, w0, w1, w2, filled, free, m, M, N, groups,
                        stride_scales, low, steps, tiles,
                        ROWS_OF_WARPS, R0, R1, R2, STAGES, ROWS, BLOCKS, GROUPS, PDL,
                    ),
                ),
                (
                    copy_steps,
                    (
                        x, weight_0, weight_1, weight_2, xs, w0, w1, w2, filled, free, m, N, low,
                        steps, tiles, R0, R1, R2, BK, STAGES, 1, XM, BK * (XM + R), PDL,
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
    numbers, scales = rows.numbers, rows.scales
    count, n = numbers.shape[0], matrix.data.shape[0]
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
        TensorDescriptor.from_tensor(rows.padded, [tiles.copied, STEP], layout),
        scales,
        *(*weights, *[None] * missing),
        matrix.scales,
        *(count, n, matrix.width, scales.shape[1], matrix.scales.stride(0)),
        BM=tiles.m,
        XM=tiles.copied,
        R0=columns[0],
        R1=columns[1],
        R2=columns[2],
        BK=STEP,
        STAGES=tiles.stages,
        ROWS=matrix.rows,
        BLOCKS=matrix.scales.shape[-1] > 1,
        GROUPS=matrix.rounding.kind == "group",
        num_warps=4,
        maxnreg=tiles.registers,
        **dependent_launch(numbers),
    )
    return out
