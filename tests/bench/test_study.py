"""`python -m hydraspec.report` over benchmarks: what is said of rates, sweeps and damaged files.
Pages of whole benchmarks are in their own tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench_runs import load_of, part_of
from checked_pages import check_page

from hydraspec.bench.choices import BENCHMARKS
from hydraspec.cli import jobs
from hydraspec.cli.compose import plan
from hydraspec.cli.jobs import run_job
from hydraspec.report import main


def test_rates_that_keep_the_limits() -> None:
    """Nine of ten requests in limits is kept; all at once is no rate."""

    def row(rate: float | None, share: float) -> dict[str, Any]:
        found = {"ttft_ms": 5.0, "inter_token_ms": None, "share": share}
        return {"request_rate": rate, "goodput": found}

    said, rows = BENCHMARKS["serve"].summary_line, [row(None, 1.0), row(2.5, 0.9), row(5.0, 0.89)]
    assert said(part_of(*rows)) == "90% of requests or more in limits up to 2.5 requests/s"
    assert said(part_of(rows[0], rows[2])) == "at no rate 90% of requests in limits"
    assert said(part_of({"request_rate": 2.5, "goodput": None})) == "no limits were set"


def test_a_sweep_of_benchmarks_and_damaged_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = [load_of(tmp_path / "sweep" / str(job), f"tiny{job}") for job in range(2)][1]
    assert main([str(tmp_path / "sweep")]) == 0
    printed = capsys.readouterr().out
    assert "How long does a mixed load take with tiny0 and tiny1?" in printed
    assert "Without drafts on native: all requests in 2.00 s, 50 tokens/s." in printed
    page = (tmp_path / "sweep" / "study.html").read_text(encoding="utf-8")
    assert set(check_page(page).links) == {"0/bench.html", "1/bench.html"}
    file = tmp_path / "sweep" / "1" / "bench.json"
    wrong = ({**whole, key: value} for key, value in (("parts", 3), ("target", 3), ("bench", "a")))
    for damaged in (*wrong, [], whole["parts"][0]):
        file.write_text(json.dumps(damaged), encoding="utf-8")
        assert main([str(tmp_path / "sweep")]) == 2
        said = capsys.readouterr().err.splitlines()
        assert said[0].endswith("1/bench.json: damaged, or of an older hydraspec")
        assert [line.split(":")[0] for line in said[1:]] == ["  allowed", "  to do"]


def test_runs_and_benchmarks_in_one_report(
    studied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load_of(tmp_path / "load", "tiny_fake")
    folders = [str(studied), str(tmp_path / "load")]
    assert main([*folders, "--write", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "Which drafter for tiny_fake on workload jsonl?" in printed
    assert "all requests in 2.00 s" in printed
    page = check_page((tmp_path / "out" / "study.html").read_text(encoding="utf-8"))
    assert "../load/bench.html" in page.links
    assert "; 1 benchmark" in page.text


def test_a_benchmark_given_with_its_sweep_counts_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for job in range(2):
        load_of(tmp_path / "sweep" / str(job), f"tiny{job}")
    given = [str(tmp_path / "sweep" / "1"), str(tmp_path / "sweep")]
    assert main([*given, "--write", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.count("all requests in 2.00 s") == 2
    page = (tmp_path / "out" / "study.html").read_text(encoding="utf-8")
    assert "2 benchmarks" in check_page(page).text


def test_a_benchmark_ends_with_its_report(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """tracker.report=true, as of a run; one that cannot be written is a warning."""
    planned = plan(["bench=load", "tracker.report=true", f"hydra.run.dir={tmp_path / 'load'}"])
    monkeypatch.setattr(jobs, "resolve", lambda config: None)
    monkeypatch.setattr(
        jobs, "runner", lambda config: lambda *_, run_dir, **__: load_of(run_dir, "tiny")
    )
    run_job(planned.jobs[0])
    assert "How long does a mixed load take with tiny?" in capsys.readouterr().out
    page = tmp_path / "load" / "study.html"
    assert page.is_file()
    page.unlink()
    page.mkdir()
    monkeypatch.setattr(jobs, "runner", lambda config: lambda *_, **__: {})
    run_job(planned.jobs[0])
    assert "no report: " in caplog.text
