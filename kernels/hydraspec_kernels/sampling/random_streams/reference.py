"""Counter-based random numbers in plain int64 tensor arithmetic, and what keys them.

Knows nothing of probabilities or tokens; no generator state, no host sync.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor


class Purpose(IntEnum):
    """What a draw is for. Each has its own stream: sharing a draw between two biases the output."""

    DRAFT = 0
    ACCEPT = 1
    RESIDUAL = 2
    BONUS = 3


def _signed(word: int) -> int:
    """A 64-bit word as the int64 that has the same bits."""
    return word - (1 << 64) if word >> 63 else word


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MULTIPLIERS = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB))
_SHIFTS = (30, 27, 31)
_INDEX_BITS, _PURPOSE_BITS = 14, 2

MAX_INDEX = (1 << _INDEX_BITS) - 1


def _fold_(words: Tensor, shift: int) -> None:
    """words ^= words >>> shift, in place; int64 >> copies the sign, so the copies are masked."""
    words ^= (words >> shift).bitwise_and_((1 << (64 - shift)) - 1)


def _mix_(words: Tensor) -> Tensor:
    """Bijective finaliser of SplitMix64 (Steele et al. 2014; Stafford's variant 13), in place."""
    _fold_(words, _SHIFTS[0])
    words *= _MULTIPLIERS[0]
    _fold_(words, _SHIFTS[1])
    words *= _MULTIPLIERS[1]
    _fold_(words, _SHIFTS[2])
    return words


def stream_key(
    seed: Tensor, position: Tensor, purpose: Purpose | Tensor, index: int | Tensor
) -> Tensor:
    """The 64-bit key of a draw, int64, of the arguments' broadcast shape.

    seed and position are int64; position is that of the predicted token (below 2**47). index
    (0..MAX_INDEX) is the draft's place in its step: after a rejection the same position is drafted
    again at a smaller index, and under block verification its first draw has already influenced the
    output, so it must not come back.
    """
    counter = (position << (_INDEX_BITS + _PURPOSE_BITS)) + ((index << _PURPOSE_BITS) + purpose)
    return _mix_(counter * _GOLDEN + _mix_(seed + _GOLDEN))


def unit_interval(words: Tensor) -> Tensor:
    """Top 52 bits, plus half a step, as float64: exact with 52 bits, so never 0 and never 1."""
    return (words >> 12).to(torch.float64).add_(2.0**51 + 0.5).mul_(2.0**-52)


def uniform(
    seed: Tensor, position: Tensor, purpose: Purpose | Tensor, index: int | Tensor
) -> Tensor:
    """Uniform draws in the open interval (0, 1), float64, of the arguments' broadcast shape.

    Arguments as in `stream_key`.
    """
    return unit_interval(stream_key(seed, position, purpose, index))


def exponential_race(
    seed: Tensor,
    position: Tensor,
    purpose: Purpose | Tensor,
    index: int | Tensor,
    numbers: Tensor,
) -> Tensor:
    """Standard exponential draws, one for each of `numbers` [..., n] (int64, of one kind of thing
    that a draw chooses among), float64 [..., n], strictly positive.

    argmax(weights / race) is a sample from the normalised weights (the exponential race; Gumbel-max
    is its logarithm). [...] is the broadcast shape of the other arguments, which are as in
    `stream_key`.
    """
    key = stream_key(seed, position, purpose, index)
    return unit_interval(_mix_(key.unsqueeze(-1) + numbers * _GOLDEN)).log_().neg_()
