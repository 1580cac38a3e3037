"""Fixtures for runs without a model: a workload, a configuration, and fake engines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_engine import Behaviour, FakeEngine

from hydraspec.bench import measure as bench_measure
from hydraspec.config.schema import (
    CudagraphConfig,
    EngineConfig,
    MethodConfig,
    ParallelismConfig,
    RunConfig,
    SamplingConfig,
    TargetConfig,
    TrackerConfig,
    WorkloadConfig,
)
from hydraspec.lab import run as run_module


def write_lines(path: Path, lines: list[Any]) -> Path:
    """A workload file; entries that are strings are written as they are."""
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(text) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def workload_file(tmp_path: Path) -> Path:
    """Six requests in two categories; the fake engine answers with the number of tokens."""
    lines = [
        {
            "id": f"task-{i}",
            "prompt": "2 + 3 = <b>?</b>" + "x" * i,
            "category": "math" if i % 2 else "code",
            "answer": "9" if i < 4 else "12",
            "max_tokens": 9,
        }
        for i in range(6)
    ]
    return write_lines(tmp_path / "workload.jsonl", lines)


@pytest.fixture
def config(workload_file: Path) -> RunConfig:
    return RunConfig(
        target=TargetConfig(name="tiny_fake", checkpoint="zoo:tiny_fake"),
        method=MethodConfig(name="gemma4_mtp", num_speculative_tokens=3),
        engine=EngineConfig(name="native"),
        parallelism=ParallelismConfig(name="single"),
        cudagraph=CudagraphConfig(name="full_and_piecewise"),
        sampling=SamplingConfig(name="greedy"),
        workload=WorkloadConfig(name="jsonl", path=str(workload_file), concurrency=2),
        tracker=TrackerConfig(name="none"),
    )


@pytest.fixture
def use_engine(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeEngine], FakeEngine]:
    """Make the factory hand out a given engine."""

    def use(engine: FakeEngine) -> FakeEngine:
        monkeypatch.setattr(run_module.factory, "build_engine", lambda config: engine)
        return engine

    return use


@pytest.fixture
def run_config(config: RunConfig, tmp_path: Path) -> Callable[[], dict[str, Any]]:
    """Run `config` in `tmp_path`/run."""

    def run() -> dict[str, Any]:
        return run_module.run(config, run_dir=tmp_path / "run", overrides=["method=gemma4_mtp"])

    return run


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> list[FakeEngine]:
    """Make the factory hand out fake engines named as asked for; they are collected."""
    built: list[FakeEngine] = []

    def build_engine(config: RunConfig) -> FakeEngine:
        built.append(
            FakeEngine(
                Behaviour(),
                is_baseline=config.method.name == "none",
                engine=config.engine.name,
                method=config.method.name,
                num_speculative_tokens=config.method.most_drafts,
            )
        )
        return built[-1]

    monkeypatch.setattr(bench_measure.factory, "build_engine", build_engine)
    return built
