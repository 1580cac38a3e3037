"""The command: help, refusals with their status, and a prediction beside what is measured."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from hydraspec.analysis.predict.prediction import Wanted
from hydraspec.cli.compose import plan
from hydraspec.cli.predict import concurrencies_of, predict
from hydraspec.config.schema import RunConfig
from hydraspec.engine.costs import from_json
from hydraspec.errors import ConfigurationError
from hydraspec.predict import main

ZOO = [
    *("target=tiny_gemma4", "method=gemma4_mtp", "engine.device=cpu", "engine.num_threads=1"),
    "tracker=none",
]


def test_help_says_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert "--concurrency" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "status", "said"),
    [
        (["method=none"], 2, "method.name=none"),
        (["engine=transformers"], 2, "engine.name=transformers"),
        (["--concurrency", "32"], 2, "add engine.max_num_seqs=32"),
        (["workload.request_rate=2"], 2, "workload.request_rate=2"),
        (["--drafts", "0,2"], 2, "--drafts 0,2"),
        (
            [
                *("method.verification=synthetic", "method.synthetic_acceptance_length=3"),
                *("--drafts", "1,3"),
            ],
            2,
            "method.synthetic_acceptance_length=3",
        ),
        (["--acceptance", "1.2"], 2, "--acceptance 1.2"),
        (["--check", "--acceptance", "0.5"], 2, "leave --acceptance out"),
        (["--cfg", "job"], 2, "this is a prediction"),
        (["workload=jsonl", "workload.path=/nowhere.jsonl"], 3, "/nowhere.jsonl"),
    ],
)
def test_refusals_are_one_message(
    argv: list[str], status: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*ZOO, f"hydra.run.dir={tmp_path}", *argv]) == status
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
    assert not (tmp_path / "predict.json").exists()


def test_a_drafter_that_the_target_names_says_its_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """method=auto has no K until its drafter is read: catches a prediction of none."""
    found: list[list[int]] = []

    def told(config: RunConfig, wanted: Wanted, **_: object) -> None:
        found.append(list(wanted.drafts))
        raise ConfigurationError("seen")

    monkeypatch.setattr("hydraspec.analysis.predict.run.predict", told)
    argv = ["target=tiny_qwen3", "engine.device=cpu", "tracker=none", f"hydra.run.dir={tmp_path}"]
    assert main(argv) == 2
    assert found == [[1, 2, 3]]


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


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ((), [1, 4, 16]),
        (("engine.max_num_seqs=8",), [1, 4]),
        (("workload.concurrency=6",), [6]),
        (("workload.concurrency=null",), [16]),
    ],
)
def test_the_concurrency_is_the_runs_where_it_is_typed(
    typed: tuple[str, ...], found: list[int]
) -> None:
    (job,) = plan([*ZOO, *typed]).jobs
    assert concurrencies_of(job) == found
