"""Sweeps of benchmarks: side by side at their end, the report, and resuming."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from bench_runs import load_of
from checked_pages import check_page

from hydraspec.bench import run as bench
from hydraspec.bench import study as bench_study
from hydraspec.cli import main as command_line
from hydraspec.cli import report
from hydraspec.config.schema import RunConfig, TrackerConfig, TrackerMode
from hydraspec.lab import tracking
from hydraspec.report import main
from hydraspec.study import wandb_report

REAL = [
    *("-m", "experiment=bench_gemma4", "target=tiny_gemma4", "target.max_model_len=64"),
    *("engine.device=cpu", "bench.engines=[native]", "bench.methods=[gemma4_mtp]"),
    *("bench.isolate=false", "bench.batches=[1]", "bench.prompt_tokens=4"),
    *("bench.output_tokens=4", "bench.repeats=1", "method.synthetic_acceptance_length=1.5"),
    *("method.num_speculative_tokens=1,3", "tracker.report=true"),
]


def sweep_of(folder: Path, *names: str) -> Path:
    """A sweep of benchmarks that differ in K: 1, 2, …"""
    for number, name in enumerate(names, start=1):
        load_of(folder / name, "tiny")
        typed = f"- method.num_speculative_tokens={number}\n- bench=load\n"
        (folder / name / "overrides.yaml").write_text(typed, encoding="utf-8")
    return folder


def edit(job: Path, **changes: Any) -> None:
    file = job / "bench.json"
    result = json.loads(file.read_text(encoding="utf-8")) | changes
    file.write_text(json.dumps(result), encoding="utf-8")


def asking(config: RunConfig) -> RunConfig:
    config.tracker = TrackerConfig(name="none", mode=TrackerMode.disabled, report=True)
    return config


def test_a_real_sweep_ends_with_its_report_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Again, only the job whose result is gone is measured, and the page is made of all."""
    folder = tmp_path / "sweep"
    monkeypatch.setattr(sys, "argv", ["hydraspec", *REAL, f"hydra.sweep.dir={folder}"])
    assert command_line.main() == 0
    printed = capsys.readouterr().out
    _, _, end = printed.rpartition("Milliseconds per output token")
    assert [line.split()[:3] for line in end.splitlines() if line.startswith(" K=")] == [
        ["K=1", "gemma4_mtp", "K=1"],
        ["K=3", "gemma4_mtp", "K=3"],
    ]
    assert "What is the time per output token with tiny_gemma4?" in end
    assert f"Report: {folder / 'study.html'}" in end
    page = check_page((folder / "study.html").read_text(encoding="utf-8"))
    assert page.links == ["0/bench.html", "1/bench.html"] * 2, "side by side, and each alone"
    assert not list(folder.glob("compare.*"))

    measured: list[int] = []
    measure = bench.measure

    def counted(config: RunConfig) -> Any:
        measured.append(config.method.num_speculative_tokens)
        return measure(config)

    monkeypatch.setattr(bench, "measure", counted)
    (folder / "study.html").unlink()
    (folder / "1" / "bench.json").unlink()
    assert command_line.main() == 0
    assert measured == [3]
    again = check_page((folder / "study.html").read_text(encoding="utf-8"))
    assert again.links == page.links


def test_jobs_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By what was typed, else by their folders; a job that took over a result is shown once, and
    one without a result is named."""
    folder = sweep_of(tmp_path / "sweep", "0", "1", "2")
    edit(folder / "2", reused_from="1")
    (folder / "3").mkdir()
    assert main([str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "K=1: tiny, float32: " in printed
    assert "K=2: tiny, float32: " in printed
    assert "Left out: 3: no result." in printed
    page = check_page((folder / "study.html").read_text(encoding="utf-8"))
    assert page.links == ["0/bench.html", "1/bench.html"] * 2
    (folder / "1" / "overrides.yaml").unlink()
    report.compare(folder)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if "native" in line] == ["0", "1"]


def test_tables_with_other_columns_do_not_stand_side_by_side(tmp_path: Path) -> None:
    folder = sweep_of(tmp_path / "sweep", "0", "1")
    assert len(bench_study.side_by_side(bench_study.read(folder))) == 1
    shutil.copytree(folder / "0", tmp_path / "single" / "0")
    assert bench_study.side_by_side(bench_study.read(tmp_path / "single")) == []
    edit(folder / "1", repeats=2)
    assert bench_study.side_by_side(bench_study.read(folder)) == []


def test_jobs_may_have_any_name_but_parts_are_no_jobs(tmp_path: Path) -> None:
    """hydra.sweep.subdir names jobs; a benchmark that was cut off holds a part and no result."""
    folder = sweep_of(tmp_path / "sweep", "seed1", "seed2")
    assert [job.name for job, _ in bench_study.read(folder)] == ["seed1", "seed2"]
    (folder / "config.yaml").write_text("seed: 1\n", encoding="utf-8")
    assert bench_study.read(folder) == []


def test_runs_and_benchmarks_of_one_sweep(
    studied: Path,
    config: RunConfig,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`-m bench=none,load`: one report over both; W&B gets the runs."""
    recorded: list[Any] = []
    monkeypatch.setattr(
        tracking, "record_sweep", lambda config, made, runs, *_, **__: recorded.append(runs)
    )
    of_benchmark = asking(config)
    load_of(studied / "3", "tiny_fake")
    report.compare(studied)
    assert "Without a result" not in capsys.readouterr().out
    report.close_sweep([of_benchmark], studied, group="g")
    page = check_page((studied / "study.html").read_text(encoding="utf-8"))
    assert {"1/report.html", "3/bench.html"} <= set(page.links)
    assert "3: no result" not in page.text
    assert recorded == []
    config.tracker = TrackerConfig(name="wandb")
    report.close_sweep([config], studied, group="g")
    assert [len(runs.jobs) for runs in recorded] == [3]


def test_a_report_that_fails_is_a_warning(
    tmp_path: Path, config: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    folder = sweep_of(tmp_path / "sweep", "0", "1")
    (folder / "study.html").mkdir()
    report.close_sweep([asking(config)], folder, group="g")
    assert "no report: " in caplog.text
    caplog.clear()
    edit(folder / "1", parts=3)
    report.compare(folder)
    report.close_sweep([asking(config)], folder, group="g")
    damaged = f"{folder / '1' / 'bench.json'}: damaged, or of an older hydraspec"
    assert caplog.messages == [f"not side by side: {damaged}", f"no report: {damaged}"]


def test_benchmarks_are_not_in_w_and_b(
    tmp_path: Path,
    config: RunConfig,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Online too: a page, no summary run and nothing published, hence no warning."""
    folder = sweep_of(tmp_path / "sweep", "0", "1")
    for refused in ("record_sweep", "WandbSink"):
        monkeypatch.setattr(tracking, refused, None)
    monkeypatch.setattr(wandb_report, "publish", None)
    config.bench.name = "load"
    config.tracker = TrackerConfig(name="wandb", report=True, mode=TrackerMode.online)
    report.close_sweep([config, config], folder, group="g")
    assert (folder / "study.html").is_file()
    assert caplog.messages == []
    (folder / "study.html").unlink()
    config.tracker.report = False
    report.close_sweep([config, config], folder, group="g")
    assert not (folder / "study.html").exists()
