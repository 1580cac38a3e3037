"""Benchmarks of fake engines, the processes of which are calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checked_pages import check_page

from hydraspec.bench import run as bench
from hydraspec.bench import study as bench_study
from hydraspec.cli.compose import plan
from hydraspec.config.schema import RunConfig
from hydraspec.report.study import page as study_page

SMALL = ("bench.batches=[1,2]", "bench.prompt_tokens=5", "bench.output_tokens=9")


def planned(*overrides: str) -> RunConfig:
    return plan(["bench=decode", *SMALL, *overrides]).jobs[0].config


def in_process(monkeypatch: pytest.MonkeyPatch, codes: dict[str, int | None]) -> list[Any]:
    """Run what a process is told in this one; `codes` end engine-method otherwise."""
    told: list[Any] = []

    def wait(command: list[str], log: Path, environment: dict[str, str], timeout_s: float) -> Any:
        name = log.parent.name
        told.append((name, environment, timeout_s))
        log.write_text("loading\n[INFO] x\nhydraspec: engine.name=vllm needs it\n  allowed: y\n")
        if name in codes:
            return codes[name]
        job = plan(command[3:])
        bench.run(job.jobs[0].config, run_dir=job.folder, overrides=command[3:])
        return 0  # an interrupt is raised: here the two processes are one

    monkeypatch.setattr(bench, "_wait", wait)
    return told


def run_bench(tmp_path: Path, *overrides: str) -> dict[str, Any]:
    typed = ["bench=decode", *SMALL, *overrides]
    job = plan(typed)
    result = bench.run(job.jobs[0].config, run_dir=tmp_path / "run", overrides=typed)
    assert json.loads((tmp_path / "run" / "bench.json").read_text()) == result
    return result


def reported(folder: Path) -> tuple[str, str, set[str]]:
    """The answer and the page of `hydraspec.report`, and the names of the lines in its charts."""
    results = bench_study.read(folder)
    made = bench_study.extended(None, results)
    drawn = [block.chart for section in made.sections for block in section.blocks if block.chart]
    page = check_page(study_page.render(made, folder))
    assert page.links
    return made.verdicts[0].sentence, page.text, {n for chart in drawn for n, _ in chart.legend}
