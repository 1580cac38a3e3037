"""Latencies as users see them: percentiles over requests, and the requests that meet given limits.

Each figure is defined once, here, over the requests that finished without an error. Names and
definitions are those of `vllm bench serve`; a request is offered when it arrives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import cast

import numpy as np

from hydraspec.metrics.counters import RequestCounters
from hydraspec.metrics.statistics import ratio
from hydraspec.metrics.summary import Goodput, Latencies, Percentiles, TurnFigures


@dataclass(slots=True, frozen=True, kw_only=True)
class Limits:
    """Limits that a request has to meet to count for goodput; None: no limit."""

    ttft_ms: float | None = None
    inter_token_ms: float | None = None


def percentiles(values: Iterable[float]) -> Percentiles:
    """50th, 90th and 99th percentile, interpolated linearly; None without values."""
    found = np.fromiter(values, float)
    p50, p90, p99 = np.percentile(found, (50, 90, 99)) if found.size else (None, None, None)
    return {"p50": p50, "p90": p90, "p99": p99}


def waits(requests: Sequence[RequestCounters]) -> dict[str, list[float]]:
    """Waiting times in milliseconds, by name.

    ttft: times of requests from being offered to the first token (TTFT).

    inter_token: times between two deliveries to a user, over the gaps of all requests (ITL). A step
    that brings a request several tokens, accepted drafts among them, is one delivery: with drafts
    there are fewer gaps, each for more tokens, so compare methods by `time_per_output_token_ms`,
    and read these times as how long an answer stands still.

    queue: times of requests from being offered to getting a slot of the engine.
    """
    done = [c for c in requests if c.finished]
    return {
        "ttft": [c.ttft_ms for c in done if c.ttft_ms is not None],
        "inter_token": [gap for c in done for gap in c.inter_token_ms],
        "queue": [c.queue_ms for c in done if c.queue_ms is not None],
    }


def latencies(requests: Sequence[RequestCounters]) -> Latencies:
    """Percentiles of the waiting times of `waits`, in milliseconds."""
    found = {name: percentiles(values) for name, values in waits(requests).items()}
    return cast(Latencies, found)


def goodput(
    requests: Sequence[RequestCounters], limits: Limits, duration_s: float
) -> Goodput | None:
    """The requests that meet every limit: their share of all that ended, and how many per second of
    the rounds' wall time. Returns None without a limit; without times, share and rate are None.

    A request meets `inter_token_ms` if its mean time per token after the first is within the
    limit, as for TPOT in the goodput of `vllm bench serve`. A delivery of several tokens counts
    for each of them, so that drafts help, and one slow step is no failure. A request of one token
    meets this limit; a request that ended with an error meets none.
    """
    if limits == Limits():
        return None
    known = all(c.ttft_ms is not None for c in requests if c.finished)
    good = sum(_meets(c, limits) for c in requests) if known else None
    return {
        "ttft_ms": limits.ttft_ms,
        "inter_token_ms": limits.inter_token_ms,
        "share": None if good is None else ratio(good, len(requests)),
        "requests_per_second": None if good is None else ratio(good, duration_s),
    }


def _meets(request: RequestCounters, limits: Limits) -> bool:
    if not request.finished or request.ttft_ms is None:
        return False
    per_token = ratio(request.latency_ms - request.ttft_ms, request.num_output_tokens - 1) or 0.0
    return (limits.ttft_ms is None or request.ttft_ms <= limits.ttft_ms) and (
        limits.inter_token_ms is None or per_token <= limits.inter_token_ms
    )


def by_turn(requests: Sequence[RequestCounters]) -> list[TurnFigures] | None:
    """Figures of first turns, second turns and so on, then of all turns after the first together;
    None where no request of the workload is a later turn. The first turns of conversations read a
    cold prompt; later ones find theirs in the prefix cache.

    Args:
        requests: all of the workload, so that method and baseline have the same rows; counted are
            those that finished without an error.
    """
    last = max((c.turn for c in requests), default=1)
    if last == 1:
        return None
    places = [(turn, turn) for turn in range(1, last + 1)]
    return [_of_turns(requests, *place) for place in [*places, *[(2, last)] * (last > 2)]]


def _of_turns(requests: Sequence[RequestCounters], first: int, last: int) -> TurnFigures:
    """Figures of turns `first` to `last`, with means as `Meter.acceptance_length` and
    `Meter.time_to_first_token_ms` define them."""
    found = [c for c in requests if c.finished and first <= c.turn <= last]
    accepted = sum(c.num_accepted_tokens for c in found)
    rate = ratio(accepted, sum(c.num_drafts for c in found))
    waits = [c.ttft_ms for c in found if c.ttft_ms is not None]
    return {
        "first": first,
        "last": last,
        "num_requests": len(found),
        "mean_acceptance_length": None if rate is None else 1 + rate,
        "time_to_first_token_ms": ratio(sum(waits), len(waits)),
    }


@dataclass(slots=True, kw_only=True)
class BatchTimes:
    """Wall times in seconds of a batch that starts together: whole, and up to its first tokens.

    The figures are computed from medians over the repeats. They need no times of steps or
    requests, so that every engine has them.
    """

    num_requests: int
    num_tokens: int  # of each request's whole output
    whole_s: list[float]  # of each repeat
    one_token_s: list[float]  # of each repeat

    @property
    def prefill_s(self) -> float:
        """Median time in seconds until every request has its first token."""
        return median(self.one_token_s)

    @property
    def time_per_output_token_ms(self) -> float:
        """Decode time per token: (whole output - prefill_s) / (tokens of a request - 1)."""
        return self._decode_s / (self.num_tokens - 1) * 1e3

    @property
    def output_tokens_per_second(self) -> float:
        """Decode throughput: tokens after the first of every request / decode time."""
        return self.num_requests * (self.num_tokens - 1) / self._decode_s

    @property
    def _decode_s(self) -> float:
        # Noise may exceed the time of a tiny model's few tokens.
        return max(median(self.whole_s) - self.prefill_s, 1e-9)
