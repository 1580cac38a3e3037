"""Finite numbers as whole numbers of the same order, and the search of a threshold among those.

All threads of a program search, and meet in every sum: if two disagreed, one would leave a loop
early, and the others wait for it for ever. So trips are counted before a loop, from whole numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

INFINITY_BITS: tl.constexpr = tl.constexpr(0x7F800000)
ALL_BITS: tl.constexpr = tl.constexpr(0x7FFFFFFF)
NO_KEY: tl.constexpr = tl.constexpr(-0x7FFFFFFF - 1)  # below that of -inf


@triton.jit
def key_of(x, SHIFT: tl.constexpr):
    """int32 in the order of finite x, 0 for both zeros; small, so that searches are short."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True) >> SHIFT
    return bits ^ ((bits >> 31) & (ALL_BITS >> SHIFT))


@triton.jit
def value_of(key, SHIFT: tl.constexpr):
    bits = key ^ ((key >> 31) & (ALL_BITS >> SHIFT))
    return (bits << SHIFT).to(tl.float32, bitcast=True)


@triton.jit
def num_halvings(low, high, SHIFT: tl.constexpr):
    """Halvings of low..high until `low` is all that is left: at most as many as a key has bits."""
    # ceil(log2(high - low)), or one more where float32 rounds up: then nothing is left to halve.
    exponent = (high - low - 1).to(tl.float32).to(tl.int32, bitcast=True) >> 23
    return tl.minimum(tl.maximum(exponent - 126, 0), 32 - SHIFT)


@triton.jit
def halved(low, middle, high, goes_up):
    """The half of low..high from `middle` on, or the one below it."""
    goes_up = goes_up | (middle == low)
    return tl.where(goes_up, middle, low), tl.where(goes_up, high, middle)
