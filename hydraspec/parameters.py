"""Sampling of one request, its limits, and the log probabilities that it may ask for. The module
imports no other room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

MAX_BIASES = 1024  # entries of logit_bias
MAX_ENDS = 128  # ending tokens that min_tokens bans: stop_token_ids and end-of-sequence ids
MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH = 128, 16  # sequences of bad_words, and tokens of each
MAX_LOGPROBS = 20  # alternatives of a token that are kept with their log probabilities


@dataclass(slots=True, frozen=True)
class Structured:
    """The grammar that an output has to follow."""

    kind: str  # a key of sampling.structured: json, regex, grammar or choice
    text: str  # a JSON schema, a regular expression, EBNF, or a JSON list of strings


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """Sampling of one request. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0  # taken from tokens of the output
    frequency_penalty: float = 0.0  # taken once for each time that a token is in the output
    repetition_penalty: float = 1.0  # divides positive logits of prompt and output tokens
    logit_bias: tuple[tuple[int, float], ...] = ()  # token id and what is added to its logit
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that are never completed
    min_tokens: int = 0  # output tokens before which only a limit ends the request
    n: int = 1  # samples of the prompt, each of which is a request
    logprobs: int | None = None  # alternatives of each output token, with its log probability
    prompt_logprobs: int | None = None  # alternatives of each prompt token but the first
    structured: Structured | None = None  # the grammar of the output; None: any text


class TokenLogprob(NamedTuple):
    """The natural logarithm of a token's probability, beside the most probable tokens."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]  # ids and log probabilities, falling; impossible ones left out

    @classmethod
    def of(cls, plain: Sequence[Any]) -> Self:
        """The record that JSON has as a list."""
        token_id, logprob, top = plain
        return cls(token_id, logprob, [(other, value) for other, value in top])
