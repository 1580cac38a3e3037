"""bench=turns: the same conversations for every engine, hit rates, and cold prompts beside."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import bench_runs
import pytest
from bench_runs import in_process, offered_to_fakes, reported, run_bench, small
from fake_engine import FakeEngine

import hydraspec
from hydraspec.bench import measure as bench_measure
from hydraspec.bench import study as bench_study
from hydraspec.bench import turns
from hydraspec.cli.compose import plan

planned = partial(bench_runs.planned, bench="turns")


def test_turns_follow_each_other() -> None:
    ours = turns.requests_of(planned(), FakeEngine())
    assert [(r.turn, r.after) for r in ours] == [
        (1, None),
        (2, 0),
        (3, 1),
        (1, None),
        (2, 3),
        (3, 4),
    ]
    assert {len(r.prompt_token_ids or []) for r in ours} == {6}
    assert {r.sampling.max_tokens for r in ours} == {4}


def test_prefixes_are_cached_in_every_engine_alike() -> None:
    assert planned().engine.prefix_caching
    assert planned("engine=vllm", "method=none").engine.prefix_caching
    assert not planned("engine=vllm", "engine.prefix_caching=false").engine.prefix_caching


def test_the_preset_has_room_for_its_conversations() -> None:
    config = plan(["experiment=turns", "target=gemma4_31b"]).jobs[0].config
    assert (config.bench.name, config.target.max_model_len) == ("turns", 9216)
    assert config.engine.prefix_caching
    assert config.method.synthetic_acceptance_length == 2.5


def test_cold_prompts_are_as_long_as_those_of_their_turns(
    build: list[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    offered = offered_to_fakes(monkeypatch)
    part = bench_measure.measure(planned("bench.cold_turns=[1,3]"))
    first, *passes = offered[:3]
    assert [len(r.prompt_token_ids or []) for r in first] == [6]
    assert passes == [turns.requests_of(planned(), FakeEngine())] * 2
    cold = [[len(r.prompt_token_ids or []) for r in requests] for requests in offered[3:5]]
    assert cold == [[6, 6], [26, 26]]  # 3 x 6 + 2 x 4
    assert offered[3][0].prompt_token_ids != offered[3][1].prompt_token_ids
    assert [each["turn"] for each in part["cold"]] == [1, 3]
    assert part["cold"][1]["prompt_tokens"] == 26
    assert part["cold"][1]["ttft"]["mean"] == 5.0


def test_engines_stand_side_by_side(
    build: list[FakeEngine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    in_process(monkeypatch, {})
    typed = ["bench.methods=[none]", "bench.cold_turns=[3]"]
    result = run_bench(tmp_path, *typed, bench_name="turns")
    ratios = result["ratios"]["none"]
    assert (ratios["turns"], ratios["cold"]) == ({"1": 1.0, "2": 1.0, "3": 1.0}, {"3": 1.0})
    lines = list(bench_study.cells_of(result))
    assert [line[:6] for line in lines] == [
        *(["none", engine, "turns", "5", "5", "5"] for engine in ("native", "vllm")),
        ["", "native / vllm", "", "1.000", "1.000", "1.000"],
        *(["none", engine, "cold", "-", "-", "5"] for engine in ("native", "vllm")),
        ["", "native / vllm", "", "-", "-", "1.000"],
    ]
    assert {len(line) for line in lines} == {len(bench_study.header_of(result))}
    del result["parts"][1]["cold"]  # as an interrupt leaves it
    assert [line[:2] for line in list(bench_study.cells_of(result))[3:]] == [["none", "native"]]
    assert "2 conversations of 3 turns, each of 6 new" in bench_study.title_of(result)
    assert "Time to first token by turn" in (tmp_path / "run" / "bench.html").read_text()
    said, page, lines = reported(tmp_path / "run")
    assert said.endswith("first token of turn 3 after 5 ms and 5 ms.")
    assert "first token of turn 3 after 5 ms, 5 ms cold; prefix hits" in page
    assert lines == {"without drafts on native", "without drafts on vllm"}


@pytest.mark.slow
def test_later_turns_of_the_shipped_model_come_from_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing faked. What a turn finds: the turn before it, but for the last token, in blocks."""
    monkeypatch.chdir(tmp_path)
    typed = [
        *small("turns"),
        "bench.engines=[native]",
        "bench.methods=[gemma4_mtp]",
        "bench.isolate=false",
    ]
    typed += ["bench.turn_tokens=32", "bench.num_turns=2", "bench.cold_turns=[2]"]
    (part,) = hydraspec.run([*typed, "hydra.run.dir=run"])["parts"]
    first, second = part["rows"][-1]["turns"]
    assert (first["prompt_tokens"], first["hit_rate"]) == (32, 0)
    assert (second["prompt_tokens"], second["hit_rate"]) == (68, 32 / 68)
    assert part["rows"][-1]["hit_rate"] == 32 / 100
    assert part["rows"][-1]["eligible_hit_rate"] == 1.0
    assert [row["pass"] for row in part["rows"]] == [1, 2]
    (cold,) = part["cold"]
    assert (cold["prompt_tokens"], cold["hit_rate"]) == (68, 0)
    assert cold["ttft"]["mean"] > 0
