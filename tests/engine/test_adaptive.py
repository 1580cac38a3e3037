"""A number of drafts per step that is chosen while requests run: tokens stay those of plain
decoding, and drafts those that K drafts begin with, whatever lengths come after one another.

float64: no tie turns.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
from graph_runs import (
    GRAPH_MODES,
    PAIRS,
    attention_as_on_devices,
    cache_gib,
    count_launches,
    graph_config,
    lengths_at_random,
    make_graph_engine,
    run_requests,
    zoo_requests,
)
from recorded_graphs import RecordedOps

from hydraspec.config.schema import DraftSampling, PerStep, RunConfig, Verification
from hydraspec.engine.costs import CostTable
from hydraspec.engine.native import NativeEngine
from hydraspec.graphs import GraphBackend
from hydraspec.types import Completion, Request, StepRecord

MOST = 4
NUM_REQUESTS = 6


def per_step(method: str, mode: str = "none", **fields: object) -> RunConfig:
    config = graph_config(
        method,
        mode,
        k=PerStep.auto,
        max_speculative_tokens=MOST,
        **fields,  # type: ignore[arg-type]
    )
    return config


def adaptive(config: RunConfig, backend: GraphBackend | None = None) -> NativeEngine:
    engine = make_graph_engine(config, backend)
    lengths = engine.parts.scheduler.draft_lengths
    assert lengths is not None
    lengths.follow(lengths_at_random(MOST))
    return engine


@cache
def plain_tokens(method: str, count: int = NUM_REQUESTS) -> list[list[int]]:
    pair = PAIRS[method]
    config = graph_config("none", "none", pair=(pair[0], None))
    return run_requests(make_graph_engine(config, None), zoo_requests(count)).tokens


@cache
def drafts_of_all(method: str, k: int) -> dict[tuple[int, int], list[int]]:
    """The drafts of a run with K = k in every step, by request and tokens before the newest."""
    engine = make_graph_engine(graph_config(method, "none", k=k), None)
    return drafts_by_place(engine, zoo_requests(2 * NUM_REQUESTS))


def drafts_by_place(
    engine: NativeEngine, requests: list[Request]
) -> dict[tuple[int, int], list[int]]:
    engine.tokenize(requests)
    found = {}
    for event in engine.run(requests, concurrency=4):
        if isinstance(event, StepRecord):
            for part in event.requests:
                if not part.is_prefill:
                    place = part.index, part.num_computed_tokens
                    found[place] = part.draft_token_ids
    return found


METHODS = [method for method in PAIRS if method != "none"]
QUICK = {"eagle3"}
BOTH_WAYS = {"dflash"}  # a draft depends on how many are drafted after it
ALL_METHODS = [pytest.param(m, marks=[] if m in QUICK else [pytest.mark.slow]) for m in METHODS]


@pytest.mark.parametrize("method", ALL_METHODS)
def test_drafts_are_what_k_drafts_begin_with(method: str) -> None:
    """After steps of any length, also of none: the drafter's cache lacks no row, and no draft of an
    earlier step passes for one of this."""
    engine = adaptive(per_step(method))
    found = drafts_by_place(engine, zoo_requests(2 * NUM_REQUESTS))
    least = 1 if method in BOTH_WAYS else MOST
    compared = 0
    for place, drafts in found.items():
        runs = [drafts_of_all(method, k) for k in range(max(least, len(drafts)), MOST + 1)]
        wanted = [run[place][: len(drafts)] for run in runs if place in run]
        if drafts and len(wanted) == len(runs):
            compared += 1
            assert drafts in wanted, place
    assert compared >= 10
    assert {len(drafts) for drafts in found.values()} == {0, 1, 2, 3, MOST}
    assert run_requests(engine, zoo_requests(NUM_REQUESTS)).tokens == plain_tokens(method)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "is_short"),
    [
        ("gemma4_mtp", False),
        ("eagle3", True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("gemma4_mtp", True),
                ("eagle3", False),
                ("peagle", False),
                ("peagle", True),
            )
        ),
    ],
)
def test_a_step_ahead_and_under_pressure(method: str, is_short: bool) -> None:
    config = per_step(method)
    config.engine.async_scheduling = True
    if is_short:
        config.engine.kv_cache.memory_gib = 0.28 * cache_gib(config)
    run = run_requests(adaptive(config), zoo_requests(NUM_REQUESTS))
    assert run.tokens == plain_tokens(method)
    assert run.num_accepted > 0
    assert bool(run.num_preempted) == is_short


QUICK_MODE = "gemma4_mtp", "full_and_piecewise"


@pytest.mark.parametrize(
    ("method", "mode"),
    [
        pytest.param(m, mode, marks=[] if (m, mode) == QUICK_MODE else [pytest.mark.slow])
        for m in METHODS
        for mode in GRAPH_MODES
    ],
)
def test_graphs_of_every_length(method: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attention_as_on_devices(monkeypatch)
    config = per_step(method, mode, sizes=(1, 2, 3, 5))
    engine = adaptive(config, RecordedOps())
    graphs = engine.parts.runner.graphs
    assert graphs is not None
    decodes = [d for d in graphs.manager.descriptors if d.rows_per_request is not None]
    # Sizes 1, 2, 5 of the shorter ones, and 3 of K.
    wanted = {(size, rows) for size in (1, 2, 5) for rows in range(1, MOST + 2)} | {(3, MOST + 1)}
    assert {(d.num_requests, d.rows_per_request) for d in decodes} == wanted
    launches = count_launches(engine, monkeypatch)
    run = run_requests(engine, zoo_requests(NUM_REQUESTS))
    assert run.tokens == plain_tokens(method)
    assert run.num_accepted > 0
    assert launches["decode"] > 10
    assert {len(drafts) for of_one in run.drafts.values() for drafts in of_one} >= {0, 1, 2, MOST}


@pytest.mark.slow
def test_steps_of_one_length_run_its_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a mixed graph with fewer rows, which would draft K."""
    attention_as_on_devices(monkeypatch)
    engine = adaptive(per_step("gemma4_mtp", "full", sizes=(1, 2, 5)), RecordedOps())
    lengths = engine.parts.scheduler.draft_lengths
    assert lengths is not None
    lengths.follow(iter([1] * 1000))
    run = run_requests(engine, zoo_requests(NUM_REQUESTS))
    longest = [max((len(d) for d in of_one[2:]), default=0) for of_one in run.drafts.values()]
    assert max(longest) == 1


