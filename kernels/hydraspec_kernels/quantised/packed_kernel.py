"""Rows times a matrix of four-bit integers on Hopper, warp-specialised: one warp copies words.

Groups of four warps own up to 64 rows of the matrix each. They unpack its words, in the order of
`lanes`, to the left operand of a product in registers: numbers times scales rounded once, as the
reference does. The right operand is a tile of x, which the groups share. Scales are copied with the
words: a load from global memory waits longer than a step lasts. Gluon has no interpreter: only
tests on the device run this.
"""

from __future__ import annotations

import triton
from torch import Tensor, bfloat16, float32
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from hydraspec_kernels.linear.specialized_kernel import COPY_REGISTERS, gelu_tanh, logistic
from hydraspec_kernels.quantised import lanes
from hydraspec_kernels.quantised.plan import PackedTiles
from hydraspec_kernels.quantised.records import QuantisedMatrix
from hydraspec_kernels.runtime.gluon_kernel import load_tile, start_next, wait_for_inputs
from hydraspec_kernels.runtime.launch import NUM_SMS
from hydraspec_kernels.runtime.launch_kernel import dependent_launch

ROWS = gl.constexpr(64)  # of the matrix, which four warps multiply at once
UNIT = gl.constexpr(lanes.COLUMNS)  # columns
WORDS = gl.constexpr(lanes.COLUMNS // 8)
SCALES = gl.constexpr(lanes.COLUMNS // lanes.SCALED)  # of a unit
UNITS_OF_RANGE = gl.constexpr(lanes.RANGE // lanes.COLUMNS)
HALF = gl.constexpr(128)  # columns whose numbers are multiplied at once
# Of a thread, by groups: with 168 the third waits for those of the other two (16 rows, one H200:
# 52 us in place of 41).
MOST_REGISTERS = {2: 168, 3: 160}
# Rows of x that each warp multiplies by itself, to the same bits: up to 4 % faster for so few, and
# slower for 16.
BY_WARP_ROWS = gl.constexpr(8)
RESCALE = gl.constexpr(2.0 ** (133 - lanes.EXPONENT))

# Two scales over 16, and times -8 * 2^-133.
_SCALES_READY: gl.constexpr = gl.constexpr("""
{
.reg .b32 constant;
mov.b32 constant, 0x3d803d80;
mul.rn.bf16x2 $0, $2, constant;
mov.b32 constant, 0x80088008;
mul.rn.bf16x2 $1, $2, constant;
}
""")
# The four pairs of a word, i and i + 4. Four bits of a bfloat16 that is zero else are an integer
# times 2^-133, or 2^-129 if they are its second four: the distance of neighbours is 2^-133 there.
# That times the scale, less 8 scales, is rounded once.
_PAIRS: gl.constexpr = gl.constexpr("""
{
.reg .b32 n<4>, second, scale, sixteenth, bias;
mov.b32 scale, {$9, $9};
mov.b32 sixteenth, {$10, $10};
mov.b32 bias, {$11, $11};
shr.u32 second, $8, 8;
and.b32 n0, $8, 0x000f000f;
and.b32 n1, $8, 0x00f000f0;
and.b32 n2, second, 0x000f000f;
and.b32 n3, second, 0x00f000f0;
fma.rn.bf16x2 n0, n0, scale, bias;
fma.rn.bf16x2 n1, n1, sixteenth, bias;
fma.rn.bf16x2 n2, n2, scale, bias;
fma.rn.bf16x2 n3, n3, sixteenth, bias;
mov.b32 {$0, $1}, n0;
mov.b32 {$2, $3}, n1;
mov.b32 {$4, $5}, n2;
mov.b32 {$6, $7}, n3;
}
""")


@gluon.jit
def _numbers(words, scales, OPERAND: gl.constexpr):
    """Numbers [64, 128], times 2^-33, of words [64, 4 lanes, 4] and the scales [64, 4] of each of
    the last."""
    L: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [8, 0, 0]],
        lane_bases=[[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[16, 0, 0], [32, 0, 0]],
        block_bases=[],
        shape=[64, 4, 4],
    )
    words = gl.convert_layout(words, L, assert_trivial=True)
    scales = gl.convert_layout(scales, gl.SliceLayout(1, L), assert_trivial=True)
    sixteenths, biases = gl.inline_asm_elementwise(
        _SCALES_READY, "=r,=r,r", [scales], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2
    )
    a0, a1, b0, b1, c0, c1, d0, d1 = gl.inline_asm_elementwise(
        _PAIRS,
        "=h,=h,=h,=h,=h,=h,=h,=h,r,h,h,h",
        [words, scales.expand_dims(1), sixteenths.expand_dims(1), biases.expand_dims(1)],
        dtype=(gl.bfloat16,) * 8,
        is_pure=True,
        pack=1,
    )
    first = gl.join(gl.join(a0, a1), gl.join(b0, b1))
    second = gl.join(gl.join(c0, c1), gl.join(d0, d1))
    v = gl.join(first, second)  # [row, lane, word, one of the pair, of two pairs, of two twos]
    v = v.permute([0, 2, 5, 4, 1, 3]).reshape([64, 128])
    return gl.convert_layout(v, OPERAND, assert_trivial=True)


@gluon.jit
def _sums(
    memory, slot, phase, steps,
    GROUP: gl.constexpr, GROUPS: gl.constexpr, BM: gl.constexpr, UNITS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Sums [64, BM], times 2^-33, of four warps' rows of the next tile over `steps` steps; the next
    slot and its phase."""
    xs, ws, ss, filled, free = memory
    BY_WARP: gl.constexpr = BM <= BY_WARP_ROWS
    SUMS: gl.constexpr = (
        gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
        if BY_WARP
        else gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    )
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    OF_X: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    OF_WORDS: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 32],
    )
    OF_SCALES: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0]],
        lane_bases=[[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 8],
    )
    y = gl.zeros((ROWS, BM), gl.float32, SUMS)
    for _ in range(steps):
        mbarrier.wait(filled.index(slot), phase)
        for unit in gl.static_range(UNITS):
            mine = (slot * UNITS + unit) * GROUPS + GROUP
            scales = ss.index(mine).load(OF_SCALES)
            s0, s1 = gl.split(scales.reshape([64, 2, 4]).permute([0, 2, 1]))
            words = ws.index(mine).load(OF_WORDS)
            w0, w1 = gl.split(words.reshape([64, 4, 2, 4]).permute([0, 1, 3, 2]))
            half = (slot * UNITS + unit) * 2
            x0, x1 = xs.index(half).permute((1, 0)), xs.index(half + 1).permute((1, 0))
            if BY_WARP:
                y = mma_v2(_numbers(w0, s0, OPERAND), x0.load(OF_X), y)
                y = mma_v2(_numbers(w1, s1, OPERAND), x1.load(OF_X), y)
            else:
                if unit:
                    y = warpgroup_mma_wait(0, deps=(y,))
                y = warpgroup_mma(_numbers(w0, s0, OPERAND), x0, y, is_async=True)
                y = warpgroup_mma(_numbers(w1, s1, OPERAND), x1, y, is_async=True)
        if not BY_WARP:
            y = warpgroup_mma_wait(0, deps=(y,))
        mbarrier.arrive(free.index(slot), count=1)
        slot += 1
        phase = gl.where(slot == STAGES, phase ^ 1, phase)
        slot = gl.where(slot == STAGES, 0, slot)
    return y, slot, phase


@gluon.jit
def _multiply(
    memory, place,
    GROUP: gl.constexpr, GROUPS: gl.constexpr, R: gl.constexpr, BM: gl.constexpr,
    UNITS: gl.constexpr, STAGES: gl.constexpr, END: gl.constexpr,
):  # fmt: skip
    """The program of four multiplying warps, which have R rows of the matrix of each tile: of its
    upper and of its lower half, if END is an activation."""
    out, m0, M, N, steps, tiles = place
    slot = 0
    phase = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        y, slot, phase = _sums(memory, slot, phase, steps, GROUP, GROUPS, BM, UNITS, STAGES)
        y *= RESCALE
        if END != "none":
            up, slot, phase = _sums(memory, slot, phase, steps, GROUP, GROUPS, BM, UNITS, STAGES)
            y = gelu_tanh(y) if END == "gelu_tanh" else y * logistic(y)
            y *= up * RESCALE
        SUMS: gl.constexpr = y.type.layout
        n = (tile * GROUPS + GROUP) * R
        of_tile = gl.arange(0, ROWS, gl.SliceLayout(1, SUMS))
        m = m0 + gl.arange(0, BM, gl.SliceLayout(0, SUMS))
        to = (gl.program_id(1).to(gl.int64) * M + m)[None, :] * N + (n + of_tile)[:, None]
        real = ((of_tile < R) & (n + of_tile < N))[:, None] & (m < M)[None, :]
        gl.store(out + to, y.to(out.dtype.element_ty), mask=real)


@gluon.jit
def _copy_words(
    words, scales, memory, slot, filled, n, step, rows_of_scales,
    GROUPS: gl.constexpr, R0: gl.constexpr, R1: gl.constexpr, R2: gl.constexpr, UNITS: gl.constexpr,
):  # fmt: skip
    """Starts copying the words and scales of a step of all groups' rows, from row n on, into a
    slot."""
    _, ws, ss, _, _ = memory
    w0, w1, w2 = words
    s0, s1, s2 = scales
    for unit in gl.static_range(UNITS):
        k = step * UNITS + unit
        for group in gl.static_range(GROUPS):
            row = n + group * (R0 + R1 + R2)
            first = k * rows_of_scales + row
            to = ws.index((slot * UNITS + unit) * GROUPS + group)
            scales_to = ss.index((slot * UNITS + unit) * GROUPS + group)
            load_tile(w0, [row, k * WORDS], filled, to.slice(0, R0))
            load_tile(s0, [first, 0], filled, scales_to.slice(0, R0))
            if R1:
                load_tile(w1, [row + R0, k * WORDS], filled, to.slice(R0, R1))
                load_tile(s1, [first + R0, 0], filled, scales_to.slice(R0, R1))
            if R2:
                load_tile(w2, [row + R0 + R1, k * WORDS], filled, to.slice(R0 + R1, R2))
                load_tile(s2, [first + R0 + R1, 0], filled, scales_to.slice(R0 + R1, R2))


@gluon.jit
def _copy_x(x, xs, slot, filled, m, step, UNITS: gl.constexpr):
    for half in gl.static_range(2 * UNITS):
        k = (step * 2 * UNITS + half) * HALF
        load_tile(x, [m, k], filled, xs.index(slot * 2 * UNITS + half))


@gluon.jit
def _copy(
    sources, memory, turns,
    GROUPS: gl.constexpr, R0: gl.constexpr, R1: gl.constexpr, R2: gl.constexpr, BM: gl.constexpr,
    UNITS: gl.constexpr, STAGES: gl.constexpr, HALVES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The program of the copying warp: copies all steps of all tiles, as slots become free."""
    x, words, scales = sources
    m, N, rows_of_scales, low, steps, tiles = turns
    xs, _, _, filled, free = memory
    TILE: gl.constexpr = GROUPS * (R0 + R1 + R2)
    BYTES: gl.constexpr = UNITS * (TILE * (WORDS * 4 + SCALES * 2) + BM * UNIT * 2)
    program, programs = gl.program_id(0), gl.num_programs(0)
    total = gl.cdiv(tiles - program, programs) * HALVES * steps
    first = gl.minimum(total, STAGES)
    for i in range(first):
        n, at = _row_of(i // steps, N, TILE, HALVES), filled.index(i)
        mbarrier.expect(at, BYTES)
        _copy_words(
            words, scales, memory, i, at, n, low + i % steps, rows_of_scales,
            GROUPS, R0, R1, R2, UNITS,
        )  # fmt: skip
    wait_for_inputs(PDL)
    for i in range(first):
        _copy_x(x, xs, i, filled.index(i), m, low + i % steps, UNITS)
    slot = 0
    phase = 0
    for i in range(first, total):
        n, step, at = _row_of(i // steps, N, TILE, HALVES), low + i % steps, filled.index(slot)
        mbarrier.wait(free.index(slot), phase)
        mbarrier.expect(at, BYTES)
        _copy_words(
            words, scales, memory, slot, at, n, step, rows_of_scales, GROUPS, R0, R1, R2, UNITS
        )
        _copy_x(x, xs, slot, at, m, step, UNITS)
        slot += 1
        phase = gl.where(slot == STAGES, phase ^ 1, phase)
        slot = gl.where(slot == STAGES, 0, slot)


@gluon.jit
def _row_of(turn, N, TILE: gl.constexpr, HALVES: gl.constexpr):
    """The matrix's first row of this program's tile of a turn; its halves of N rows take turns."""
    tile = gl.program_id(0) + turn // HALVES * gl.num_programs(0)
    return turn % HALVES * N + tile * TILE


@gluon.jit(do_not_specialize=["M"])
def _packed_kernel(
    # [splits, M, N]
    out,
    # [M, K] bfloat16 in tiles [BM, 128]
    x,
    # [N, K / 8] int32 in tiles [R0, 32], [R1, 32] and [R2, 32]; 2 N rows if END is an activation
    w0,
    w1,
    w2,
    # [K / 256 times rows_of_scales, 8] bfloat16 in tiles [R0, 8], [R1, 8] and [R2, 8]
    s0,
    s1,
    s2,
    M, N, K, rows_of_scales,
    BM: gl.constexpr, R0: gl.constexpr, R1: gl.constexpr, R2: gl.constexpr, GROUPS: gl.constexpr,
    UNITS: gl.constexpr, STAGES: gl.constexpr, END: gl.constexpr, GROUP_REGISTERS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    start_next(PDL)
    R: gl.constexpr = R0 + R1 + R2
    HALVES: gl.constexpr = 1 if END == "none" else 2
    split, splits = gl.program_id(1), gl.num_programs(1)
    ranges = gl.cdiv(K, UNITS_OF_RANGE * UNIT)
    low = split * ranges // splits * (UNITS_OF_RANGE // UNITS)
    high = (split + 1) * ranges // splits * (UNITS_OF_RANGE // UNITS)
    steps = gl.minimum(high, gl.cdiv(K, UNITS * UNIT)) - low
    tiles, m = gl.cdiv(N, GROUPS * R), gl.program_id(2) * BM
    xs = gl.allocate_shared_memory(x.dtype, [STAGES * 2 * UNITS, BM, HALF], x.layout)
    ws = gl.allocate_shared_memory(gl.int32, [STAGES * UNITS * GROUPS, ROWS, WORDS], w0.layout)
    ss = gl.allocate_shared_memory(gl.bfloat16, [STAGES * UNITS * GROUPS, ROWS, SCALES], s0.layout)
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(filled.index(i), count=1)
        mbarrier.init(free.index(i), count=GROUPS)
    fence_async_shared()
    memory = (xs, ws, ss, filled, free)
    place = (out, m, M, N, steps, tiles)
    sources = (x, (w0, w1, w2), (s0, s1, s2))
    turns = (m, N, rows_of_scales, low, steps, tiles)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (memory, place, 0, GROUPS, R, BM, UNITS, STAGES, END)),
                (_multiply, (memory, place, 1, GROUPS, R, BM, UNITS, STAGES, END)),
                (
                    _copy,
                    (sources, memory, turns, GROUPS, R0, R1, R2, BM, UNITS, STAGES, HALVES, PDL),
                ),
            ],
            [4, 1],
            [GROUP_REGISTERS, COPY_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (memory, place, 0, GROUPS, R, BM, UNITS, STAGES, END)),
                (_multiply, (memory, place, 1, GROUPS, R, BM, UNITS, STAGES, END)),
                (_multiply, (memory, place, 2, GROUPS, R, BM, UNITS, STAGES, END)),
                (
                    _copy,
                    (sources, memory, turns, GROUPS, R0, R1, R2, BM, UNITS, STAGES, HALVES, PDL),
                ),
            ],
            [4, 4, 1],
            [GROUP_REGISTERS, GROUP_REGISTERS, COPY_REGISTERS],
        )


def packed_product(
    x: Tensor, matrix: QuantisedMatrix, tiles: PackedTiles, end: str = "none"
) -> Tensor:
    """Product [T, N] of rows x [T, K] in bfloat16 with a matrix in lanes, or partial sums [S, T, N]
    in float32 where the tiles split K. end: an activation of the upper half of the matrix's rows,
    which is then multiplied with the lower half: [T, N / 2]."""
    assert x.dtype is bfloat16, "matrices in lanes are bfloat16's; see `can_be_in_lanes`"
    x = x if x.stride(1) == 1 and x.stride(0) % 8 == 0 else x.contiguous()
    count, n = x.shape[0], matrix.data.shape[0] // (1 if end == "none" else 2)
    if tiles.splits > 1:
        out = x.new_empty(tiles.splits, count, n, dtype=float32)
    else:
        out = x.new_empty(count, n)
    of_x = gl.NVMMASharedLayout.get_default_for([tiles.m, 128], gl.bfloat16)
    of_words = gl.NVMMASharedLayout.get_default_for([64, 32], gl.int32)
    of_scales = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=16, rank=2)
    rows, missing = tiles.rows, [None] * (3 - len(tiles.rows))
    # Of all units, one after the other: the rows of a part of a matrix are not next to each other.
    units, rows_of_scales = matrix.scales.shape[0], matrix.scales.stride(0) // SCALES.value
    by_row = (units - 1) * rows_of_scales + matrix.scales.shape[1]
    scales = matrix.scales.as_strided((by_row, SCALES.value), (SCALES.value, 1))
    programs = min(triton.cdiv(n, tiles.groups * sum(rows)), NUM_SMS)
    sizes = (*rows, 0, 0)
    _packed_kernel[programs, tiles.splits, triton.cdiv(count, tiles.m)](
        out,
        TensorDescriptor.from_tensor(x, [tiles.m, 128], of_x),
        *(TensorDescriptor.from_tensor(matrix.data, [r, 32], of_words) for r in rows),
        *missing,
        *(TensorDescriptor.from_tensor(scales, [r, SCALES.value], of_scales) for r in rows),
        *missing,
        *(count, n, matrix.width, rows_of_scales),
        BM=tiles.m,
        R0=sizes[0],
        R1=sizes[1],
        R2=sizes[2],
        GROUPS=tiles.groups,
        UNITS=tiles.units,
        STAGES=tiles.stages,
        END=end,
        GROUP_REGISTERS=tiles.registers or MOST_REGISTERS[tiles.groups],
        num_warps=4,
        maxnreg=tiles.registers,
        **dependent_launch(x),
    )
    return out
