"""bench=serve and bench=turns over engine=vllm, with a fake of vLLM's interface."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fake_vllm import FakeRequest

from hydraspec.adapters.vllm.engine import VllmEngine
from hydraspec.bench.serve import Serve
from hydraspec.bench.turns import Turns
from hydraspec.cli.compose import plan
from hydraspec.config.schema import RunConfig


def planned(*overrides: str) -> RunConfig:
    return plan(["engine=vllm", *overrides]).jobs[0].config


def test_arrivals_at_a_rate_have_all_their_waits(start: Callable[..., VllmEngine]) -> None:
    config = planned(
        *("bench=serve", "bench.num_requests=5", "bench.prompt_tokens=8", "bench.output_tokens=6"),
        *("bench.max_prompt_tokens=16", "bench.max_output_tokens=12", "bench.goodput.ttft_ms=5000"),
        *("bench.rates=[1]", "bench.peak_rate=20"),
    )
    at_once, row = Serve().rows(config, start())
    assert row["seconds"] > 5 / 20  # the last of 5 arrives then, and decodes
    assert at_once["seconds"] < row["seconds"]
    for name in ("ttft", "queue", "inter_token"):
        assert 0 <= row[name]["p50"] <= row[name]["p90"] <= row[name]["p99"]
        assert row[name]["mean"] is not None
    assert row["time_per_output_token_ms"] > 0
    assert row["goodput"]["share"] == 1.0
    assert row["num_output_tokens"] == at_once["num_output_tokens"]
    assert 1 < row["acceptance_length"] <= 4


def test_turns_have_the_hit_rate_that_vllm_reports(
    start: Callable[..., VllmEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeRequest, "num_cached", 4)
    config = planned(
        *("bench=turns", "bench.num_conversations=2", "bench.num_turns=2", "bench.repeats=1"),
        *("bench.turn_tokens=8", "bench.output_tokens=4", "bench.cold_turns=[2]"),
    )
    engine = start("none")
    (row,) = Turns().rows(config, engine)
    assert [each["prompt_tokens"] for each in row["turns"]] == [8, 20]
    assert [each["hit_rate"] for each in row["turns"]] == [4 / 8, 4 / 20]
    assert row["hit_rate"] == 16 / 56
    assert row["num_output_tokens"] == 16
    assert all(each["ttft"]["p99"] > 0 for each in row["turns"])
    (cold,) = Turns().figures(config, engine, [row])["cold"]
    assert (cold["turn"], cold["prompt_tokens"]) == (2, 20)
    assert engine.parts.engine.num_resets == 2  # a pass and the cold prompts, each empty at first
