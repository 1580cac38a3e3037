"""Counter-based random numbers in int64 tensor arithmetic (SplitMix64), and exponential races.

An exponential race draws one of n things with weights w: with independent E_i ~ Exp(1), one for
each thing, argmax_i w_i / E_i is i with probability w_i / sum(w). Gumbel-max is the logarithm of
it: argmax_i log w_i + G_i with G_i = -log E_i. A race needs no sum and no sorted order, so it is
the same on every device and in every batch.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor


class Purpose(IntEnum):
    """The purpose of a draw. Each has its own stream: two purposes that share a draw would bias the
    output."""

    DRAFT = 0
    ACCEPT = 1
    RESIDUAL = 2
    BONUS = 3


class DrawKey(NamedTuple):
    """The arguments of a draw; tensors of any shapes that broadcast.

    After a rejection the same position is drafted again at a smaller index. Under block
    verification its first draw has already influenced the output, so it must not come back: the
    index is part of the key.
    """

    seed: Tensor  # int64
    position: Tensor  # int64, of the predicted token, below 2**47
    purpose: Purpose | Tensor
    index: int | Tensor  # 0..MAX_INDEX, the draft's place in its step


def _signed(word: int) -> int:
    """A 64-bit word as the int64 that has the same bits."""
    return word - (1 << 64) if word >> 63 else word


GOLDEN = _signed(0x9E3779B97F4A7C15)
MULTIPLIERS = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB))
_SHIFTS = (30, 27, 31)
INDEX_BITS, PURPOSE_BITS = 14, 2

MAX_INDEX = (1 << INDEX_BITS) - 1


def _fold_(words: Tensor, shift: int) -> None:
    """Sets words ^= words >>> shift; int64 >> copies the sign, so the copies are masked."""
    words ^= (words >> shift).bitwise_and_((1 << (64 - shift)) - 1)


def _mix_(words: Tensor) -> Tensor:
    """Bijective finaliser of SplitMix64 (Steele et al. 2014; Stafford's variant 13), in place."""
    _fold_(words, _SHIFTS[0])
    words *= MULTIPLIERS[0]
    _fold_(words, _SHIFTS[1])
    words *= MULTIPLIERS[1]
    _fold_(words, _SHIFTS[2])
    return words


def stream_key(
    seed: Tensor, position: Tensor, purpose: Purpose | Tensor, index: int | Tensor
) -> Tensor:
    """The 64-bit word of a `DrawKey`, int64, of the arguments' broadcast shape."""
    counter = (position << (INDEX_BITS + PURPOSE_BITS)) + ((index << PURPOSE_BITS) + purpose)
    return _mix_(counter * GOLDEN + _mix_(seed + GOLDEN))


def unit_interval(words: Tensor) -> Tensor:
    """Float64 numbers from the top 52 bits of int64 words plus half a step: all are exact, so that
    none is 0 or 1.
    """
    return (words >> 12).to(torch.float64).add_(2.0**51 + 0.5).mul_(2.0**-52)


def uniform(
    seed: Tensor, position: Tensor, purpose: Purpose | Tensor, index: int | Tensor
) -> Tensor:
    """Uniform draws in the open interval (0, 1), float64, one for each `DrawKey`."""
    return unit_interval(stream_key(seed, position, purpose, index))


def exponential_race(
    seed: Tensor,
    position: Tensor,
    purpose: Purpose | Tensor,
    index: int | Tensor,
    numbers: Tensor,
) -> Tensor:
    """The Exp(1) draws E [..., n] float64 of a race between things with int64 numbers [..., n]; all
    are positive. [...] is the broadcast shape of the `DrawKey`.
    """
    key = stream_key(seed, position, purpose, index)
    return unit_interval(_mix_(key.unsqueeze(-1) + numbers * GOLDEN)).log_().neg_()
