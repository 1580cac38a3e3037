"""Metrics of batches that start together, from wall times alone; benchmarks use them."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median


@dataclass(slots=True, kw_only=True)
class BatchTimes:
    """Wall times in seconds of a batch that starts together: whole, and up to its first tokens.

    The figures are of medians over the repeats. They need no times of steps or requests, so that
    every engine has them.
    """

    num_requests: int
    num_tokens: int  # of each request's whole output
    whole_s: list[float]
    one_token_s: list[float]

    @property
    def prefill_s(self) -> float:
        """Time until every request has its first token."""
        return median(self.one_token_s)

    @property
    def time_per_output_token_ms(self) -> float:
        """(time of the whole output - prefill_s) / (tokens of a request - 1)."""
        return self._decode_s / (self.num_tokens - 1) * 1e3

    @property
    def output_tokens_per_second(self) -> float:
        """Decode throughput: tokens after the first of every request / their time."""
        return self.num_requests * (self.num_tokens - 1) / self._decode_s

    @property
    def _decode_s(self) -> float:
        # Noise may exceed the time of a tiny model's few tokens.
        return max(median(self.whole_s) - self.prefill_s, 1e-9)
