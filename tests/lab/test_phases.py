"""Where a summary's phase times come from: steps, or a profiling run where steps have none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine

from hydraspec.types import Completion, Request, StepRecord

Use = Callable[[FakeEngine], FakeEngine]
Run = Callable[[], dict[str, Any]]


class Unphased(FakeEngine):
    """Its steps have no phases; a profile has."""

    def __init__(self, profile: dict[str, float] | None) -> None:
        super().__init__(device="cuda", async_scheduling=True)
        self.profile, self.profiled = profile, 0

    def run(
        self, requests: Sequence[Request], *, concurrency: int | None
    ) -> Iterator[StepRecord | Completion]:
        for event in super().run(requests, concurrency=concurrency):
            if isinstance(event, StepRecord):
                event.phase_ms = dict.fromkeys(event.phase_ms)
            yield event

    def profile_phases(self, requests: Sequence[Request]) -> dict[str, float] | None:
        self.profiled = len(requests)
        return self.profile


def test_phases_come_from_a_profile_where_steps_have_none(
    use_engine: Use, run_config: Run, tmp_path: Path
) -> None:
    """The baseline's steps have phases of their own here: each side says where its came from."""
    profile = {"schedule": 0.5, "prepare": 1.0, "forward": 7.5, "verify": 2.0, "propose": 3.0}
    engine = use_engine(Unphased(profile))
    summary = run_config()
    assert summary["time_breakdown_ms"] == profile
    assert "eager" in summary["time_breakdown_from"]
    assert summary["baseline"]["time_breakdown_from"] == "all steps"
    assert summary["baseline"]["time_breakdown_ms"]["forward"] == pytest.approx(1.0)
    assert summary["async_scheduling"] is True
    assert engine.profiled == 2, "as many requests as are offered at once"
    assert "eager, without graphs" in (tmp_path / "run" / "report.html").read_text("utf-8")


def test_no_phases_anywhere_are_nulls(use_engine: Use, run_config: Run) -> None:
    use_engine(Unphased(None))
    summary = run_config()
    assert set(summary["time_breakdown_ms"].values()) == {None}
    assert summary["time_breakdown_from"] is None
