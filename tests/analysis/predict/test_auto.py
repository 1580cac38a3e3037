"""Predictions of drafts chosen by request: the engine's own choices, and what they gain."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hydraspec.analysis.predict.auto import auto_steps, gain, in_batches, with_plain
from hydraspec.analysis.predict.model import Acceptance, Load, equal_steps, simulate
from hydraspec.engine.costs import CostTable, over_contexts
from hydraspec.engine.schedule.acceptance import RequestAcceptance
from hydraspec.engine.schedule.draft_lengths import DraftLengths

MOST = 4
BATCHES = (1, 4, 16)
CHEAP = CostTable(
    batches=BATCHES,
    drafts=tuple(range(MOST + 1)),
    step_ms=tuple(tuple(2 + b * (1 + k) * 0.06 for k in range(MOST + 1)) for b in BATCHES),
)
DEAR = CostTable(
    batches=BATCHES,
    drafts=CHEAP.drafts,
    step_ms=tuple(tuple(2 + b * (1 + k) * 0.8 for k in range(MOST + 1)) for b in BATCHES),
)
TABLE = over_contexts({256: CHEAP, 4096: DEAR})


def mixture(num_requests: int) -> np.ndarray:
    """Survivals of requests of which every second one can hardly be drafted."""
    rates = np.where(np.arange(num_requests) % 2, 0.02, 0.9)
    return np.cumprod(np.tile(rates[:, None], MOST), axis=1)


@pytest.mark.parametrize("context", [300, 2000, 5000])
@pytest.mark.parametrize("num_requests", [1, 5, 16])
def test_a_prediction_chooses_what_the_engine_chooses(
    num_requests: int, context: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same survivals and costs; of an engine whose last step proposed most drafts."""
    survivals = mixture(num_requests)
    monkeypatch.setattr(RequestAcceptance, "survivals", lambda *args: survivals)
    lengths = DraftLengths(TABLE.drafts, TABLE, num_slots=num_requests)
    middle = (context // 256) * 256 + 128  # costs are looked up for so many tokens at a time
    found = lengths.choose(range(num_requests), num_requests, context=context)
    step = auto_steps(TABLE, survivals, TABLE.drafts)(range(num_requests), middle)
    assert step.counts.tolist() == found.counts


@pytest.mark.parametrize("context", [256, 1500, 4096])
@pytest.mark.parametrize("batch", [1, 3, 16])
def test_chosen_drafts_are_as_fast_as_any_number_for_all(batch: int, context: int) -> None:
    gained = gain(TABLE, mixture(24), batch, context)
    assert gained >= 1
    alike = np.tile(mixture(1), (24, 1))
    assert gain(TABLE, alike, batch, context) == pytest.approx(1.0)
    if (batch, context) == (16, 256):
        assert gained > 1.05


def test_a_load_of_a_mixture_decodes_faster_than_with_any_number_for_all() -> None:
    """Most of it: its end, where the slow requests are alone, takes longer."""
    survivals = mixture(64)
    load = Load([8] * 64, [0] * 64, [160] * 64, concurrency=16, parts=[(0, 64)])
    acceptance = Acceptance(survivals, survivals.mean(0))

    def speed(steps, *, of=acceptance):  # type: ignore[no-untyped-def]
        found = simulate(load, steps, ms_per_prompt_row=0.0, acceptance=of, max_rows=1000)
        return found.tokens_per_second

    fixed = [speed(equal_steps(CHEAP, k)) for k in CHEAP.drafts]
    assert speed(auto_steps(CHEAP, survivals, CHEAP.drafts)) > 1.02 * max(fixed)


def test_every_request_is_in_a_batch_once_before_the_first_are_there_again() -> None:
    seen: list[list[int]] = []

    def steps(requests, context):  # type: ignore[no-untyped-def]
        seen.append(list(requests))
        return equal_steps(CHEAP, 1)(requests, context)

    in_batches(steps, 5, 2, 100)
    assert seen == [[0, 1], [2, 3], [4, 0]]


def test_steps_without_drafts_are_the_baselines() -> None:
    """By context too, where a batch does not fit with drafts; times of a K that was measured while
    the machine was half as fast count half."""
    method = CostTable(
        batches=(1, 4),
        drafts=(2,),
        step_ms=((3.0,), (4.0,), (5.0,), ()),
        draft_ms=((0.5,), (0.6,), (0.7,), ()),
        contexts=(100, 900),
    )
    plain = CostTable(
        batches=(1, 4), drafts=(0,), step_ms=((1.0,), (2.0,), (2.5,), (2.7,)), contexts=(100, 900)
    )
    slower = replace(plain, step_ms=tuple((2 * ms,) for (ms,) in plain.step_ms))
    assert with_plain(method, plain, {2: slower}).step_ms[2] == (2.5, 2.5)
    found = with_plain(method, plain, {2: plain})
    assert found.drafts == (0, 2)
    assert found.step_ms == ((1.0, 3.0), (2.0, 4.0), (2.5, 5.0), ())
    assert found.draft_ms == ((0.0, 0.5), (0.0, 0.6), (0.0, 0.7), ())
