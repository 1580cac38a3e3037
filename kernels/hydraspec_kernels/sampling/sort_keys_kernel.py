"""Finite numbers as integers of the same order, and binary search of a threshold among these keys.

All threads of a program search together and synchronise in every sum: if one thread left a loop
early, the others would wait for ever. So the number of trips is computed before the loop, from
integers.
"""

from __future__ import annotations

import triton
import triton.language as tl

INFINITY_BITS: tl.constexpr = tl.constexpr(0x7F800000)
ALL_BITS: tl.constexpr = tl.constexpr(0x7FFFFFFF)
NO_KEY: tl.constexpr = tl.constexpr(-0x7FFFFFFF - 1)  # below that of -inf


@triton.jit
def key_of(x, SHIFT: tl.constexpr):
    """Keys, int32, in the order of finite x, 0 for both zeros; SHIFT drops low bits that are 0 in
    every number of the logits' type, which shortens searches."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True) >> SHIFT
    return bits ^ ((bits >> 31) & (ALL_BITS >> SHIFT))


@triton.jit
def value_of(key, SHIFT: tl.constexpr):
    """The float32 that has the key."""
    bits = key ^ ((key >> 31) & (ALL_BITS >> SHIFT))
    return (bits << SHIFT).to(tl.float32, bitcast=True)


@triton.jit
def num_halvings(low, high, SHIFT: tl.constexpr):
    """Number of halvings of low..high until only `low` is left, at most the bits of a key."""
    # ceil(log2(high - low)), or one more where float32 rounds up: that trip changes nothing.
    exponent = (high - low - 1).to(tl.float32).to(tl.int32, bitcast=True) >> 23
    return tl.minimum(tl.maximum(exponent - 126, 0), 32 - SHIFT)


@triton.jit
def halved(low, middle, high, goes_up):
    """The half of low..high from `middle` on, or the one below it."""
    goes_up = goes_up | (middle == low)
    return tl.where(goes_up, middle, low), tl.where(goes_up, high, middle)