@pytest.mark.slow
@pytest.mark.parametrize("verification", [Verification.standard, Verification.block])
def test_sampled_drafts_of_an_earlier_step_are_not_verified(verification: Verification) -> None:
    """Probabilities of drafts that a step did not propose are stale; what they belong to is -1.
    The same seeds give the same tokens as in graphs of the same lengths."""
    fields = {"verification": verification, "draft_sampling": DraftSampling.probabilistic}
    engine = adaptive(per_step("eagle3", **fields))
    run = run_requests(engine, zoo_requests(NUM_REQUESTS, temperature=0.9, top_p=0.9))
    assert run.num_accepted > 10
    lengths = [[len(d) for d in of_one] for of_one in run.drafts.values()]
    assert {n for of_one in lengths for n in of_one} == {0, 1, 2, 3, MOST}


# ------------------------------------------------------------------ choosing


COSTS = CostTable(
    batches=(1, 4),
    drafts=tuple(range(MOST + 1)),
    step_ms=((2.0, 2.8, 3.6, 4.4, 5.2), (2.2, 3.8, 5.4, 7.0, 8.6)),
)


def lengths_of(engine: NativeEngine, requests: list[Request]) -> tuple[list[int], list[list[int]]]:
    engine.tokenize(requests)
    lengths: list[int] = []
    tokens: dict[int, list[int]] = {}
    for event in engine.run(requests, concurrency=3):
        if isinstance(event, Completion):
            tokens[event.index] = event.output_token_ids
        elif isinstance(event, StepRecord):
            assert event.draft_length is not None
            lengths.append(event.draft_length)
    return lengths, [tokens[index] for index in sorted(tokens)]


def test_equal_costs_give_equal_lengths_and_tokens(tmp_path: Path) -> None:
    """In every run of an engine, and in another one over the saved table."""
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(COSTS.as_json()))
    config = per_step("eagle3", costs=str(path))
    engine = make_graph_engine(config, None)
    first = lengths_of(engine, zoo_requests(NUM_REQUESTS))
    assert len(set(first[0])) > 1
    assert lengths_of(engine, zoo_requests(NUM_REQUESTS)) == first
    assert lengths_of(make_graph_engine(config, None), zoo_requests(NUM_REQUESTS)) == first
    assert first[1] == plain_tokens("eagle3")
    assert engine.info.costs == COSTS


@pytest.mark.slow
@pytest.mark.parametrize("is_ahead", [False, True])
def test_costs_are_measured_once(is_ahead: bool) -> None:
    """Steps of which half of the requests verify most drafts among them, also a step ahead."""
    config = per_step("gemma4_mtp")
    config.engine.async_scheduling = is_ahead
    engine = make_graph_engine(config, None)
    requests = zoo_requests(3)
    engine.tokenize(requests)
    assert engine.info.costs is None
    engine.prepare(requests)
    table = engine.info.costs
    assert table is not None
    assert table.batches == (1, 2, 3)
    assert table.drafts == tuple(range(MOST + 1))
    assert (table.draft_ms is None) == is_ahead  # phases are timed where nothing is launched ahead
    assert table.draft_ms is None or table.draft_ms[0][0] < table.draft_ms[0][MOST]
    assert table.ragged_ms is not None
    assert list(map(len, table.ragged_ms)) == [MOST + 1] * 3
    assert not any(table.ragged_ms[0])
    assert all(0.5 < rate < 1.0 for rate in table.rates[: MOST - 1])
    engine.prepare(requests)
    assert engine.info.costs is table
    assert run_requests(engine, zoo_requests(NUM_REQUESTS)).tokens == plain_tokens("gemma4_mtp")
