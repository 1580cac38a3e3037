"""Numbers rounded to e4m3 and their scales, within the kernels that write rows."""

from __future__ import annotations

import triton
import triton.language as tl

from hydraspec_kernels.quantised.records import MOST_ROWS
from hydraspec_kernels.quantised.reference import E4M3_MAX, LEAST_GROUP_MAX

# Where row r's scale of group g is, in the memory of `RoundedRows`: g * NEXT_GROUP + r.
NEXT_GROUP = tl.constexpr(MOST_ROWS)
LEAST_OF_GROUP, MOST_E4M3 = tl.constexpr(LEAST_GROUP_MAX), tl.constexpr(E4M3_MAX)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _to_e4m3(v):
    """The nearest e4m3 numbers of v in -448 to 448, ties to even, in float32.

    Adding 2^20 times the power of two below |v| leaves three bits of fraction.
    """
    size = tl.abs(v)
    power = (size.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    shift = tl.maximum(power, 0.015625) * 1048576.0  # 2^-6 is the smallest normal number
    near = (size + shift) - shift
    return tl.where(v < 0, -near, near)


@triton.jit
def _quotients(v, scale):
    """v / scale as division rounds it, with one division for all numbers of a scale.

    The product with the reciprocal is up to 2 ulp off; one step with its exact remainder ends at
    the nearest number, for every float32 scale and v of up to 11 bits (all mantissas were tried).
    Above 1024 it is some number above 448, or infinite: its remainder would be of infinite numbers.
    """
    if INTERPRETED:  # its fma rounds twice
        return tl.div_rn(v, tl.zeros_like(v) + scale)
    else:
        inverse = tl.zeros_like(v) + tl.div_rn(tl.zeros_like(scale) + 1.0, scale)
        near = tl.minimum(tl.maximum(v * inverse, -1024.0), 1024.0)
        return tl.fma(tl.fma(-near, tl.zeros_like(v) + scale, v), inverse, near)


@triton.jit
def _own_scale(top, MOST: tl.constexpr):
    """top / MOST, which is 448, as division rounds it, for top of up to 11 bits and LEAST_OF_GROUP
    (all were tried), by three instructions."""
    if INTERPRETED:
        return tl.div_rn(top, tl.zeros_like(top) + MOST)
    else:
        near = top * (1.0 / MOST)
        return tl.fma(tl.fma(-near, tl.zeros_like(top) + MOST, top), 1.0 / MOST, near)


@triton.jit
def _own_quotients(v, scale):
    """`_quotients` of numbers that are no larger than 448 scales, for v and `_own_scale` of up to
    11 bits: a reciprocal that is 1 ulp off is good enough (all mantissas were tried)."""
    if INTERPRETED:
        return tl.div_rn(v, tl.zeros_like(v) + scale)
    else:
        reciprocal = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=r,r", [scale], dtype=tl.float32, is_pure=True, pack=1
        )
        inverse = tl.zeros_like(v) + reciprocal
        near = v * inverse
        return tl.fma(tl.fma(near, tl.zeros_like(v) - scale, v), inverse, near)


@triton.jit
def e4m3_of(v, scale, MOST: tl.constexpr, SCALED: tl.constexpr, STORED: tl.constexpr = False):
    """e4m3 numbers of v / scale, in float32 or, where a device converts what is STORED, in e4m3.
    SCALED, of numbers that are not stored: times the scale again. v is in half precision: numbers
    of float32 may be off by one where their quotient is a tie."""
    number = _nearest(_quotients(v, scale), MOST, STORED)
    return number * scale if SCALED else number


@triton.jit
def _nearest(v, MOST: tl.constexpr, STORED: tl.constexpr):
    """The nearest e4m3 numbers of v, at most MOST, in float32 or in e4m3."""
    BY_DEVICE: tl.constexpr = STORED and not INTERPRETED
    if BY_DEVICE:  # which rounds alike, and larger numbers to the largest
        return v.to(tl.float8e4nv)
    else:
        return _to_e4m3(tl.minimum(tl.maximum(v, -MOST), MOST))


@triton.jit
def own_row_scale(top, LEAST: tl.constexpr, MOST: tl.constexpr):
    """The scale of a row in half precision whose largest magnitude is top."""
    return tl.maximum(_own_scale(top, MOST), LEAST)


@triton.jit
def rounded_by(v, scale, MOST: tl.constexpr):
    """e4m3 numbers of v / scale, to be stored as such; see `_own_quotients`."""
    return _nearest(_own_quotients(v, scale), MOST, True)


@triton.jit
def rounded_row(
    v, GROUP: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, WIDTH: tl.constexpr
):
    """e4m3 numbers [WIDTH], to be stored as such, and scales [WIDTH / GROUP], of a row v [WIDTH] in
    half precision, whose zeros beyond its end change no scale. GROUP = WIDTH: the row has one
    scale."""
    groups = tl.reshape(v, (WIDTH // GROUP, GROUP))
    top = tl.max(tl.abs(groups), 1)
    if GROUP == WIDTH:
        scale = own_row_scale(top, LEAST, MOST)
    else:
        scale = _own_scale(tl.maximum(top, LEAST), MOST)
    numbers = rounded_by(groups, scale[:, None], MOST)
    return tl.reshape(numbers, (WIDTH,)), scale


@triton.jit
def rounded_groups(v, ROWS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr):
    """e4m3 numbers [ROWS, WIDTH], to be stored as such, and scales [ROWS, WIDTH / GROUP], of rows
    v whose groups each have a scale."""
    flat = tl.reshape(v.to(tl.float32), (ROWS * WIDTH,))
    numbers, scale = rounded_row(flat, GROUP, LEAST_OF_GROUP, MOST_E4M3, ROWS * WIDTH)
    return tl.reshape(numbers, (ROWS, WIDTH)), tl.reshape(scale, (ROWS, WIDTH // GROUP))
