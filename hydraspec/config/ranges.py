"""Ranges of sampling parameters, for the configuration and for lines of a workload."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hydraspec.parameters import (
    MAX_BAD_WORD_LENGTH,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_ENDS,
    MAX_LOGPROBS,
)

MAX_INT32 = 2**31 - 1
MAX_INT64 = 2**63 - 1  # seeds live in int64 tensors
# Logits are divided by the temperature in float32: further out they overflow or all become equal.
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-4, 100.0
MAX_SAMPLES = 1024  # of a prompt
NUM_OWN_ENDS = 28  # end-of-sequence ids that a target may have, of the MAX_ENDS that are banned


@dataclass(slots=True, frozen=True, kw_only=True)
class Range:
    """The values that a key may have, and their description in messages. `size` gives the number
    that must be in range, where a value is none itself."""

    holds: Callable[[float], bool]
    allowed: str
    remedy: str
    is_whole: bool = True
    size: Callable[[Any], object] = lambda value: value

    def allows(self, value: object) -> bool:
        """Returns whether `value` is a number of the right type and in range; true and false are no
        numbers."""
        kinds = int if self.is_whole else (int, float)
        size = self.size(value)
        return isinstance(size, kinds) and not isinstance(size, bool) and self.holds(size)


def _penalty() -> Range:
    return Range(
        holds=lambda v: -2 <= v <= 2,
        allowed="-2 to 2",
        remedy="0 is off; above 0 repetitions become rarer",
        is_whole=False,
    )


def _at_most(count: int, what: str) -> Range:
    return Range(
        holds=lambda v: v <= count,
        allowed=f"{count} {what} at most",
        remedy="leave some out",
    )


_ALTERNATIVES = Range(
    holds=lambda v: 0 <= v <= MAX_LOGPROBS,
    allowed=f"a whole number, 0 to {MAX_LOGPROBS}, or null",
    remedy="null keeps no log probabilities, 0 those of the tokens alone",
)
_TOKENS = Range(
    holds=lambda v: 0 <= v <= MAX_INT32,
    allowed=f"whole numbers, 0 to {MAX_INT32}",
    remedy="give ids of the target's tokenizer",
)
_BIAS = Range(
    holds=lambda v: -100 <= v <= 100,
    allowed="-100 to 100",
    remedy="-100 all but bans a token; bad_words bans it",
    is_whole=False,
)
_WORD_LENGTH = Range(
    holds=lambda v: 1 <= v <= MAX_BAD_WORD_LENGTH,
    allowed=f"sequences of 1 to {MAX_BAD_WORD_LENGTH} token ids",
    remedy="write fewer tokens: a sequence is banned with all that begins with it",
    size=len,
)

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
    "presence_penalty": _penalty(),
    "frequency_penalty": _penalty(),
    "repetition_penalty": Range(
        holds=lambda v: 0.01 <= v <= 100,
        allowed="0.01 to 100",
        remedy="1 is off; above 1 repetitions become rarer",
        is_whole=False,
    ),
    "min_tokens": Range(
        holds=lambda v: 0 <= v <= MAX_INT32,
        allowed=f"a whole number, 0 (off) to {MAX_INT32}",
        remedy="write the fewest tokens an answer may have",
    ),
    "logprobs": _ALTERNATIVES,
    "prompt_logprobs": _ALTERNATIVES,
    "n": Range(
        holds=lambda v: 1 <= v <= MAX_SAMPLES,
        allowed=f"a whole number, 1 to {MAX_SAMPLES}",
        remedy="for more samples repeat the line",
    ),
    "stop_token_ids": _TOKENS,  # the range of each id
}


def entries(key: str, value: Any) -> Iterator[tuple[str, Range, object]]:
    """What a key's list or mapping holds, to be checked one by one: the entry's place, to be
    written after the key, the range that it must be in, and the entry. Other keys hold nothing."""
    if key == "logit_bias":
        yield " (entries)", _at_most(MAX_BIASES, "entries"), len(value)
        for token, bias in value.items():
            yield " (token)", _TOKENS, int(token) if _is_digits(token) else token
            yield f".{token}", _BIAS, bias
    elif key == "bad_words":
        yield " (entries)", _at_most(MAX_BAD_WORDS, "sequences"), len(value)
        for i, word in enumerate(value):
            yield f"[{i}]", _WORD_LENGTH, word
            for j, token in enumerate(word):
                yield f"[{i}][{j}]", _TOKENS, token
    elif key == "stop_token_ids":
        for i, token in enumerate(value):
            yield f"[{i}]", _TOKENS, token


def too_many_ends(min_tokens: int, num_stops: int) -> str:
    """The allowed values of stop_token_ids, if min_tokens cannot ban so many; else nothing."""
    most = MAX_ENDS - NUM_OWN_ENDS
    return f"{most} ids at most with min_tokens" if min_tokens and num_stops > most else ""


def _is_digits(token: object) -> bool:
    return isinstance(token, str) and token.isascii() and token.isdigit()
