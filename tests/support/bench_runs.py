"""Benchmarks of fake engines, the processes of which are calls, and files made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checked_pages import check_page
from fake_engine import FakeEngine

from hydraspec.bench import run as bench
from hydraspec.bench import study as bench_study
from hydraspec.cli.compose import plan
from hydraspec.config.schema import RunConfig
from hydraspec.study import html
from hydraspec.types import Request

SMALL = ("bench.batches=[1,2]", "bench.prompt_tokens=5", "bench.output_tokens=9")
LENGTHS = ("prompt_tokens=5", "output_tokens=4", "max_prompt_tokens=9", "max_output_tokens=8")
BENCHES = {  # benchmarks of a few tokens
    "context": ("batches=[1,2]", "contexts=[8,16]", "output_tokens=8", "repeats=2"),
    "decode": SMALL,
    "load": ("num_requests=6", *LENGTHS, "repeats=2"),
    "serve": ("num_requests=4", *LENGTHS),
    "turns": (
        *("num_conversations=2", "num_turns=3", "turn_tokens=6", "output_tokens=4"),
        "repeats=2",
    ),
}
ALONE = ("bench.engines=[native]", "bench.methods=[gemma4_mtp]", "bench.isolate=false")


def small(bench: str) -> list[str]:
    """What is typed for a benchmark of a few tokens."""
    keys = [key if key.startswith("bench.") else f"bench.{key}" for key in BENCHES[bench]]
    return [f"bench={bench}", *keys]


def planned(*overrides: str, bench: str = "decode") -> RunConfig:
    """The configuration of a benchmark of a few tokens."""
    return plan([*small(bench), *overrides]).jobs[0].config


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


def offered_to_fakes(monkeypatch: pytest.MonkeyPatch) -> list[list[Request]]:
    """The requests that fake engines are given from here on, run after run."""
    found: list[list[Request]] = []
    run = FakeEngine.run

    def noted(self, requests, *, concurrency):  # type: ignore[no-untyped-def]
        found.append(list(requests))
        return run(self, requests, concurrency=concurrency)

    monkeypatch.setattr(FakeEngine, "run", noted)
    return found


def run_bench(tmp_path: Path, *overrides: str, bench_name: str = "decode") -> dict[str, Any]:
    """The content of bench.json in the folder `run`."""
    typed = [*small(bench_name), *overrides]
    job = plan(typed)
    result = bench.run(job.jobs[0].config, run_dir=tmp_path / "run", overrides=typed)
    assert json.loads((tmp_path / "run" / "bench.json").read_text()) == result
    return result


def reported(folder: Path) -> tuple[str, str, set[str]]:
    """The answer and the page of `hydraspec.report`, and the names of the lines in its charts."""
    results = bench_study.read(folder)
    made = bench_study.extended(None, results)
    drawn = [block.chart for section in made.sections for block in section.blocks if block.chart]
    page = check_page(html.study_page(made, folder))
    assert page.links
    return made.verdicts[0].sentence, page.text, {n for chart in drawn for n, _ in chart.legend}


# ---------------------------------------------------------------- made by hand


def part_of(*rows: dict[str, Any]) -> dict[str, Any]:
    """What native measured without drafts."""
    environment = {"versions": dict.fromkeys(("hydraspec", "torch", "triton"), "1"), "git": None}
    environment["versions"] |= {"transformers": None, "vllm": None}
    return {
        **{"engine": "native", "method": "none", "num_speculative_tokens": 0, "status": "ok"},
        **{"first_step_s": 1.0, "memory_bytes": {}, "peak_memory_bytes": {}, "cudagraph": {}},
        **{"environment": environment, "gpu_clocks": None, "rows": rows},
    }


def load_of(folder: Path, target: str) -> dict[str, Any]:
    """A benchmark's file, with a page beside it."""
    row = {"pass": 1, "seconds": 2.0, "tokens_per_second": 50.0, "num_steps": 9}
    result = {
        **{"bench": "load", "target": target, "dtype": "float32", "num_requests": 4},
        **{"max_num_seqs": 2, "prompt_tokens": 5, "output_tokens": 4, "repeats": 1},
        **{"ratios": {}, "parts": [part_of({**row, "acceptance_length": None})]},
    }
    folder.mkdir(parents=True)
    (folder / "bench.json").write_text(json.dumps(result), encoding="utf-8")
    (folder / "bench.html").write_text("", encoding="utf-8")
    return result
