"""Exit statuses, and the last line of a run or a sweep whose outputs are not the target's."""

from __future__ import annotations

from typing import Any

import pytest

from hydraspec.lab.outcome import Outcome, exit_status, last_line, outcome

DIVERGENCE = {"request": "task-4", "position": 3, "target_margin": 1.0, "allowed_margin": 2e-5}


def summary(**changes: Any) -> dict[str, Any]:
    lossless = {
        "verdict": "diverged",
        "num_requests_checked": 6,
        "num_requests_diverged": 2,
        "first_beyond_margin": DIVERGENCE,
        "num_failed_with_method_only": 0,
        "not_finite_in": None,
        **changes.pop("lossless", {}),
    }
    graphs = {"target": "none"}
    facts = {"status": "ok", "engine": "native", "dtype": "float32", "cudagraph": graphs}
    return {**facts, "lossless": lossless, **changes}


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, 4),
        ({"status": "interrupted"}, 130),
        ({"status": "failed"}, 1),
        ({"lossless": {"verdict": "numerical"}}, 0),
        ({"lossless": {"verdict": "not_checked"}}, 0),
    ],
    ids=lambda value: str(value),
)
def test_status_and_verdict_decide(changes: dict[str, Any], status: int) -> None:
    found = outcome(summary(**changes))
    assert (found.status, found.diverged is None) == (status, status != 4)


def test_a_benchmark_has_no_verdict() -> None:
    assert outcome({"status": "ok"}) == Outcome(status=0)


@pytest.mark.parametrize(
    ("statuses", "status"),
    [([], 0), ([0, 4], 4), ([4, 3], 3), ([4, 3, 1, 0], 1), ([3, 2, 4], 2)],
)
def test_the_lowest_status_is_the_sweeps(statuses: list[int], status: int) -> None:
    """Catches a sweep that hides a crash or a refused checkpoint behind an earlier divergence."""
    assert exit_status([Outcome(status=number) for number in statuses]) == status


def test_the_last_line_says_where_how_many_and_what_to_do() -> None:
    said = last_line([outcome(summary())])
    assert said is not None
    assert said.startswith(
        "diverged: request task-4 differs from the baseline at output token 3 "
        "(2 of 6 requests differ; target margin 1, rounding allows 2e-05): "
    )
    assert "\n" not in said
    assert last_line([Outcome(status=1)]) is None


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({}, "metrics.trace=true"),
        ({"dtype": "bfloat16"}, "target.dtype=float32"),
        (
            {"quantization": {"target": {"q_proj": "fp8 per channel, inputs per token"}}},
            "target.dtype=float64",
        ),
        ({"cudagraph": {"target": "full"}}, "cudagraph=none"),
        ({"lossless": {"not_finite_in": "task-4"}}, "NaN or infinite"),
        ({"lossless": {"first_beyond_margin": None}}, "requests.jsonl"),
        (
            {"lossless": {"first_beyond_margin": {**DIVERGENCE, "target_margin": None}}},
            "target margin not known",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_to_do_follows_from_what_diverged(changes: dict[str, Any], remedy: str) -> None:
    assert remedy in (last_line([outcome(summary(**changes))]) or "")


def test_of_several_jobs_the_first_is_spelt_out() -> None:
    jobs = [outcome(summary(), "0"), Outcome(status=0, job="1"), outcome(summary(), "2")]
    said = last_line(jobs) or ""
    assert said.startswith("2 of 3 jobs diverged (0, 2); the first, job 0: request task-4 ")
    assert (last_line(jobs[1:]) or "").startswith("job 2 diverged: request task-4 ")
