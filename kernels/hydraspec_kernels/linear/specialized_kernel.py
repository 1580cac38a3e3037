"""Rows times a large matrix, warp-specialised: one warp copies, the others only multiply.

A program owns R0 + R1 + R2 columns of the output: up to three products, whose widths are powers of
two, share a tile of x [BM, BK] as their left operand. Gated products take rows of gate and, stored
after them, as many of up. The copying warp fills the stages with weights before its inputs are
complete, and runs ahead into its program's next columns. Gluon has no interpreter: only tests on
the device run this.
"""

from __future__ import annotations

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

from hydraspec_kernels.linear.plan import SpecializedTiling
from hydraspec_kernels.runtime.gluon_kernel import (
    load_tile,
    start_next,
    view_tiles,
    wait_for_inputs,
)
from hydraspec_kernels.runtime.launch_kernel import dependent_launch

COPY_REGISTERS = gl.constexpr(40)  # of a thread of the copying warp


@gluon.jit
def logistic(v):
    """The logistic function of v, in float32."""
    return 1 / (1 + gl.exp(gl.minimum(-v, 80.0)))  # e^80 is finite, and large enough


@gluon.jit
def gelu_tanh(v):
    """GELU in its tanh form: 0.5 (1 + tanh(u)) is the logistic function of 2u."""
    return v * logistic(1.5957691216057308 * (v + 0.044715 * v * v * v))


@gluon.jit
def _copy_weights(
    weight_0, weight_1, weight_2, w0, w1, w2, slot, filled, n, k, N,
    R0: gl.constexpr, R1: gl.constexpr, R2: gl.constexpr, BRANCHES: gl.constexpr,
):  # fmt: skip
    """Starts copying the weights of output columns n to n + R0 + R1 + R2, of each branch, into a
    slot.
    """
    for b in gl.static_range(BRANCHES):
        at = slot * BRANCHES + b
        row = b * N + n
        load_tile(weight_0, [row, k], filled, w0.index(at))
        if R1:
            load_tile(weight_1, [row + R0, k], filled, w1.index(at))
        if R2:
            load_tile(weight_2, [row + R0 + R1, k], filled, w2.index(at))


