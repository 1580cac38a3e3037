"""The tiles of a product of few rows with a quantised matrix, from its shape and scales alone.

On Hopper rows and matrices in FP8 with the usual scales run the warp-specialised kernel; all else
that few rows meet runs the plain one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hydraspec_kernels.quantised.lanes import COLUMNS, SCALED
from hydraspec_kernels.quantised.records import MOST_ROWS, QuantisedMatrix
from hydraspec_kernels.quantised.reference import E4M3, PER_INT32
from hydraspec_kernels.runtime.launch import NUM_SMS, is_hopper, shared_bytes

LEAST_STEP = 32  # columns that share a scale, at least: a step of the sums
UNIT_ROWS = 64  # of a matrix, in shared memory of the warp-specialised kernel
MOST_LEFT_ROWS = 32  # of x, with which the matrix is the left operand
LEAST_SCALES = 32  # of rows of x, that a step copies: copies begin at multiples of 128 bytes
STEP = 128  # columns of a step of the warp-specialised kernel: those of a block of scales
SHARED_BYTES = 226 << 10  # of a program, less its barriers
MOST_COLUMNS = 176  # of a program: its sums and those of a step are in registers
REGISTERS = 152  # of a thread: a small kernel before or after runs beside a program
ALIGNMENT = 16  # bytes, of rows that are copied as tiles


@dataclass(frozen=True, slots=True)
class SpecializedTiles:
    """A specialisation of the warp-specialised kernel and its grid."""

    m: int  # rows of x a program multiplies: 8, 16, 32, 64 or 128
    columns: tuple[int, ...]  # rows of the matrix, per copy: up to three powers of two
    stages: int  # steps in flight
    splits: int  # programs that share K
    registers: int | None  # of a thread, on average; None: no limit


@dataclass(frozen=True, slots=True)
class PackedTiles:
    """A specialisation of the kernel of matrices in lanes and its grid."""

    m: int  # rows of x a program multiplies: 8, 16, 32 or 64
    rows: tuple[int, ...]  # of the matrix, of four warps: up to 64, the sum of powers of two
    groups: int  # of four warps: 2 or 3
    units: int  # of 256 columns, in a step
    stages: int  # steps in flight
    splits: int  # programs that share K
    registers: int | None  # of a thread, on average; None: no limit


@dataclass(frozen=True, slots=True)
class Tiles:
    """Block sizes of one `_product_kernel` launch."""

    m: int
    rows: int
    step: int
    stages: int
    warps: int
    prefetch: int = 4  # lines of 128 bytes of each row, brought into the L2 before x is complete
    splits: int = 1  # programs that share K


# Measured on one H200 at the shapes of Gemma 4 31B: kind of scales -> rows of x -> tiles for few,
# some and many rows of the matrix, as (rows, step, stages, warps). All have 64 rows and four warps
# at least, so that one instruction sums every row of x alike, however many there are; smaller tiles
# would take 5 to 20 % less time for up to 16 rows.
# Programs on a multiprocessor at once where K is split: with scales for each step they wait longer.
RESIDENT = {"block": 4, "row": 2, "int4": 2}
LEAST_RANGE, LEAST_STAGES = 1024, 3  # columns of a range, steps in flight
RANGE_UNIT = 256  # columns: ranges are the same whatever the step, so that every row's sums are
SCALE_BYTES = 2 * COLUMNS // SCALED  # of a row of 256 columns
WAVE_ROWS = 32  # what a wave of programs costs beside its rows, of all groups
REGISTERS_OF_TWO = 144  # of a thread of two groups, so that a small kernel runs beside them
# Rows of a matrix that four warps own, as powers of two.
PACKED_ROWS = {
    64: (64,),
    56: (32, 16, 8),
    48: (32, 16),
    40: (32, 8),
    32: (32,),
    24: (16, 8),
    16: (16,),
    8: (8,),
}
SOME, MANY = 64 * NUM_SMS, 3 * 64 * NUM_SMS
SIZES = {
    "block": {
        16: ((64, 128, 5, 4), (64, 128, 8, 4), (128, 128, 3, 4)),
        32: ((64, 128, 8, 4), (128, 128, 8, 8), (64, 128, 3, 4)),
        64: ((64, 128, 4, 4), (64, 128, 4, 4), (64, 128, 4, 4)),  # not measured
        128: ((64, 128, 4, 4), (64, 128, 4, 4), (64, 128, 4, 4)),
    },
    "row": {
        16: ((64, 256, 8, 4), (64, 128, 8, 4), (128, 128, 3, 4)),
        32: ((64, 256, 5, 4), (64, 256, 3, 4), (64, 128, 3, 4)),
        64: ((64, 128, 4, 4), (64, 128, 4, 4), (64, 128, 4, 4)),  # not measured
        128: ((64, 128, 4, 4), (64, 128, 3, 4), (64, 128, 3, 4)),
    },
    "int4": {
        16: ((64, 256, 8, 4), (64, 256, 3, 4), (128, 128, 3, 8)),
        32: ((64, 256, 5, 4), (64, 256, 3, 4), (64, 256, 3, 4)),
        64: ((64, 128, 4, 4), (64, 128, 4, 4), (64, 128, 4, 4)),  # not measured
        128: ((64, 128, 4, 4), (128, 128, 3, 8), (128, 128, 4, 8)),
    },
}


def tiles_for(
    rows: int, matrix: QuantisedMatrix, *, partials: bool = False
) -> Tiles | SpecializedTiles | PackedTiles | None:
    """Tiles for `rows` rows of x; None: the matrix, or so many rows, have no kernel.

    partials: K may be split, how often depends on the matrix alone, for the same sums of every row.
    """
    if not 0 < rows <= MOST_ROWS:
        return None
    if is_specialized(matrix):
        return _specialized(rows, matrix, partials)
    if matrix.lanes:
        return _packed(rows, matrix, partials)
    n, shared = matrix.data.shape[0], (shared_columns(matrix), matrix.rounding.group)
    is_packed = matrix.data.dtype is torch.int32
    kind = "int4" if is_packed else "block" if any(shared) else "row"
    m = next(size for size in (16, 32, 64, 128) if rows <= size)
    wide, step, stages, warps = SIZES[kind][m][(n >= SOME) + (n >= MANY)]
    for columns in () if is_packed else shared:
        while columns % step:
            step //= 2
    if step < LEAST_STEP or (is_packed and not _can_unpack(matrix, step)):
        return None
    stage_bytes = step * (2 * m + (wide // 2 if is_packed else wide))
    room = shared_bytes(matrix.data.device) // stage_bytes
    if not partials:
        return Tiles(m, wide, step, max(1, min(stages, room)), warps)
    splits = max(1, min(RESIDENT[kind] * NUM_SMS // _divided(n, 64), matrix.width // LEAST_RANGE))
    if splits > 1 and room // RESIDENT[kind] >= LEAST_STAGES:
        room //= RESIDENT[kind]
    return Tiles(m, wide, step, max(1, min(stages, room)), warps, splits=splits)


def _can_unpack(matrix: QuantisedMatrix, step: int) -> bool:
    """Returns whether steps of packed integers are whole words, and groups whole or cut evenly."""
    shared = shared_columns(matrix)
    return not (matrix.width % PER_INT32 or shared % PER_INT32 or (shared % step and step % shared))


def shared_columns(matrix: QuantisedMatrix) -> int:
    """Columns that share a scale; 0: all."""
    return 0 if matrix.scales.shape[-1] == 1 else matrix.columns


def _divided(size: int, unit: int) -> int:
    return -(-size // unit)


def is_specialized(matrix: QuantisedMatrix) -> bool:
    """Returns whether few rows run the warp-specialised kernel with the matrix: each step has one
    scale for a row of x, and at most two for the rows of the matrix that share a tile."""
    data, rounding = matrix.data, matrix.rounding
    has_blocks = matrix.scales.shape[-1] > 1
    return (
        data.dtype is E4M3
        and is_hopper(data.device)
        and rounding.kind != "float"
        and (rounding.kind != "group" or rounding.group == STEP)
        and not (has_blocks and (matrix.columns != STEP or matrix.rows < STEP))
        and data.stride(0) % ALIGNMENT == matrix.width % ALIGNMENT == 0
        and data.data_ptr() % ALIGNMENT == 0
    )


def _specialized(rows: int, matrix: QuantisedMatrix, partials: bool) -> SpecializedTiles:
    """Tiles that give every multiprocessor the same share, in as few waves as registers allow."""
    n, columns, splits = matrix.data.shape[0], (STEP,), 1
    if partials:
        splits = max(1, min(NUM_SMS // _divided(n, STEP), matrix.width // LEAST_RANGE))
    m = next(size for size in (8, 16, 32, 64, 128) if rows <= size)
    if splits == 1 and (m <= 64 or n <= STEP * NUM_SMS):  # more columns than 128 spill registers
        columns = _even(n)
    steps = _divided(matrix.width, STEP * splits)
    shared = SHARED_BYTES
    if splits == 1:
        shared -= 2 * m * UNIT_ROWS  # of results, before they are stored
    step = STEP * (m + _divided(sum(columns), UNIT_ROWS) * UNIT_ROWS)
    if matrix.rounding.kind == "group":
        step += 4 * max(m, LEAST_SCALES)
    room = shared // step
    registers = REGISTERS if m <= 64 else None
    return SpecializedTiles(m, columns, max(2, min(room, steps)), splits, registers)


def _even(n: int) -> tuple[int, ...]:
    """Up to three powers of two: a program's share of n, in whole waves of programs."""
    waves = _divided(n, NUM_SMS * MOST_COLUMNS)
    least = max(_divided(n, NUM_SMS * waves), 16)
    for share in range(_divided(least, 8) * 8, MOST_COLUMNS + 1, 8):
        powers = tuple(size for size in (128, 64, 32, 16, 8) if share & size)
        if len(powers) <= 3:
            return powers
    return (STEP,)


