"""Sums over steps, and that they survive a file."""

from __future__ import annotations

import json

from hydraspec.metrics.step_sums import StepSums
from hydraspec.types import RequestStep, StepRecord


def record(draft_length: int | None, **changed: float) -> StepRecord:
    part = RequestStep(
        index=0,
        num_rows=3,
        is_prefill=False,
        num_computed_tokens=8,
        draft_token_ids=[4, 5],
        num_accepted=1,
        output_token_ids=[4, 6],
    )
    phases = {"forward": 1.5, "propose": None}
    known = {"step": 0, "phase_ms": phases, "total_ms": 4.0, "requests": [part]}
    return StepRecord(**{**known, "draft_length": draft_length, **changed})  # type: ignore[arg-type]


def test_sums_and_peaks() -> None:
    sums = StepSums()
    assert sums.add(record(2, num_replicas=2, kv_usage=0.5, num_preempted=1)) == 2.0
    assert sums.add(record(0, kv_usage=0.25)) == 4.0
    assert (sums.num_steps, sums.total_ms, sums.num_preemptions) == (2, 6.0, 1)
    assert sums.peak_kv_usage == 0.5
    assert sums.mean_phase_ms()["forward"] == 1.5
    assert sums.mean_phase_ms()["propose"] is None
    assert sums.draft_lengths.used(3) == {"mean": 1.0, "histogram": [1, 0, 1, 0]}


def test_they_are_the_same_after_a_file() -> None:
    """Catches drafts per step whose numbers have become texts."""
    sums = StepSums()
    for draft_length in (2, 0, None):
        sums.add(record(draft_length, kv_usage_per_group={"full": 0.5}))
    again = StepSums.of_json(json.loads(json.dumps(sums.as_json())))
    assert again == sums
    assert again.draft_lengths.used(3) == sums.draft_lengths.used(3)
    again.add(record(2))
    assert again.num_steps == 4
