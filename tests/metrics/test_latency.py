"""Percentiles of latencies and goodput, against figures worked out by hand."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest

from hydraspec.metrics.counters import RequestCounters
from hydraspec.metrics.latency import Limits, by_turn, goodput, latencies, percentiles
from hydraspec.metrics.meter import Meter
from hydraspec.types import Completion, Request, SamplingParams


def ended(index: int, **fields: Any) -> RequestCounters:
    known = {
        "finish_reason": "stop",
        "num_output_tokens": 11,
        "ttft_ms": 100.0,
        "latency_ms": 300.0,
    }
    return RequestCounters(index=index, **{**known, **fields})


def test_percentiles_are_interpolated_and_null_without_values() -> None:
    assert percentiles([]) == {"p50": None, "p90": None, "p99": None}
    assert percentiles([7.0]) == {"p50": 7.0, "p90": 7.0, "p99": 7.0}
    found = percentiles(float(value) for value in range(101))
    assert found == {"p50": 50.0, "p90": 90.0, "p99": 99.0}


def test_gaps_of_all_requests_are_pooled_and_errors_left_out() -> None:
    """Catches a mean of each request's percentiles: long answers would then weigh too little."""
    many = ended(0, inter_token_ms=array("f", [1.0] * 90), queue_ms=5.0)
    few = ended(1, inter_token_ms=array("f", [9.0] * 10), queue_ms=7.0)
    failed = ended(2, finish_reason="error", ttft_ms=9e9, queue_ms=9e9)
    waiting = ended(3, finish_reason=None, ttft_ms=9e9)
    found = latencies([many, few, failed, waiting])
    assert found["inter_token"]["p50"] == 1.0
    assert found["inter_token"]["p99"] == 9.0
    assert found["queue"]["p50"] == 6.0
    assert found["ttft"]["p99"] == 100.0


def test_an_engine_that_gives_no_times_has_null_figures() -> None:
    blind = ended(0, ttft_ms=None)
    assert latencies([blind])["ttft"]["p50"] is None
    assert latencies([blind])["inter_token"]["p50"] is None
    found = goodput([blind], Limits(ttft_ms=1.0), 2.0)
    assert found is not None
    assert found["share"] is None
    assert found["requests_per_second"] is None


def test_without_limits_there_is_no_goodput() -> None:
    assert goodput([ended(0)], Limits(), 1.0) is None


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        (Limits(ttft_ms=100.0), [0, 2, 3]),  # a limit is met at its very value
        (Limits(ttft_ms=99.9), []),
        (Limits(inter_token_ms=20.0), [0, 1, 2]),  # (300 - 100) / 10
        (Limits(inter_token_ms=19.9), [2]),
        (Limits(ttft_ms=100.0, inter_token_ms=20.0), [0, 2]),
    ],
)
def test_a_request_has_to_meet_every_limit(limits: Limits, good: list[int]) -> None:
    requests = [
        ended(0),
        ended(1, ttft_ms=150.0, latency_ms=350.0),
        ended(2, num_output_tokens=1, latency_ms=100.0),  # one token has no gaps
        ended(3, latency_ms=301.0),
        ended(4, finish_reason="error", ttft_ms=None, num_output_tokens=0),
    ]
    found = goodput(requests, limits, 4.0)
    assert found is not None
    assert found["share"] == pytest.approx(len(good) / 5)
    assert found["requests_per_second"] == pytest.approx(len(good) / 4)
    assert (found["ttft_ms"], found["inter_token_ms"]) == (limits.ttft_ms, limits.inter_token_ms)


def test_tokens_that_come_together_count_one_by_one_for_the_limit_and_once_as_a_gap() -> None:
    """With drafts: 4 tokens every 40 ms meet a limit of 10 ms per token, though gaps are 40 ms."""
    drafted = ended(0, num_output_tokens=41, ttft_ms=0.0, latency_ms=400.0)
    drafted.inter_token_ms = array("f", [40.0] * 10)
    found = goodput([drafted], Limits(inter_token_ms=10.0), 1.0)
    assert found is not None
    assert found["share"] == 1.0
    assert latencies([drafted])["inter_token"]["p50"] == 40.0


def test_the_meter_takes_times_from_completions() -> None:
    request = Request(index=0, id="a", sampling=SamplingParams(), prompt_token_ids=[1])
    meter = Meter([request])
    meter.add_completion(
        Completion(
            index=0,
            prompt_token_ids=[1],
            output_token_ids=[2, 3, 4],
            text=None,
            finish_reason="stop",
            error=None,
            ttft_ms=3.0,
            latency_ms=8.0,
            queue_ms=1.5,
            inter_token_ms=[2.0, 3.0],
        )
    )
    found = latencies(meter.completed)
    assert found["queue"]["p50"] == 1.5
    assert found["inter_token"]["p50"] == 2.5


def test_percentiles_are_those_of_numpy() -> None:
    values = np.random.default_rng(0).lognormal(size=997)
    found = percentiles(values.tolist())
    assert list(found.values()) == pytest.approx(np.percentile(values, [50, 90, 99]).tolist())


# ------------------------------------------------------------------ turns


def turn(number: int, ttft_ms: float | None, drafts: int = 0, accepted: int = 0) -> RequestCounters:
    counts = {"num_drafts": drafts, "num_accepted_tokens": accepted}
    return ended(0, turn=number, ttft_ms=ttft_ms, **counts)


def test_each_turn_has_its_means_and_later_turns_together() -> None:
    """Catches means of means: of the later turns every request weighs the same."""
    found = by_turn(
        [
            *(turn(1, 100.0, 10, 20), turn(1, 300.0, 10, 10)),
            *(turn(2, 20.0, 4, 4), turn(2, 40.0, 4, 8), turn(3, 60.0, 2, 0)),
        ]
    )
    assert found is not None
    assert [(t["first"], t["last"], t["num_requests"]) for t in found] == [
        *((1, 1, 2), (2, 2, 2)),
        *((3, 3, 1), (2, 3, 3)),
    ]
    assert [t["time_to_first_token_ms"] for t in found] == [200.0, 30.0, 60.0, 40.0]
    assert [t["mean_acceptance_length"] for t in found] == [2.5, 2.5, 1.0, 2.2]


@pytest.mark.parametrize("reason", ["error", None], ids=["failed", "not finished yet"])
def test_turns_without_figures_have_rows(reason: str | None) -> None:
    """Catches a baseline that has fewer rows than its method, and a row for both later turns."""
    without = ended(0, turn=2, finish_reason=reason)
    found = by_turn([turn(1, None), without])
    assert found is not None
    assert [t["time_to_first_token_ms"] for t in found] == [None, None]
    assert [t["mean_acceptance_length"] for t in found] == [None, None]
    assert found[1]["num_requests"] == 0


def test_without_conversations_there_is_none() -> None:
    assert by_turn([]) is None
    assert by_turn([turn(1, 1.0)]) is None
