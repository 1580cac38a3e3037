"""bench=load: the mixed load, the same for every engine, and its table."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import bench_runs
import numpy as np
import pytest
from bench_runs import in_process, reported, run_bench
from fake_engine import FakeEngine

from hydraspec.bench import load
from hydraspec.bench import measure as bench_measure
from hydraspec.cli.compose import plan
from hydraspec.config.schema import RunConfig
from hydraspec.types import Completion, StepRecord

planned = partial(bench_runs.planned, bench="load")


def lengths(config: RunConfig) -> tuple[list[int], list[int]]:
    requests = load.requests_of(config, FakeEngine())
    assert [request.index for request in requests] == list(range(config.bench.num_requests))
    assert all(request.sampling.ignore_eos for request in requests)
    prompts = [len(request.prompt_token_ids or []) for request in requests]
    return prompts, [request.sampling.max_tokens for request in requests]


def test_lengths_are_lognormal_and_cut() -> None:
    """The load as shipped: prompts of 340 and outputs of 110 tokens on average with seed 7."""
    prompts, outputs = map(np.array, lengths(plan(["bench=load", "seed=7"]).jobs[0].config))
    assert len(prompts) == 256
    assert (prompts.min(), prompts.max()) == (16, 2048)
    assert prompts.mean() == pytest.approx(340, rel=0.01)
    assert (outputs.max(), outputs.mean()) == (384, pytest.approx(110, rel=0.01))


def test_short_medians_bound_the_lengths() -> None:
    prompts, outputs = lengths(planned())
    assert (min(prompts), min(outputs)) == (5, 4)  # no shorter than the median here
    assert (max(prompts), max(outputs)) == (9, 8)


def test_lengths_can_be_equal() -> None:
    assert lengths(planned("bench.equal_lengths=true")) == ([5] * 6, [4] * 6)


def test_the_preset_of_long_prompts_offers_eight() -> None:
    config = plan(["experiment=long_prompts"]).jobs[0].config
    assert lengths(config) == ([32000] * 8, [128] * 8)
    assert (config.engine.max_num_seqs, config.engine.max_mixing_cost) == (8, 0.08)


def test_a_pass_tells_times_between_tokens_beside_its_parts(build: list[FakeEngine]) -> None:
    part = bench_measure.measure(planned())
    bound = part["bound"]
    assert part["rows"][-1]["inter_token"] == {"p50": None, "p90": None, "p99": None}
    part["rows"][-1]["inter_token"] = {"p50": 2.0, "p90": 3.0, "p99": 9.0}  # the fake has none
    said = load.Load().summary_line(part)
    assert f"{bound['ratio']:.2f} of reading and decoding alone" in said
    assert "p99 9.0 ms between tokens" in said
    cells = {c.heading: c.cell(part) for c in load.Load().columns({"repeats": 2})}
    assert (
        cells["prefill / decode alone, s"] == f"{bound['prefill_s']:.2f} / {bound['decode_s']:.2f}"
    )
    assert cells["last pass / alone"] == f"{bound['ratio']:.2f}"
    assert cells["ITL p50 / p99, ms"] == "2.00 / 9.00"


def test_a_load_of_an_older_version_is_still_shown() -> None:
    part = {"rows": [{"seconds": 1.0}], "bound": {"seconds": 0.5, "ratio": 2.0}}
    cells = {c.heading: c.cell(part) for c in load.Load().columns({"repeats": 1})[1:4]}
    assert list(cells.values()) == ["- / -", "2.00", "- / -"]


def test_a_pass_counts_what_the_engine_reports(build: list[FakeEngine]) -> None:
    part = bench_measure.measure(planned())
    outputs = lengths(planned())[1]
    assert [row["pass"] for row in part["rows"]] == [1, 2]
    for row in part["rows"]:
        assert row["num_output_tokens"] == sum(outputs)
        assert row["tokens_per_second"] == pytest.approx(sum(outputs) / row["seconds"])
        assert row["num_steps"] > 0
        assert 1 <= row["acceptance_length"] <= 4


def test_an_engine_that_reports_completions_only_has_no_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As vLLM, timed without records of its steps."""

    class Silent(FakeEngine):
        def run(self, requests, *, concurrency):  # type: ignore[no-untyped-def]
            for event in super().run(requests, concurrency=concurrency):
                assert isinstance(event, StepRecord | Completion)
                if isinstance(event, Completion):
                    yield event

    monkeypatch.setattr(bench_measure.factory, "build_engine", lambda config: Silent())
    (row, _) = bench_measure.measure(planned())["rows"]
    assert (row["num_steps"], row["acceptance_length"]) == (None, None)
    assert load.Load().summary_line({"rows": [row]}).endswith("tokens/s")
    assert row["tokens_per_second"] > 0