@gluon.jit
def _copy_steps(
    x, weight_0, weight_1, weight_2, xs, w0, w1, w2, filled, free, m, N, low, steps, tiles,
    R0: gl.constexpr, R1: gl.constexpr, R2: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    BRANCHES: gl.constexpr, BYTES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The program of the copying warp: copies all steps of all tiles, as slots become free."""
    R: gl.constexpr = R0 + R1 + R2
    program, programs = gl.program_id(0), gl.num_programs(0)
    total = gl.cdiv(tiles - program, programs) * steps
    first = gl.minimum(total, STAGES)
    for i in range(first):
        n, k = (program + i // steps * programs) * R, (low + i % steps) * BK
        mbarrier.expect(filled.index(i), BYTES)
        _copy_weights(
            weight_0, weight_1, weight_2, w0, w1, w2, i, filled.index(i), n, k, N,
            R0, R1, R2, BRANCHES,
        )  # fmt: skip
    wait_for_inputs(PDL)
    for i in range(first):
        k = (low + i % steps) * BK
        load_tile(x, [m, k], filled.index(i), xs.index(i))
    slot = 0
    phase = 0
    for i in range(first, total):
        n, k = (program + i // steps * programs) * R, (low + i % steps) * BK
        mbarrier.wait(free.index(slot), phase)
        mbarrier.expect(filled.index(slot), BYTES)
        _copy_weights(
            weight_0, weight_1, weight_2, w0, w1, w2, slot, filled.index(slot), n, k, N,
            R0, R1, R2, BRANCHES,
        )  # fmt: skip
        load_tile(x, [m, k], filled.index(slot), xs.index(slot))
        slot += 1
        phase = gl.where(slot == STAGES, phase ^ 1, phase)
        slot = gl.where(slot == STAGES, 0, slot)


@gluon.jit
def _store(out, v, n0, m0, M, N, R: gl.constexpr, BM: gl.constexpr):
    LAYOUT: gl.constexpr = v.type.layout
    m = m0 + gl.arange(0, BM, gl.SliceLayout(1, LAYOUT))
    n = n0 + gl.arange(0, R, gl.SliceLayout(0, LAYOUT))
    to = (gl.program_id(1).to(gl.int64) * M + m)[:, None] * N + n[None, :]
    gl.store(out + to, v, mask=(m < M)[:, None] & (n < N)[None, :])


@gluon.jit
def _store_sums(out, y, n0, m0, M, N, R: gl.constexpr, BM: gl.constexpr):
    """Stores y [BM, R] in float32 to columns from n0, in rows from m0, of this program's range of K
    of out [splits, M, N], in its type."""
    v = y.to(out.dtype.element_ty)
    if out.dtype.element_ty.primitive_bitwidth == 16:  # 16 bytes per thread
        ACROSS: gl.constexpr = min(R // 8, 32)
        LAYOUT: gl.constexpr = gl.BlockedLayout(
            [1, 8], [32 // ACROSS, ACROSS], [BM // 16, 1], [1, 0]
        )
        v = gl.convert_layout(v, LAYOUT)
    _store(out, v, n0, m0, M, N, R, BM)


@gluon.jit
def _finish(
    out, bias, y, n0, m0, M, N, softcap,
    R: gl.constexpr, BM: gl.constexpr, END: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """Applies bias, activation or soft cap to y [BM, R] or [BM, 2R]; stores to columns from n0."""
    GATES: gl.constexpr = END == "gelu_tanh" or END == "silu"
    if GATES:
        y, up = gl.split(y.reshape([BM, 2, R]).permute([0, 2, 1]))
    if HAS_BIAS:
        n = n0 + gl.arange(0, R, gl.SliceLayout(0, y.type.layout))
        y += gl.load(bias + n, mask=n < N, other=0.0).to(gl.float32)[None, :]
        if GATES:
            up += gl.load(bias + N + n, mask=n < N, other=0.0).to(gl.float32)[None, :]
    if END == "gelu_tanh":
        y = gelu_tanh(y) * up
    elif END == "silu":
        y = y * logistic(y) * up
    elif END == "softcap":  # as `soft_capped`, which Triton's own kernels call
        y = softcap * (2.0 / (1.0 + gl.exp(y * (-2.0 / softcap))) - 1.0)
    _store_sums(out, y, n0, m0, M, N, R, BM)


@gluon.jit
def _multiply(
    out, bias, xs, w0, w1, w2, filled, free, m0, M, N, softcap, steps, tiles,
    BM: gl.constexpr, R0: gl.constexpr, R1: gl.constexpr, R2: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, BRANCHES: gl.constexpr, END: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """The program of the multiplying warps, which have 16 rows of x each. A slot is released once
    the next products run.
    """
    WARPS: gl.constexpr = BM // 16
    LAYOUT_0: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BRANCHES * R0, 16])
    TILES: gl.constexpr = w0.layout
    v0 = view_tiles(w0, STAGES, BRANCHES * R0, BK, TILES)
    if R1:
        LAYOUT_1: gl.constexpr = gl.NVMMADistributedLayout(
            [3, 0], [WARPS, 1], [16, BRANCHES * R1, 16]
        )
        v1 = view_tiles(w1, STAGES, BRANCHES * R1, BK, TILES)
    if R2:
        LAYOUT_2: gl.constexpr = gl.NVMMADistributedLayout(
            [3, 0], [WARPS, 1], [16, BRANCHES * R2, 16]
        )
        v2 = view_tiles(w2, STAGES, BRANCHES * R2, BK, TILES)
    slot = 0
    phase = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        y0 = gl.zeros((BM, BRANCHES * R0), gl.float32, LAYOUT_0)
        if R1:
            y1 = gl.zeros((BM, BRANCHES * R1), gl.float32, LAYOUT_1)
        if R2:
            y2 = gl.zeros((BM, BRANCHES * R2), gl.float32, LAYOUT_2)
        for i in range(steps):
            mbarrier.wait(filled.index(slot), phase)
            v = xs.index(slot)
            y0 = warpgroup_mma(v, v0.index(slot).permute((1, 0)), y0, is_async=True)
            if R1:
                y1 = warpgroup_mma(v, v1.index(slot).permute((1, 0)), y1, is_async=True)
            if R2:
                y2 = warpgroup_mma(v, v2.index(slot).permute((1, 0)), y2, is_async=True)
                y0, y1, y2 = warpgroup_mma_wait(3, deps=(y0, y1, y2))
            elif R1:
                y0, y1 = warpgroup_mma_wait(2, deps=(y0, y1))
            else:
                y0 = warpgroup_mma_wait(1, deps=(y0,))
            before = gl.where(slot == 0, STAGES - 1, slot - 1)
            mbarrier.arrive(free.index(before), count=1, pred=i > 0)
            slot += 1
            phase = gl.where(slot == STAGES, phase ^ 1, phase)
            slot = gl.where(slot == STAGES, 0, slot)
        if R2:
            y0, y1, y2 = warpgroup_mma_wait(0, deps=(y0, y1, y2))
        elif R1:
            y0, y1 = warpgroup_mma_wait(0, deps=(y0, y1))
        else:
            y0 = warpgroup_mma_wait(0, deps=(y0,))
        mbarrier.arrive(free.index(gl.where(slot == 0, STAGES - 1, slot - 1)), count=1)
        n = tile * (R0 + R1 + R2)
        _finish(out, bias, y0, n, m0, M, N, softcap, R0, BM, END, HAS_BIAS)
        if R1:
            _finish(out, bias, y1, n + R0, m0, M, N, softcap, R1, BM, END, HAS_BIAS)
        if R2:
            _finish(out, bias, y2, n + R0 + R1, m0, M, N, softcap, R2, BM, END, HAS_BIAS)


@gluon.jit(do_not_specialize=["M"])
def _specialized_kernel(
    # [splits, M, N]
    out,
    # [M, K] in tiles [BM, BK]
    x,
    # [N, K], or gated [2N, K], in tiles [R0, BK], [R1, BK] and [R2, BK]
    weight_0,
    weight_1,
    weight_2,
    # [N], or gated [2N]
    bias,
    M, N, K, softcap,
    BM: gl.constexpr, R0: gl.constexpr, R1: gl.constexpr, R2: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, END: gl.constexpr, HAS_BIAS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    start_next(PDL)
    BRANCHES: gl.constexpr = 2 if END == "gelu_tanh" or END == "silu" else 1
    R: gl.constexpr = R0 + R1 + R2
    BYTES: gl.constexpr = 2 * BK * (BM + BRANCHES * R)
    split, splits = gl.program_id(1), gl.num_programs(1)
    all_steps = gl.cdiv(K, BK)
    low = split * all_steps // splits
    steps = (split + 1) * all_steps // splits - low
    tiles, m = gl.cdiv(N, R), gl.program_id(2) * BM
    xs = gl.allocate_shared_memory(x.dtype, [STAGES, BM, BK], x.layout)
    w0 = gl.allocate_shared_memory(x.dtype, [STAGES * BRANCHES, R0, BK], x.layout)
    w1, w2 = w0, w0
    if R1:
        w1 = gl.allocate_shared_memory(x.dtype, [STAGES * BRANCHES, R1, BK], x.layout)
    if R2:
        w2 = gl.allocate_shared_memory(x.dtype, [STAGES * BRANCHES, R2, BK], x.layout)
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(filled.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    out, bias, xs, w0, w1, w2, filled, free, m, M, N, softcap, steps, tiles,
                    BM, R0, R1, R2, BK, STAGES, BRANCHES, END, HAS_BIAS,
                ),
            ),
            (
                _copy_steps,
                (
                    x, weight_0, weight_1, weight_2, xs, w0, w1, w2, filled, free, m, N, low,
                    steps, tiles, R0, R1, R2, BK, STAGES, BRANCHES, BYTES, PDL,
                ),
            ),
        ],
        [1],
        [COPY_REGISTERS],
    )  # fmt: skip


def launch_specialized(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    tiling: SpecializedTiling,
    *,
    end: str = "",
    bias: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """See `linear.kernel.launch`, which calls this and has checked the arguments."""
    (rows, k), n = x.shape, out.shape[-1]
    element = gl.float16 if x.dtype is float16 else gl.bfloat16
    layout = gl.NVMMASharedLayout.get_default_for([tiling.m, tiling.k], element)
    stored, missing = weight.t(), 3 - len(tiling.columns)
    tiles = [TensorDescriptor.from_tensor(stored, [r, tiling.k], layout) for r in tiling.columns]
    columns = (*tiling.columns, *[0] * missing)
    programs, blocks = triton.cdiv(n, sum(columns)), triton.cdiv(rows, tiling.m)
    _specialized_kernel[min(programs, tiling.most), tiling.splits, blocks](
        out,
        TensorDescriptor.from_tensor(x, [tiling.m, tiling.k], layout),
        *(*tiles, *[None] * missing),
        bias,
        *(rows, n, k, 1.0 if softcap is None else softcap),
        BM=tiling.m,
        R0=columns[0],
        R1=columns[1],
        R2=columns[2],
        BK=tiling.k,
        STAGES=tiling.stages,
        END=end,
        HAS_BIAS=bias is not None,
        num_warps=tiling.m // 16,
        maxnreg=tiling.registers,
        **dependent_launch(x),
    )
    return out
