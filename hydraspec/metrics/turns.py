"""Figures by turn of conversations: the first turn reads a cold prompt, later ones find theirs in
the prefix cache."""

from __future__ import annotations

from collections.abc import Sequence

from hydraspec.metrics.meter import RequestCounters
from hydraspec.metrics.statistics import ratio
from hydraspec.metrics.summary import TurnFigures


def by_turn(requests: Sequence[RequestCounters]) -> list[TurnFigures] | None:
    """Of first turns, second turns and so on, then of all turns after the first together; null
    where no request is a later turn. Over the requests that finished without an error."""
    last = max((c.turn for c in requests), default=1)
    if last == 1:
        return None
    places = [(turn, turn) for turn in range(1, last + 1)]
    return [_figures(requests, *place) for place in [*places, *[(2, last)] * (last > 2)]]


def _figures(requests: Sequence[RequestCounters], first: int, last: int) -> TurnFigures:
    """Means are as `Meter.acceptance_length` and `Meter.time_to_first_token_ms` define them."""
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
