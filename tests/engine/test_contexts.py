"""Requests that begin with filled KV, and costs of steps measured at several contexts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from caches import kv_cache, kv_group
from graph_runs import graph_config, make_graph_engine, run_requests, zoo_requests

from hydraspec.config.schema import PerStep
from hydraspec.engine.cache.noise import fill
from hydraspec.engine.costs import filled_to
from hydraspec.engine.native import NativeEngine
from hydraspec.engine.run.step_costs import TOKENS_PER_RUN, longer_contexts
from hydraspec.lab.rounds import Measurement
from hydraspec.metrics.sinks import Side
from hydraspec.types import Completion, Request, StepRecord

LENGTH = 600
NUM_TOKENS = 12


def engine_of(method: str, gib: float | None = None) -> NativeEngine:
    config = graph_config(method, "none", max_model_len=LENGTH + 100, max_num_seqs=3)
    config.engine.kv_cache.memory_gib = gib
    return make_graph_engine(config, None)


def filled_requests(engine: NativeEngine, count: int, context: int = LENGTH) -> list[Request]:
    requests = zoo_requests(count, ignore_eos=True)
    engine.tokenize(requests)
    found = [filled_to(request, context) for request in requests]
    for request in found:
        request.sampling = replace(request.sampling, max_tokens=NUM_TOKENS)
    return found


@pytest.mark.parametrize("method", ["eagle3", "gemma4_mtp"])
def test_a_filled_request_decodes_at_its_context_without_a_prefill(method: str) -> None:
    """Full and sliding groups, the target's and the drafter's; the first step reads one row."""
    engine = engine_of(method)
    requests = filled_requests(engine, 3)
    events = list(engine.run(requests, concurrency=None))
    steps = [event for event in events if isinstance(event, StepRecord)]
    assert [part.num_rows for part in steps[0].requests] == [1, 1, 1]
    assert [part.num_computed_tokens for part in steps[0].requests] == [LENGTH - 1] * 3
    ended = [event for event in events if isinstance(event, Completion)]
    assert {each.finish_reason for each in ended} == {"length"}
    assert all(len(each.output_token_ids) == NUM_TOKENS for each in ended)
    assert engine.parts.runner.kv.usage == 0.0


def test_what_runs_after_filled_requests_computes_what_it_computes_alone() -> None:
    """No filled block is found as a prefix, and no noise is read by requests that do not ask."""
    engine = engine_of("eagle3")
    wanted = run_requests(engine, zoo_requests(4)).tokens
    requests = filled_requests(engine, 3)
    beside = [replace(request, index=3 + i) for i, request in enumerate(zoo_requests(4))]
    engine.tokenize(beside)
    events = [*engine.run([*requests, *beside], concurrency=None)]
    found = {e.index: e.output_token_ids for e in events if isinstance(e, Completion)}
    assert [found[3 + i] for i in range(4)] == wanted
    assert run_requests(engine, zoo_requests(4)).tokens == wanted


def test_a_preempted_request_begins_filled_again() -> None:
    """A step after it reads the request's one row and its output so far, and no prompt."""
    most = engine_of("eagle3").parts.runner.kv
    # Blocks for two requests whose outputs do not cross into another block, and one more.
    gib = most.num_bytes / most.num_blocks[0] * (2 * -(-LENGTH // 16) + 2) / (1 << 30)
    engine = engine_of("eagle3", gib)
    requests = filled_requests(engine, 2, LENGTH - 4)
    events = list(engine.run(requests, concurrency=None))
    steps = [event for event in events if isinstance(event, StepRecord)]
    assert sum(step.num_preempted for step in steps) > 0
    assert max(part.num_rows for step in steps for part in step.requests) <= NUM_TOKENS + 1
    ended = [event for event in events if isinstance(event, Completion)]
    assert [len(each.output_token_ids) for each in ended] == [NUM_TOKENS] * 2


def test_noise_fills_all_blocks_but_the_null_blocks_and_once() -> None:
    cache = kv_cache([kv_group("full", (0,), 4, head_dim=8)], (9,), 2, 32, num_layers=1)
    fill(cache)
    rows = cache.caches[0]
    assert rows is not None
    assert rows[:4].eq(0).all()
    assert rows[4:].abs().gt(0).all()
    assert rows[4:].abs().le(1).all()
    rows[5].zero_()
    fill(cache.leading(1))  # a baseline's view of the same blocks
    assert rows[5].eq(0).all()


def test_as_many_requests_are_said_to_fit_as_run_at_once() -> None:
    groups = [kv_group("full", (0,), 4, head_dim=8), kv_group("slide", (1,), 4, 5, head_dim=8)]
    cache = kv_cache(groups, (9, 9), 4, 32, num_layers=2)
    assert cache.most_requests(8) == 4
    assert cache.most_requests(8, 1) == 2
    assert cache.most_requests(32) == 1
    assert cache.most_requests(33) == 0
    engine = engine_of("eagle3")
    assert engine.most_at_once(100) == 3
    assert engine.most_at_once(LENGTH + 100) == 0


def test_a_measurement_takes_no_filled_requests() -> None:
    engine = engine_of("eagle3")
    with pytest.raises(AssertionError, match="are not the target's"):
        Measurement({Side.method: engine}, filled_requests(engine, 1), [], concurrency=None)


def at(num_prompt: int, max_tokens: int) -> Request:
    (request,) = zoo_requests(1)
    sampling = replace(request.sampling, max_tokens=max_tokens)
    return replace(request, prompt_token_ids=[1] * num_prompt, sampling=sampling)


@pytest.mark.parametrize(
    ("requests", "context", "found"),
    [
        ([at(30, 100), at(200, 100)], 150, []),
        ([at(1000, 100)], 1024, []),
        ([at(100, 32768)], 120, [1024, 4096, 16384, 32820]),
        ([at(100, 10), at(30000, 10)], 15000, [1024, 4096]),
        ([at(9000, 8)], 9000, []),
    ],
    ids=["short", "one length", "one long answer", "two lengths", "long and alike"],
)
def test_contexts_are_those_that_requests_reach(
    requests: list[Request], context: int, found: list[int]
) -> None:
    assert longer_contexts(requests, context) == found
    if found:
        assert found[-1] + TOKENS_PER_RUN <= max(
            len(r.prompt_token_ids or ()) + r.sampling.max_tokens for r in requests
        )


def test_auto_measures_costs_where_a_workload_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    """And leaves out the batches that do not fit there."""
    monkeypatch.setattr("hydraspec.engine.run.step_costs.LADDER", (200, 512))
    monkeypatch.setattr("hydraspec.engine.run.step_costs.NUM_STEPS", 3)
    config = graph_config("eagle3", "none", k=PerStep.auto, max_speculative_tokens=2)
    config.target.max_model_len, config.engine.kv_cache.memory_gib = 700, None
    engine = make_graph_engine(config, None)
    requests = zoo_requests(4)
    for request in requests:
        request.sampling = replace(request.sampling, max_tokens=600)
    engine.tokenize(requests)
    whole = NativeEngine.most_at_once
    monkeypatch.setattr(
        NativeEngine, "most_at_once", lambda self, n: 2 if n > 500 else whole(self, n)
    )
    engine.prepare(requests)
    table = engine.info.costs
    assert table is not None
    assert len(table.contexts) == 3
    assert table.contexts[0] < 200 == table.contexts[1]
    assert table.batches == (1, 2, 4)
    assert [bool(row) for row in table.step_ms] == [True] * 8 + [False]
    assert table.ragged_ms is not None
    assert list(map(len, table.ragged_ms)) == list(map(len, table.step_ms))
    assert table.at(4, 2, 10_000) == table.at(2, 2, table.contexts[2])
    assert table.at(2, 1).step_ms == table.at(2, 1, table.contexts[0]).step_ms
    assert torch.tensor(table.step_ms[0]).diff().ge(0).all()
