"""Ranges of sampling parameters, for the configuration and for lines of a workload."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

MAX_INT32 = 2**31 - 1
MAX_INT64 = 2**63 - 1  # seeds live in int64 tensors
# Logits are divided by the temperature in float32: further out they overflow or all become equal.
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-4, 100.0


@dataclass(slots=True, frozen=True, kw_only=True)
class Range:
    """The values that a key may have, and their description in messages."""

    holds: Callable[[float], bool]
    allowed: str
    remedy: str
    is_whole: bool = True

    def allows(self, value: object) -> bool:
        """Returns whether `value` is a number of the right type and in range; true and false are no
        numbers."""
        kinds = int if self.is_whole else (int, float)
        return isinstance(value, kinds) and not isinstance(value, bool) and self.holds(value)


SAMPLING_RANGES = {
    "temperature": Range(
        holds=lambda v: v == 0 or MIN_TEMPERATURE <= v <= MAX_TEMPERATURE,
        allowed=f"0 (greedy), or {MIN_TEMPERATURE} to {MAX_TEMPERATURE:g}",
        remedy="for the most likely token alone write 0",
        is_whole=False,
    ),
    "top_k": Range(
        holds=lambda v: 0 <= v <= MAX_INT32,
        allowed=f"a whole number, 0 (off) to {MAX_INT32}",
        remedy="to keep every token write 0",
    ),
    "top_p": Range(
        holds=lambda v: 0 < v <= 1,
        allowed="above 0, up to 1 (off)",
        remedy="for the most likely token alone choose temperature 0 (sampling=greedy)",
        is_whole=False,
    ),
    "min_p": Range(
        holds=lambda v: 0 <= v < 1,
        allowed="0 (off) to below 1",
        remedy="for the most likely token alone choose temperature 0 (sampling=greedy)",
        is_whole=False,
    ),
    "seed": Range(
        holds=lambda v: 0 <= v <= MAX_INT64,
        allowed=f"a whole number, 0 to {MAX_INT64}",
        remedy="choose another seed, any will do",
    ),
    "max_tokens": Range(
        holds=lambda v: 1 <= v <= MAX_INT32,
        allowed=f"a whole number, 1 to {MAX_INT32}",
        remedy="write the most tokens an answer may have",
    ),
    "stop_token_ids": Range(  # the range of each id
        holds=lambda v: 0 <= v <= MAX_INT32,
        allowed=f"whole numbers, 0 to {MAX_INT32}",
        remedy="give ids of the target's tokenizer",
    ),
}
