"""When a request ends, and at which token. Runs on the host, over the tokens a step emitted."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from hydraspec.engine.native.scheduler import Sequence


class FinishCheck:
    """Appends emitted tokens one by one and stops at the first that ends the request.

    The token that ends it is kept in the output; the text ends before a stop string.
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

    def append(self, sequence: Sequence, tokens: Seq[int]) -> list[int]:
        """Add `tokens` up to the end of the request; returns those that were kept and sets
        finish_reason."""
        sampling = sequence.request.sampling
        ends = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            ends |= self._eos_token_ids
        for count, token in enumerate(tokens, 1):
            sequence.token_ids.append(token)
            if token in ends or (sampling.stop and self._stop_string(sequence)):
                sequence.finish_reason = "stop"
            elif (
                sequence.num_tokens - sequence.num_prompt >= sampling.max_tokens
                or sequence.num_tokens >= self._max_model_len
            ):
                sequence.finish_reason = "length"
            if sequence.finish_reason:
                return list(tokens[:count])
        return list(tokens)

    def _stop_string(self, sequence: Sequence) -> bool:
        """Whether the text holds a stop string; then the text is cut before the earliest one."""
        assert self._decode is not None, "tokenize() refuses stop strings without a tokenizer"
        text = self._decode(sequence.output_token_ids)
        places = [
            place for stop in sequence.request.sampling.stop if (place := text.find(stop)) >= 0
        ]
        if places:
            sequence.text = text[: min(places)]
        return bool(places)

    def text(self, sequence: Sequence) -> str | None:
        """The request's output text, or None without a tokenizer."""
        if sequence.text is not None or self._decode is None:
            return sequence.text
        return self._decode(sequence.output_token_ids)
