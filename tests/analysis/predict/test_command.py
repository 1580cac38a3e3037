"""A prediction from command to predict.json, and beside what is measured."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from hydraspec.cli.predict import predict
from hydraspec.engine.costs import from_json
from hydraspec.predict import main

ZOO = [
    *("target=tiny_gemma4", "method=gemma4_mtp", "engine.device=cpu", "engine.num_threads=1"),
    "tracker=none",
]


@pytest.mark.slow
def test_a_losing_setting_is_warned_of_before_it_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Drafts that are never accepted lose whatever a step costs."""
    argv = [*ZOO, f"hydra.run.dir={tmp_path}", "--drafts", "2", "--concurrency", "2"]
    assert main([*argv, "workload.limit=1", "--acceptance", "0"]) == 0
    found = json.loads((tmp_path / "predict.json").read_text())
    (row,) = found["predictions"]
    assert row["speedup"] < 1
    assert row["acceptance_length"] == 1.0
    assert row["break_even_acceptance_length"] > 1
    assert row["verify_ms"] + row["draft_ms"] == pytest.approx(row["step_ms"])
    assert found["best"] == [{"concurrency": 2, "num_speculative_tokens": 0, "speedup": 1.0}]
    assert "the workload has fewer requests (1)" in found["warnings"][0]
    assert "K=2 at concurrency 2 is predicted to be slower" in found["warnings"][1]
    assert "no K is faster" in capsys.readouterr().out
    assert "predicted to be slower" in (tmp_path / "predict.html").read_text()
    assert from_json(found["costs"]["method"], "a").batches == (1, 2)
    assert from_json(found["costs"]["plain"], "a").drafts == (0,)


def test_a_map_is_measured_without_long_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the console, in predict.json with its costs, and on the page; a context without room for
    the timed steps is refused."""
    monkeypatch.setattr("hydraspec.analysis.predict.prediction.ROUNDS", 1)
    argv = [*ZOO, f"hydra.run.dir={tmp_path}", "--drafts", "2", "--concurrency", "2"]
    argv += ["workload.limit=2", "--contexts", "300,900"]
    assert main([*argv, "target.max_model_len=1200"]) == 0
    found = json.loads((tmp_path / "predict.json").read_text())
    assert [(cell["context"], cell["concurrency"]) for cell in found["map"]] == [(300, 2), (900, 2)]
    length = found["predictions"][0]["acceptance_length"]
    for cell in found["map"]:
        ratio = cell["plain_step_ms"] / cell["step_ms"]
        assert cell["speedup"] == pytest.approx(length * ratio)
    (auto, *_) = by_cell = found["auto"]
    assert [each["context"] for each in by_cell] == [None, 300, 900]
    assert auto["concurrency"] == 2
    for cell, each in zip(found["map"], by_cell[1:], strict=True):
        assert each["speedup"] >= cell["speedup"]
    own, *filled = from_json(found["costs"]["method"], "a").contexts
    assert own < 300
    assert filled == [300, 900]
    assert "Where drafts pay" in capsys.readouterr().out
    assert ">900</td>" in (tmp_path / "predict.html").read_text()
    assert main([*argv, "target.max_model_len=1000"]) == 2
    assert "--contexts=900 leaves no room" in capsys.readouterr().err


@pytest.mark.slow
def test_predictions_are_near_what_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clocks of the process's own time, so that other processes on the machine do not count."""
    monkeypatch.setattr(time, "perf_counter", time.process_time)
    overrides = [*ZOO, "workload.limit=32", f"hydra.run.dir={tmp_path}"]
    (found,) = predict(overrides, drafts=[1, 3], concurrencies=[1, 8], check=True, quiet=True)
    assert len(found["predictions"]) == 4
    assert found["mean_absolute_error"] < 0.10
    for row in found["predictions"]:
        assert row["measured"]["speedup"]["mean"] > 1
        assert row["acceptance_length"] == pytest.approx(
            row["measured"]["acceptance_length"], rel=0.1
        )