def gated_tiles(rows: int, matrix: QuantisedMatrix) -> PackedTiles | None:
    """Tiles of a kernel that applies a gated activation to `rows` rows' products; None: no kernel
    does."""
    return _packed(rows, matrix, halves=2) if 0 < rows <= MOST_ROWS and matrix.lanes else None


def _packed(
    rows: int, matrix: QuantisedMatrix, partials: bool = False, halves: int = 1
) -> PackedTiles:
    """Tiles that give every multiprocessor the same share. How K is split depends on the matrix
    alone."""
    n, k = matrix.data.shape[0] // halves, matrix.width
    m = next((size for size in (8, 16, 32) if rows <= size), 64)

    def splits_of(groups: int, share: int) -> int:
        if not partials:
            return 1
        return max(1, min(NUM_SMS // _divided(n, groups * share), k // LEAST_RANGE))

    def cost(groups: int, share: int) -> tuple[float, int, int]:
        splits = splits_of(groups, share)
        waves = _divided(_divided(n, groups * share) * splits, NUM_SMS)
        return waves * (groups * share + WAVE_ROWS / groups) / splits, -share, -groups

    most = 2 if partials else 3
    shares = ((groups, share) for groups in range(2, most + 1) for share in PACKED_ROWS)
    groups, share = min(shares, key=lambda each: cost(*each))
    splits = splits_of(groups, share)
    units = 2 if m < 32 and groups == 2 else 1
    stage_bytes = units * (COLUMNS * (groups * 64 // 2 + 2 * m) + groups * 64 * SCALE_BYTES)
    steps = _divided(k, units * COLUMNS * splits)
    stages = max(2, min(SHARED_BYTES // stage_bytes, steps))
    registers = REGISTERS_OF_TWO if groups == 2 and m < 32 else None
    return PackedTiles(m, PACKED_ROWS[share], groups, units, stages, splits, registers)