def test_the_bound_is_of_full_steps_and_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four slots of the fake: a decode step of all four takes 2 ms, one of fewer 100, the first
    steps 7."""

    class Slow(FakeEngine):
        def run(self, requests, *, concurrency):  # type: ignore[no-untyped-def]
            full = 0
            for event in super().run(requests, concurrency=concurrency):
                if isinstance(event, StepRecord):
                    is_full = len(event.requests) == 4 and not event.requests[0].is_prefill
                    full += is_full
                    event.total_ms = (7.0 if full <= 2 else 2.0) if is_full else 100.0
                yield event

    config = planned("engine.max_num_seqs=4", "bench.output_tokens=8")
    engine, last = Slow(method="none", num_speculative_tokens=0), {"num_steps": 9}
    last |= {"num_output_tokens": 100, "acceptance_length": 2.5, "seconds": 3.0}
    requests = load.requests_of(config, engine)
    found = load.bound_of(config, engine, requests, last)
    assert found is not None
    prompts = sum(len(request.prompt_token_ids or []) for request in requests)
    assert (found["full_step_ms"], found["prompt_tokens"]) == (2.0, prompts)
    prefill_s = prompts / found["prefill_tokens_per_second"]
    assert found["prefill_s"] == pytest.approx(prefill_s)
    assert found["decode_s"] == pytest.approx((100 - 6) / 4 / 2.5 * 2e-3)
    assert found["seconds"] == pytest.approx(found["decode_s"] + prefill_s)
    assert found["ratio"] == 3.0 / found["seconds"]
    assert load.bound_of(config, engine, requests, {**last, "num_steps": None}) is None


def test_engines_stand_side_by_side(
    build: list[FakeEngine],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = in_process(monkeypatch, {"vllm-none": 2})
    result = run_bench(tmp_path, "bench.engines=[native,vllm]", bench_name="load")
    names = ["native-none", "vllm-none", "native-gemma4_mtp", "vllm-gemma4_mtp"]
    assert [name for name, *_ in told] == names
    assert [part["status"] for part in result["parts"]] == ["ok", "refused", "ok", "ok"]
    ours, theirs = (part["rows"] for part in result["parts"][2:])
    assert set(result["ratios"]) == {"gemma4_mtp"}
    assert result["ratios"]["gemma4_mtp"]["seconds"] == [
        pytest.approx(a["seconds"] / b["seconds"]) for a, b in zip(ours, theirs, strict=True)
    ]
    printed = capsys.readouterr().out
    for text in (
        "6 requests through",
        "pass 2, s",
        "tokens/s",
        "native / vllm",
    ):
        assert text in printed
    said, page, lines = reported(tmp_path / "run")
    assert said.startswith("With gemma4_mtp, native and vllm: ")
    assert "vllm, none refused: " in page
    assert lines == {
        "without drafts on native",
        *(f"with gemma4_mtp on {each}" for each in ("native", "vllm")),
    }
    page = (tmp_path / "run" / "bench.html").read_text(encoding="utf-8")
    for text in ("Seconds for all requests", "prefill / decode alone, s", "last pass / alone"):
        assert text in page
    assert "native / vllm" in page
