"""Prefix hits over several ranks: every rank finds the same ones, and they change nothing."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from fuzz_prefixes import draw_families
from fuzz_stages import ZOO_PAIRS, Pair, stage
from many_ranks import outputs as outputs_of
from many_ranks import over_ranks
from side_by_side import assert_same_run, run_alone
from staged import assert_same_everywhere, config_of, run_over
from step_ahead import Watch

from hydraspec.config.schema import Dtype, RunConfig
from hydraspec.engine.base import Engine
from hydraspec.engine.native import NativeEngine
from hydraspec.parallel.layout import Layout
from hydraspec.types import Completion, Request

TP2, PP2, DP2 = Layout(tensor=2), Layout(pipeline=2), Layout(data=2)
LAYOUTS = {"tp2": TP2, "pp2": PP2, "tp2_pp2": Layout(tensor=2, pipeline=2)}
GEMMA_WITH_EAGLE3 = Pair("tiny_gemma4", "eagle3", "zoo:tiny_gemma4-eagle3")
DEEPSEEK = Pair("tiny_deepseek", "mtp")


def name(pair: Pair) -> str:
    return f"{pair.stage}-{pair.method}"


def families(pair: Pair, seed: int) -> list[Request]:
    """Requests that share prefixes, with at least ten tokens of output each."""
    found = draw_families(stage(pair.stage, Dtype.float64), np.random.default_rng(seed), 8)
    for request in found:
        request.sampling.max_tokens = max(10, request.sampling.max_tokens)
    return found


def cold(config: RunConfig, requests: list[Request]) -> Watch:
    """One request at a time in one process, without a prefix cache."""
    config = copy.deepcopy(config)
    config.engine.prefix_caching = config.engine.async_scheduling = False
    return run_alone(NativeEngine(config), requests, 1)


def cached(seen: Watch) -> dict[int, int]:
    """Prompt tokens that each request took from the cache."""
    return {index: done.num_cached_tokens for index, done in seen.completions.items()}


def compare(layout: Layout, pair: Pair, seed: int, *, ahead: bool) -> None:
    config, requests = config_of(pair), families(pair, seed)
    config.target.max_model_len = 256
    config.engine.async_scheduling, config.parallelism.check = ahead, True
    found = assert_same_everywhere(run_over(layout, config, requests, 3))
    assert_same_run(found, cold(config, requests))
    assert sum(map(bool, cached(found).values())) >= 2
    if layout.pipeline == 1:  # stages are given requests in other steps
        alone = run_alone(NativeEngine(copy.deepcopy(config)), requests, 3)
        assert cached(found) == cached(alone)


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_two_ranks_with_hits(layout: str) -> None:
    compare(LAYOUTS[layout], DEEPSEEK, 0, ahead=layout == "tp2")


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("pair", ZOO_PAIRS, ids=name)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_pair_on_ranks_with_hits(layout: str, pair: Pair, ahead: bool) -> None:
    for seed in range(1, 4):
        compare(LAYOUTS[layout], pair, seed, ahead=ahead)


@pytest.mark.slow
@pytest.mark.parametrize("pair", [GEMMA_WITH_EAGLE3, DEEPSEEK], ids=name)
def test_two_replicas_with_hits(pair: Pair) -> None:
    """Each has a cache; what a request took reaches the rank that counts."""
    config, requests = config_of(pair), families(pair, 5)
    config.target.max_model_len = 256

    def lab(engine: Engine) -> tuple[object, int]:
        events = list(engine.run(copy.deepcopy(requests), concurrency=4))
        done = [event for event in events if isinstance(event, Completion)]
        again = outputs_of(engine, copy.deepcopy(requests), 2)
        return again, sum(completion.num_cached_tokens for completion in done)

    again, hit_tokens = over_ranks(DP2, config, lab)
    assert hit_tokens > 0
    config.engine.prefix_caching = False
    assert again == outputs_of(NativeEngine(config), requests, 1)
