"""W&B gets no NaN and no null from steps and runs that drafted nothing."""

from __future__ import annotations

import math
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hydraspec.metrics import tracker
from hydraspec.metrics.meter import Meter
from hydraspec.metrics.sinks import Side
from hydraspec.types import Request, RequestStep, SamplingParams, StepRecord


def test_nothing_drafted_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[dict[str, Any]] = []
    summary: dict[str, Any] = {}
    run = SimpleNamespace(
        log=logged.append,
        finish=lambda: None,
        summary=summary,
        define_metric=lambda *args, **kwargs: None,
    )
    fake = SimpleNamespace(
        init=lambda **arguments: run,
        Settings=type("Settings", (SimpleNamespace,), {"model_fields": ("mode",)}),
        Table=lambda columns, data: data,
        Histogram=lambda np_histogram: np_histogram,
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)  # type: ignore[arg-type]
    monkeypatch.setattr(tracker, "SECONDS_BETWEEN_POINTS", 0.0)
    options = tracker.TrackerOptions(project="p", entity=None, group=None, mode="offline", name="n")
    sink = tracker.WandbSink(options, Path("/run"), {})
    meter = Meter([Request(index=0, id="0", sampling=SamplingParams())], num_speculative_tokens=2)
    for step, drafts in enumerate(([], [-1, -1], [])):  # a plain step, padding, a plain step
        part = RequestStep(
            index=0,
            num_rows=1,
            is_prefill=step == 0,
            num_computed_tokens=step,
            draft_token_ids=drafts,
            num_accepted=0,
            output_token_ids=[5],
        )
        record = StepRecord(step=step, phase_ms={}, total_ms=0.0, requests=[part])
        meter.add_step(record)
        sink.on_step(Side.method, record, meter)
    rates = meter.acceptance_rate_per_position()
    told = {
        "acceptance_length": asdict(meter.acceptance_length()),
        "acceptance_rate": meter.acceptance_rate(),
        "acceptance_rate_per_position": rates,
        "conditional_acceptance_rate_per_position": rates,
        "output_tokens_per_second": meter.output_tokens_per_second(),
    }
    assert sink.on_summary(told) == []
    assert [point["steps/method/step"] for point in logged[:3]] == [0, 1, 2]
    for point in (*logged[:3], summary):
        assert all(math.isfinite(value) for value in point.values()), point
        assert not any("acceptance" in name for name in point)
    (last,) = logged[3:]
    assert last["acceptance_by_position"] == [[1, None, None], [2, None, None]]
    assert set(last) == {"acceptance_by_position", "histograms/step_ms"}
