"""Figures by turn, against figures worked out by hand."""

from __future__ import annotations

from typing import Any

from hydraspec.metrics.meter import Meter, RequestCounters
from hydraspec.metrics.turns import by_turn
from hydraspec.types import Request, SamplingParams


def ended(
    turn: int, ttft_ms: float | None, drafts: int = 0, accepted: int = 0, **fields: Any
) -> RequestCounters:
    return RequestCounters(
        index=0,
        turn=turn,
        finish_reason="stop",
        ttft_ms=ttft_ms,
        num_drafts=drafts,
        num_accepted_tokens=accepted,
        **fields,
    )


def test_each_turn_has_its_means_and_later_turns_together() -> None:
    """Catches means of means: of the later turns every request weighs the same."""
    requests = [
        *(ended(1, 100.0, 10, 20), ended(1, 300.0, 10, 10)),
        *(ended(2, 20.0, 4, 4), ended(2, 40.0, 4, 8), ended(3, 60.0, 2, 0)),
    ]
    found = by_turn(requests)
    assert found is not None
    assert [(t["first"], t["last"], t["num_requests"]) for t in found] == [
        *((1, 1, 2), (2, 2, 2)),
        *((3, 3, 1), (2, 3, 3)),
    ]
    assert [t["time_to_first_token_ms"] for t in found] == [200.0, 30.0, 60.0, 40.0]
    assert [t["mean_acceptance_length"] for t in found] == [2.5, 2.5, 1.0, 2.2]


def test_two_turns_have_no_entry_for_later_ones_together() -> None:
    assert len(by_turn([ended(1, 1.0), ended(2, 1.0)]) or []) == 2


def test_errors_are_left_out_and_figures_may_be_unknown() -> None:
    failed = ended(2, 9e9)
    failed.finish_reason = "error"
    found = by_turn([ended(1, None), failed])
    assert found is not None
    assert [t["time_to_first_token_ms"] for t in found] == [None, None]
    assert [t["mean_acceptance_length"] for t in found] == [None, None]
    assert found[1]["num_requests"] == 0


def test_without_conversations_there_is_none() -> None:
    assert by_turn([]) is None
    assert by_turn([ended(1, 1.0)]) is None
    requests = [
        Request(
            index=i, id=str(i), sampling=SamplingParams(), turn=i + 1, after=i - 1 if i else None
        )
        for i in range(2)
    ]
    assert [c.turn for c in Meter(requests).counters.values()] == [1, 2]
