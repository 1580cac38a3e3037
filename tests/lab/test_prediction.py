"""A prediction beside a run: which one is taken, what is refused, and where it is shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import hydraspec
from hydraspec.cli.compose import plan
from hydraspec.errors import ConfigurationError
from hydraspec.lab.prediction import read
from hydraspec.study import contents, groups


def predicted(
    folder: Path, speedup: float, *, target: str = "tiny_gemma4", method: str = "gemma4_mtp"
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    row = {
        "num_speculative_tokens": 3,
        "concurrency": 4,
        "speedup": speedup,
        "acceptance_length": 2.5,
        "break_even_acceptance_length": 3.1,
    }
    content = {"target": target, "method": method, "predictions": [row]}
    (folder / "predict.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def config(*overrides: str) -> Any:
    return plan(overrides).jobs[0].config


def test_the_row_of_the_runs_k_and_concurrency_is_taken(tmp_path: Path) -> None:
    given = f"metrics.prediction={predicted(tmp_path, 1.7)}"
    for found in (read(config(given)), read(config(f"{given}/predict.json"))):
        assert found.figures is not None
        assert found.figures["speedup"] == 1.7
        assert found.warnings == []
    assert read(config(given, "method=none")).figures is None
    assert read(config()).figures is None


def test_of_a_sweep_the_one_with_the_runs_method_is_taken(tmp_path: Path) -> None:
    predicted(tmp_path / "0", 1.2, method="eagle3")
    predicted(tmp_path / "1", 1.4)
    found = read(config(f"metrics.prediction={tmp_path}"))
    assert found.figures is not None
    assert found.figures["speedup"] == 1.4


def test_a_setting_that_was_not_predicted_is_said(tmp_path: Path) -> None:
    given = f"metrics.prediction={predicted(tmp_path, 1.7)}"
    found = read(config(given, "workload.concurrency=null"))
    assert found.figures is None
    assert "nothing of K=3 at concurrency 16" in found.warnings[0]


def test_predictions_of_other_models_are_refused(tmp_path: Path) -> None:
    given = f"metrics.prediction={predicted(tmp_path, 1.7, target='tiny_qwen3')}"
    with pytest.raises(ConfigurationError, match="allowed: predictions: gemma4_mtp on tiny_qwen3"):
        read(config(given))
    with pytest.raises(ConfigurationError, match=r"a folder with predict\.json"):
        read(config(f"metrics.prediction={tmp_path}/nothing"))
    (tmp_path / "predict.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"a folder with predict\.json"):
        read(config(given))


def test_a_losing_run_is_warned_of_and_shows_both_figures(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = predicted(tmp_path / "prediction", 0.8)
    typed = ["workload.limit=4", "sampling.max_tokens=8", "engine.device=cpu", "tracker=none"]
    run = tmp_path / "run"
    keys = [f"metrics.prediction={given}", f"hydra.run.dir={run}"]
    summary = hydraspec.run([*typed, *keys])
    (warning,) = [text for text in summary["warnings"] if "predicted to be slower" in text]
    assert "0.80x" in warning
    said = [record.getMessage() for record in caplog.records]
    assert warning in said
    measured = summary["speedup"]["mean"]
    assert summary["prediction"]["error"] == pytest.approx(0.8 / measured - 1)
    assert "predicted 0.80" in (run / "report.html").read_text(encoding="utf-8")
    blocks = [b for s in contents.study(groups.read([run])).sections for b in s.blocks]
    (block,) = [block for block in blocks if block.title == "Predicted speedup"]
    assert block.table is not None
    assert block.table.lines[0].cells[1:3] == ["0.80x", f"{measured:.2f}x"]
