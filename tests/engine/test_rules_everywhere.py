"""Rules and log probabilities in graphs, a step ahead, on ranks and stages, after preemption."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from graph_runs import (
    attention_as_on_devices,
    graph_config,
    make_graph_engine,
    no_waiting,
    zoo_requests,
)
from grids import slow_unless
from recorded_graphs import RecordedOps
from thread_ranks import as_ranks

from hydraspec.config.schema import Device, Dtype, RunConfig
from hydraspec.engine.native import NativeEngine
from hydraspec.parallel.layout import Layout
from hydraspec.types import Completion, Request, StepRecord

RULES: tuple[dict[str, Any], ...] = (
    {},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"logit_bias": ((36, 2.0), (400, -3.0)), "bad_words": ((226,), (13, 14)), "min_tokens": 12},
    {"temperature": 0.9, "top_k": 20, "min_p": 0.02, "repetition_penalty": 1.3},
    {"temperature": 1.2, "top_p": 0.9, "frequency_penalty": -0.3, "logprobs": 3},
    {"logprobs": 2, "presence_penalty": 0.4},
    {"min_tokens": 8, "stop_token_ids": (13, 36), "ignore_eos": True},
)
MODES = ("full_and_piecewise", "full", "full_decode_only", "piecewise")
Found = dict[int, tuple[list[int], list[float]]]


@pytest.fixture(autouse=True)
def _static_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    attention_as_on_devices(monkeypatch)


def requests(*, greedy: bool = False, logprobs: bool = True) -> list[Request]:
    found = []
    for index in range(14):
        rules = dict(RULES[index % len(RULES)])
        if greedy:
            rules.pop("temperature", None)
        if not logprobs:
            rules.pop("logprobs", None)
        found.append(zoo_requests(index + 1, longest=24, **rules)[-1])
    return found


def outputs(engine: NativeEngine, asked: list[Request]) -> tuple[Found, int]:
    """Tokens and log probabilities by request, and how often requests were preempted."""
    engine.tokenize(asked)
    found, num_preempted = {}, 0
    for event in engine.run(asked, concurrency=None):
        if isinstance(event, StepRecord):
            num_preempted += event.num_preempted
            continue
        assert isinstance(event, Completion)
        assert event.error is None
        numbers = [round(each.logprob, 9) for each in event.logprobs or []]
        found[event.index] = event.output_token_ids, numbers
    return found, num_preempted


@cache
def plain(method: str) -> Found:
    """Eager steps, each scheduled once the results before it are in."""
    return outputs(NativeEngine(graph_config(method, "none")), requests())[0]


@pytest.mark.parametrize(
    ("method", "mode", "ahead"),
    slow_unless(
        lambda *case: case in (("eagle3", MODES[0], True), ("eagle3", MODES[2], False)),
        [
            (method, mode, ahead)
            for method in ("eagle3", "gemma4_mtp", "none")
            for mode in ("none", *MODES)
            for ahead in (False, True)
        ],
    ),
)
def test_graphs_and_steps_ahead_change_nothing(method: str, mode: str, ahead: bool) -> None:
    """Fails if a graph keeps the rules of its capture, or a variant without them serves a step."""
    config = graph_config(method, mode, sizes=(5,))
    config.engine.async_scheduling = ahead
    engine = make_graph_engine(config, None if mode == "none" else RecordedOps())
    asked = requests()
    engine.tokenize(asked)
    engine.prepare(asked)
    before = engine.num_built()
    found, _ = outputs(engine, asked)
    assert found == plain(method)
    assert engine.num_built() == before
    if engine.parts.runner.graphs is not None:
        variants = {each.variant for each in engine.parts.runner.graphs.manager.descriptors}
        assert any(greedy and flags.any_penalties for greedy, flags in variants)  # type: ignore[misc]


@pytest.mark.parametrize("layout", [Layout(tensor=2), Layout(pipeline=2)], ids=["tp2", "pp2"])
def test_ranks_give_what_one_process_gives(layout: Layout) -> None:
    config, has_logprobs = graph_config("eagle3", "none"), layout.pipeline == 1
    asked = requests(logprobs=has_logprobs)
    wanted = plain("eagle3")
    for found, _ in as_ranks(layout, lambda ranks: outputs(NativeEngine(config), asked)):
        assert {index: tokens for index, (tokens, _) in found.items()} == {
            index: tokens for index, (tokens, _) in wanted.items()
        }
        for index, (_, numbers) in found.items():
            expected = wanted[index][1] if has_logprobs else []
            assert numbers == pytest.approx(expected, abs=1e-6)


def small_cache(config: RunConfig) -> RunConfig:
    config.engine.kv_cache.memory_gib = 0.0035
    config.engine.prefix_caching = False
    return config


def test_preempted_requests_count_what_they_said_before() -> None:
    """Greedy: a resumed request's prompt, for penalties and min_tokens, is still its own."""
    each_rule = requests(greedy=True)[: len(RULES)]
    wanted, _ = outputs(NativeEngine(graph_config("eagle3", "none")), each_rule)
    engine = NativeEngine(small_cache(graph_config("eagle3", "none")))
    found, num_preempted = outputs(engine, each_rule)
    assert num_preempted > 0
    assert found == wanted


@pytest.mark.gpu
@pytest.mark.timeout(240)
@pytest.mark.parametrize("mode", MODES)
def test_graphs_of_a_device_follow_the_rules_of_their_steps(mode: str) -> None:
    """Greedy requests in float32: the CPU's tokens, and log probabilities within rounding; nothing
    waits for the device."""
    wanted, _ = outputs(NativeEngine(graph_config("eagle3", "none")), requests(greedy=True))
    config = graph_config("eagle3", mode, device=Device.cuda, dtype=Dtype.float32)
    engine = make_graph_engine(config, None)
    asked = requests(greedy=True)
    engine.tokenize(asked)
    engine.prepare(asked)
    outputs(engine, asked)
    with no_waiting():
        found, _ = outputs(engine, requests(greedy=True))
    for index, (tokens, numbers) in wanted.items():
        assert found[index][0] == tokens
        assert found[index][1] == pytest.approx(numbers, abs=1e-3)
