"""The end of a request: at which token it comes, and the completion. Every engine ends its requests
with these functions, on the host, over the tokens that a step emitted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Self

from hydraspec.types import Completion, Request, SamplingParams, TokenLogprob

# Characters at the left edge of a decoded piece that may differ from the whole text's: a space that
# is stripped, a letter cut into bytes. More than any tokenizer's.
TAIL_MARGIN = 8


@dataclass(slots=True, eq=False)
class OfferedRequest:
    """The host's view of a request that was offered to an engine."""

    request: Request
    token_ids: list[int]  # prompt and emitted tokens
    num_prompt: int
    offered_at: float = field(default_factory=time.perf_counter)
    slot_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    num_cached: int = 0  # prompt tokens taken from the prefix cache at its first admission
    inter_token_ms: list[float] = field(default_factory=list)
    text: str | None = None  # set when a stop string cut it
    finish_reason: str | None = None
    ended_by_token: bool = True  # where the reason is "stop"
    error: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Returns whether log probabilities of the prompt are asked for and not all there."""
        if self.request.sampling.prompt_logprobs is None:
            return False
        return len(self.prompt_logprobs) < self.num_prompt - 1

    @classmethod
    def of(cls, request: Request, offered_at: float | None = None) -> Self:
        """A tokenised request, offered at `offered_at` (time.perf_counter()), or now. It has failed
        already if it cannot be served."""
        tokens = list(request.tokens.token_ids)
        at = time.perf_counter() if offered_at is None else offered_at
        offered = cls(request=request, token_ids=tokens, num_prompt=len(tokens), offered_at=at)
        if request.error is not None:
            offered.fail(request.error)
        return offered

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the output."""
        return len(self.token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens after the prompt."""
        return self.token_ids[self.num_prompt :]

    def fail(self, message: str) -> None:
        self.finish_reason, self.error = "error", message

    def fail_if_too_long(self, max_model_len: int) -> None:
        """Fail a prompt that leaves no room for one token, unless it has failed already."""
        if self.finish_reason is None and self.num_tokens >= max_model_len:
            self.fail(
                f"the prompt has {self.num_tokens} tokens; target.max_model_len is "
                f"{max_model_len} and leaves no room for an answer: shorten the prompt, or raise "
                "target.max_model_len if it is below the checkpoint's own limit"
            )

    def note_slot(self, now: float) -> None:
        """Keep `now` (time.perf_counter()) as the time of the first slot, once only."""
        self.slot_at = self.slot_at or now

    def note_tokens(self, now: float) -> None:
        """Keep `now` (time.perf_counter()) as the time at which all tokens of a step came."""
        if self.last_token_at is None:
            self.first_token_at = now
        else:
            self.inter_token_ms.append((now - self.last_token_at) * 1e3)
        self.last_token_at = now


class FinishCheck:
    """Appends emitted tokens one by one and stops at the first that ends the request.

    The token that ends the request is kept in the output; the text ends before a stop string.
    """

    def __init__(
        self,
        eos_token_ids: Seq[int],
        max_model_len: int,
        decode: Callable[[Seq[int]], str] | None,
    ) -> None:
        self._eos_token_ids = frozenset(eos_token_ids)
        self._max_model_len = max_model_len
        self._decode = decode
        self._ends: dict[tuple[tuple[int, ...], bool], frozenset[int]] = {}

    def append(self, sequence: OfferedRequest, tokens: Seq[int]) -> list[int]:
        """Add `tokens` up to the end of the request; returns those that were kept and sets
        finish_reason."""
        sampling = sequence.request.sampling
        ends = self._end_token_ids(sampling)
        room = sequence.num_prompt + sampling.max_tokens
        if (
            not sampling.stop
            and sequence.num_tokens + len(tokens) < min(room, self._max_model_len)
            and ends.isdisjoint(tokens)
        ):
            sequence.token_ids.extend(tokens)
            return list(tokens)
        for count, token in enumerate(tokens, 1):
            sequence.token_ids.append(token)
            num_output = sequence.num_tokens - sequence.num_prompt
            may_stop = num_output > sampling.min_tokens
            # This also cuts the text.
            is_stopped = may_stop and bool(sampling.stop) and self._stop_string(sequence)
            is_end = may_stop and token in ends
            if is_stopped or is_end:
                sequence.finish_reason = "stop"
                sequence.ended_by_token = is_end
            elif num_output >= sampling.max_tokens or sequence.num_tokens >= self._max_model_len:
                sequence.finish_reason = "length"
            if sequence.finish_reason:
                return list(tokens[:count])
        return list(tokens)

    def _end_token_ids(self, sampling: SamplingParams) -> frozenset[int]:
        key = (sampling.stop_token_ids, sampling.ignore_eos)
        ends = self._ends.get(key)
        if ends is None:
            ends = frozenset(sampling.stop_token_ids)
            if not sampling.ignore_eos:
                ends |= self._eos_token_ids
            self._ends[key] = ends
        return ends

    def _stop_string(self, sequence: OfferedRequest) -> bool:
        """Returns whether the text holds a stop string that ends after the first min_tokens
        tokens; then the text is cut before the earliest one."""
        assert self._decode is not None, "tokenize() refuses stop strings without a tokenizer"
        if not self._tail_holds_stop(sequence, self._decode):
            return False
        sampling, output = sequence.request.sampling, sequence.output_token_ids
        text = self._decode(output)
        first = len(self._decode(output[: sampling.min_tokens])) if sampling.min_tokens else 0
        places = [
            place
            for stop in sampling.stop
            if (place := text.find(stop, max(0, first - len(stop) + 1))) >= 0
        ]
        if places:
            sequence.text = text[: min(places)]
        return bool(places)

    @staticmethod
    def _tail_holds_stop(sequence: OfferedRequest, decode: Callable[[Seq[int]], str]) -> bool:
        """Returns whether the newest token may have completed a stop string: the text's end is
        decoded, not all of it at every token.

        The end begins a stop string's length and TAIL_MARGIN before the newest token.
        """
        stops, tokens = sequence.request.sampling.stop, sequence.token_ids
        reach = max(map(len, stops)) + TAIL_MARGIN
        count = reach + 1
        first = max(sequence.num_prompt, len(tokens) - count)
        while first > sequence.num_prompt and len(decode(tokens[first:-1])) < reach:
            count *= 2  # some tokens decode to no text
            first = max(sequence.num_prompt, len(tokens) - count)
        tail = decode(tokens[first:])
        return any(stop in tail for stop in stops)

    def text(self, sequence: OfferedRequest) -> str | None:
        """The request's output text, or None without a tokenizer."""
        if sequence.text is not None or self._decode is None:
            return sequence.text
        return self._decode(sequence.output_token_ids)

    def completion(self, sequence: OfferedRequest) -> Completion:
        """The completion of a request that ended."""
        offered, slot, first = sequence.offered_at, sequence.slot_at, sequence.first_token_at
        end = sequence.last_token_at or time.perf_counter()
        sampling = sequence.request.sampling
        return Completion(
            index=sequence.request.index,
            prompt_token_ids=sequence.token_ids[: sequence.num_prompt],
            output_token_ids=sequence.output_token_ids,
            text=self.text(sequence),
            finish_reason=sequence.finish_reason or "error",
            error=sequence.error,
            ttft_ms=None if first is None else (first - offered) * 1e3,
            latency_ms=(end - offered) * 1e3,
            num_cached_tokens=sequence.num_cached,
            queue_ms=None if slot is None else (slot - offered) * 1e3,
            inter_token_ms=sequence.inter_token_ms,
            spans=sequence.request.spans,
            ended_by_token=sequence.ended_by_token,
            logprobs=None if sampling.logprobs is None else sequence.logprobs,
            prompt_logprobs=None if sampling.prompt_logprobs is None else sequence.prompt_logprobs,
        )
