"""Whole engines on tensor-parallel ranks choose the tokens of one process, without a drafter; with
one, and for the quick runs, see test_tensor_parallel.py."""

from __future__ import annotations

import copy

import pytest
from fuzz_stages import QUANTISED_PAIRS, RAGGED
from graph_runs import graph_config, zoo_requests
from scenarios import assert_near_tie
from thread_ranks import as_ranks

from hydraspec.config.schema import Dtype, RunConfig
from hydraspec.engine.native import NativeEngine
from hydraspec.parallel.layout import Layout
from hydraspec.types import Completion, ConfigurationError, Request, StepRecord

TARGETS = (
    "tiny_gemma4",
    "tiny_gemma4_e",
    "tiny_gemma4_moe",
    "tiny_gemma4_unified",
    "tiny_gemma4_images",
    "tiny_mistral",
    "tiny_ministral3",
    "tiny_qwen3",
    "tiny_deepseek",
)
QUANTISED = sorted({pair.stage for pair in (*QUANTISED_PAIRS, RAGGED)})
CUT_BY_TWO = {RAGGED.stage}  # inside a group
CUT_BY_FOUR = CUT_BY_TWO | {"tiny_gemma4_w4a16", "tiny_qwen3_fp8", "tiny_deepseek_fp8"}


def completions(engine: NativeEngine, requests: list[Request]) -> tuple[list[Completion], int]:
    """In the requests' order, and how many steps there were."""
    requests = copy.deepcopy(requests)
    engine.tokenize(requests)
    found, num_steps = {}, 0
    for event in engine.run(requests, concurrency=4):
        if isinstance(event, Completion):
            assert event.error is None, event
            found[event.index] = event
        num_steps += isinstance(event, StepRecord)
    return [found[request.index] for request in requests], num_steps


def run_of(config: RunConfig, requests: list[Request]) -> tuple[list[Completion], int]:
    return completions(NativeEngine(config), requests)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("dtype", "sampled"),
    # Draws near a border have no margin rule, so none in float32.
    [(Dtype.float64, False), (Dtype.float64, True), (Dtype.float32, False)],
    ids=["float64-greedy", "float64-sampled", "float32-greedy"],
)
@pytest.mark.parametrize("target", TARGETS)
def test_ranks_choose_the_tokens_of_one(
    target: str, dtype: Dtype, size: int, sampled: bool
) -> None:
    """float64: the same tokens. float32: by the margin rule. Ranks among themselves: always."""
    compare(target, dtype, size, sampled)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("target", QUANTISED)
def test_ranks_of_a_quantised_target_choose_the_tokens_of_one(target: str, size: int) -> None:
    """float64 alone: noise of float32 moves logits by more than the margin rule allows."""
    if target in (CUT_BY_FOUR if size == 4 else CUT_BY_TWO):
        problem = rf"parallelism\.tensor={size} cuts the .* inside a"
        with pytest.raises(ConfigurationError, match=problem):
            compare(target, Dtype.float64, size)
    else:
        compare(target, Dtype.float64, size)


def compare(target: str, dtype: Dtype, size: int, sampled: bool = False) -> None:
    requests = zoo_requests(10, **({"temperature": 0.8, "top_k": 20} if sampled else {}))
    config = graph_config("none", "none", dtype=dtype, pair=(target, None))
    alone = NativeEngine(config)
    wanted, num_steps = completions(alone, requests)
    results = as_ranks(Layout(tensor=size), lambda _: run_of(config, requests))
    tokens = [[each.output_token_ids for each in found] for found, _ in results]
    assert all(each == tokens[0] for each in tokens)
    for ours, theirs in zip(results[0][0], wanted, strict=True):
        if ours.output_token_ids != theirs.output_token_ids:
            assert dtype is Dtype.float32
            assert_near_tie(alone, ours, theirs.output_token_ids)
        else:
            assert ours.finish_reason == theirs.finish_reason
    if dtype is Dtype.float64:
        assert [steps for _, steps in results] == [num_steps] * size
