"""Ctrl-C in the second round, with the native engine: what both sides finished is kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import hydraspec
from hydraspec.lab import recorder
from hydraspec.metrics.sinks import Side

NUM_REQUESTS = 8
STEPS_OF_ROUND_2 = 3  # the interrupt comes after so many


@pytest.mark.parametrize(
    ("side", "runs_ahead"), [(Side.method, "true"), (Side.baseline, "false")], ids=str
)
def test_both_sides_of_round_1_are_kept(
    side: Side, runs_ahead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a verdict, a speedup or a baseline that is lost with the round that was cut, and an
    engine that cannot judge because its run was closed in the middle.
    """

    class Interrupting(recorder.ConsoleSink):
        where: tuple[Side, int] = (Side.method, 0)
        num_steps = 0

        def on_round(self, side, number, num_rounds):  # type: ignore[no-untyped-def]
            self.where = (side, number)

        def on_step(self, side_of_step, record, meter):  # type: ignore[no-untyped-def]
            self.num_steps += self.where == (side, 2)
            if self.num_steps == STEPS_OF_ROUND_2:
                raise KeyboardInterrupt

    monkeypatch.setattr(recorder, "ConsoleSink", Interrupting)
    typed = [f"workload.limit={NUM_REQUESTS}", f"engine.async_scheduling={runs_ahead}"]
    with pytest.raises(KeyboardInterrupt):
        hydraspec.run([*typed, "tracker=none", f"hydra.run.dir={tmp_path}"], quiet=True)
    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    baseline, lossless = summary["baseline"], summary["lossless"]
    assert summary["status"] == "interrupted"
    finished_by_method = NUM_REQUESTS // (2 if side is Side.method else 1)
    assert (summary["num_requests"], baseline["num_requests"]) == (finished_by_method, 4)
    assert (lossless["verdict"], lossless["num_requests_checked"]) == ("identical", 4)
    assert summary["speedup"]["mean"] > 0
    assert baseline["output_tokens_per_second"] > 0
    assert baseline["accuracy"]["num_scored"] == 4
    rows = (tmp_path / "requests.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(rows) == finished_by_method
