"""Estimated survival of drafts beside what was accepted, counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from records import completion, part, step

from hydraspec.metrics.meter import Meter
from hydraspec.types import Request, RequestStep, SamplingParams


def estimated(drafts: int, accepted: int, *survivals: float) -> RequestStep:
    return replace(part(drafts=drafts, accepted=accepted), draft_survivals=list(survivals))


def metered(*parts: RequestStep) -> Meter:
    meter = Meter([Request(index=0, id="0", sampling=SamplingParams())], num_speculative_tokens=3)
    for each in parts:
        meter.add_step(step(each))
    meter.add_completion(completion(0))
    return meter


def test_drafts_are_counted_by_their_estimates() -> None:
    """Two drafts of 0.95 and 1.0, both accepted; one of four between 0.2 and 0.3. Catches a draft
    that counts as accepted because a later one's estimate is in its bin, and an 11th bin."""
    found = metered(
        estimated(3, 1, 0.95, 0.25, 0.21), estimated(3, 2, 1.0, 0.29, 0.2), part(drafts=3)
    ).draft_survival()
    assert found is not None
    low, high = found["bins"]
    assert (low["from"], low["to"], low["num_draft_tokens"]) == (0.2, 0.3, 4)
    assert (low["accepted"], low["estimated"]) == (0.25, pytest.approx(0.2375))
    assert (high["from"], high["to"], high["num_draft_tokens"]) == (0.9, 1.0, 2)
    assert (high["accepted"], high["estimated"]) == (1.0, pytest.approx(0.975))
    # 4 drafts are off by 0.0125 on average, 2 by 0.025.
    assert found["calibration_error"] == pytest.approx((4 * 0.0125 + 2 * 0.025) / 6)


def test_a_drafter_without_estimates_has_no_figures() -> None:
    assert metered(part(drafts=3, accepted=1)).draft_survival() is None
