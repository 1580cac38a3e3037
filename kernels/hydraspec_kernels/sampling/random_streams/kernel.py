"""The draws of `reference.py` inside a kernel: the same words, the same float64 numbers."""

from __future__ import annotations

import triton
import triton.language as tl

from hydraspec_kernels.sampling.random_streams import reference
from hydraspec_kernels.sampling.random_streams.reference import Purpose

GOLDEN: tl.constexpr = tl.constexpr(reference.GOLDEN)
FIRST_MULTIPLIER: tl.constexpr = tl.constexpr(reference.MULTIPLIERS[0])
SECOND_MULTIPLIER: tl.constexpr = tl.constexpr(reference.MULTIPLIERS[1])
CODE_BITS: tl.constexpr = tl.constexpr(reference.INDEX_BITS + reference.PURPOSE_BITS)
INDEX_STEP: tl.constexpr = tl.constexpr(1 << reference.PURPOSE_BITS)

ACCEPT: tl.constexpr = tl.constexpr(int(Purpose.ACCEPT))
RESIDUAL: tl.constexpr = tl.constexpr(int(Purpose.RESIDUAL))
BONUS: tl.constexpr = tl.constexpr(int(Purpose.BONUS))


@triton.jit
def _mix(words):
    """SplitMix64's finaliser of int64 words; >> copies the sign, so the copies are masked."""
    words = words ^ ((words >> 30) & ((1 << 34) - 1))
    words = words * FIRST_MULTIPLIER
    words = words ^ ((words >> 27) & ((1 << 37) - 1))
    words = words * SECOND_MULTIPLIER
    return words ^ ((words >> 31) & ((1 << 33) - 1))


@triton.jit
def stream_key(seed, position, code):
    """The key of a draw: seed, position int64 and code = index * INDEX_STEP + purpose."""
    counter = (position.to(tl.int64) << CODE_BITS) + code
    return _mix(counter * GOLDEN + _mix(seed.to(tl.int64) + GOLDEN))


@triton.jit
def unit_interval(words):
    """Float64 numbers in (0, 1) from the top 52 bits of int64 words plus half a step, all exact."""
    odd = (words >> 12) * 2 + ((1 << 52) + 1)
    return odd.to(tl.float64) * 1.1102230246251565e-16  # 2**-53


@triton.jit
def exponential(key, numbers):
    """Exponential draws, Exp(1) in float64, for int64 numbers under one key."""
    return -tl.log(unit_interval(_mix(key + numbers * GOLDEN)))
