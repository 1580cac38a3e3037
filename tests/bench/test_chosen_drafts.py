"""Benchmarks of engines that choose the number of drafts for each step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from bench_runs import ALONE, planned, run_bench
from fake_engine import FakeEngine

from hydraspec.bench import measure as bench_measure
from hydraspec.bench import study as bench_study
from hydraspec.types import Request, StepRecord


@pytest.mark.parametrize("bench", ["decode", "load"])
def test_an_engine_that_chooses_drafts_knows_their_costs_first(
    build: list[FakeEngine], monkeypatch: pytest.MonkeyPatch, bench: str
) -> None:
    told: list[tuple[int, int]] = []  # requests, and steps before

    def prepare(engine: FakeEngine, requests: Sequence[Request]) -> None:
        told.append((len(requests), engine.num_steps))

    monkeypatch.setattr(FakeEngine, "prepare", prepare)
    bench_measure.measure(planned("method.num_speculative_tokens=auto", bench=bench))
    assert [count for count, _ in told] == [{"decode": 2, "load": 6}[bench]]
    assert told[0][1] < build[0].num_steps


@pytest.mark.usefixtures("build")
def test_drafts_that_the_engine_chose_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = FakeEngine.run

    def chosen(engine: FakeEngine, *args: object, **named: object) -> Iterator[object]:
        for event in run(engine, *args, **named):  # type: ignore[arg-type]
            if isinstance(event, StepRecord):
                event = replace(event, draft_length=engine.info.num_speculative_tokens)
            yield event

    fixed = run_bench(tmp_path / "fixed", *ALONE)
    assert not fixed["parts"][0]["chooses_drafts"]
    assert fixed["parts"][0]["rows"][0]["num_speculative_tokens_used"] is None
    before = next(bench_study.cells_of(fixed))
    monkeypatch.setattr(FakeEngine, "run", chosen)
    result = run_bench(tmp_path, *ALONE, "method.num_speculative_tokens=auto")
    part, at = result["parts"][0], bench_study.header_of(result).index("drafts chosen")
    assert bench_study.header_of(fixed) == bench_study.header_of(result), "one table holds both"
    assert part["chooses_drafts"]
    used = part["rows"][1]["num_speculative_tokens_used"]
    assert used["mean"] > 0
    cells = next(bench_study.cells_of(result))
    assert [before[0], cells[0]] == ["gemma4_mtp K=3", "gemma4_mtp K=auto (0 to 6)"]
    assert before[at] == ""
    assert cells[at].endswith(f" / {used['mean']:.1f}")
    load = bench_measure.measure(planned("method.num_speculative_tokens=auto", bench="load"))
    assert load["rows"][0]["num_speculative_tokens_used"]["mean"] > 0
    plain = bench_measure.measure(planned("method=none", "method.num_speculative_tokens=auto"))
    assert not plain["chooses_drafts"]
