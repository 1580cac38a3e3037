"""Requests of a step that verify different numbers of drafts: by what they accept, and by the
estimates of a drafter that has any. Tokens stay those of plain decoding. float64: no tie turns."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from graph_runs import (
    PAIRS,
    attention_as_on_devices,
    graph_config,
    make_graph_engine,
    run_requests,
    zoo_requests,
)
from recorded_graphs import RecordedOps

from hydraspec.config.schema import PerStep, RunConfig
from hydraspec.engine.costs import CostTable
from hydraspec.engine.native import NativeEngine
from hydraspec.graphs import GraphBackend
from hydraspec.types import Completion, Request, StepRecord

MOST, NUM_REQUESTS = 4, 8
# Rows cost much, drafting little: one number for all requests is seldom best.
COSTS = CostTable(
    batches=(1, 4),
    drafts=tuple(range(MOST + 1)),
    step_ms=((2.0, 2.5, 3.0, 3.5, 4.0), (2.5, 3.7, 4.9, 6.1, 7.3)),
    draft_ms=((0.0, 0.1, 0.1, 0.1, 0.1),) * 2,
    rates=(0.8, 0.8, 0.7, 0.7),
)
Found = tuple[list[list[int]], list[list[int]]]


def config_of(method: str, folder: Path, mode: str = "none", **fields: object) -> RunConfig:
    path = folder / "costs.json"
    path.write_text(json.dumps(COSTS.as_json()))
    return graph_config(
        method,
        mode,
        k=PerStep.auto,
        max_speculative_tokens=MOST,
        costs=str(path),
        **fields,  # type: ignore[arg-type]
    )


def mixture() -> list[Request]:
    """Every other prompt is of random tokens, where a trained drafter is seldom right."""
    draw = random.Random(5)
    random_prompts = [[draw.randrange(5, 500) for _ in range(12)] for _ in range(NUM_REQUESTS)]
    return [
        replace(each, messages=None, prompt_token_ids=prompt) if each.index % 2 else each
        for each, prompt in zip(zoo_requests(NUM_REQUESTS, longest=60), random_prompts, strict=True)
    ]


def decode(engine: NativeEngine) -> Found:
    """The tokens of all requests, and of each step the drafts that decoding requests have rows
    for."""
    requests, tokens, rows = mixture(), dict[int, list[int]](), []
    engine.tokenize(requests)
    for event in engine.run(requests, concurrency=4):
        if isinstance(event, Completion):
            tokens[event.index] = event.output_token_ids
        elif isinstance(event, StepRecord):
            assert event.draft_length is not None
            rows.append([part.num_rows - 1 for part in event.requests if not part.is_prefill])
            assert len(set(rows[-1])) <= 2
    return [tokens[index] for index in sorted(tokens)], rows


@cache
def plain_tokens(method: str) -> list[list[int]]:
    config = graph_config("none", "none", pair=(PAIRS[method][0], None))
    return run_requests(make_graph_engine(config, None), mixture()).tokens


def num_ragged(rows: list[list[int]]) -> int:
    return sum(len(set(step)) == 2 for step in rows)


@pytest.mark.parametrize(
    "method", ["dspark", "eagle3", pytest.param("peagle", marks=pytest.mark.slow)]
)
def test_requests_differ_and_nothing_else_does(method: str, tmp_path: Path) -> None:
    """In every run of an engine, and in another one: equal costs give equal choices."""
    config = config_of(method, tmp_path)
    engine = make_graph_engine(config, None)
    first = decode(engine)
    assert first[0] == plain_tokens(method)
    assert num_ragged(first[1]) > 1
    assert decode(engine) == first
    assert decode(make_graph_engine(config, None)) == first


@pytest.mark.parametrize(
    ("method", "mode"),
    [
        ("dspark", "full"),
        *(
            pytest.param(method, mode, marks=pytest.mark.slow)
            for method in ("dspark", "eagle3", "peagle")
            for mode in ("none", "full_decode_only", "full_and_piecewise")
        ),
    ],
)
def test_a_step_ahead_of_results(
    method: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host chooses by what requests accepted up to the step before the last."""
    attention_as_on_devices(monkeypatch)
    config = config_of(method, tmp_path, mode, sizes=(2, 5))
    config.engine.async_scheduling = True
    backend: GraphBackend | None = None if mode == "none" else RecordedOps()
    tokens, rows = decode(make_graph_engine(config, backend))
    assert tokens == plain_tokens(method)
    assert num_ragged(rows) > 1


def test_steps_of_two_lengths_have_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded to as many rows as 1, 2, 3, 4, 6, … drafts per request take; a step with a prompt,
    which may have more rows of a request, runs none of them."""
    attention_as_on_devices(monkeypatch)
    config = config_of("gemma4_mtp", tmp_path, "full_decode_only", sizes=(1, 2, 4, 5))
    engine = make_graph_engine(config, RecordedOps())
    graphs = engine.parts.runner.graphs
    assert graphs is not None
    found = [d for d in graphs.manager.descriptors if d.most_rows is not None]
    assert {d.most_rows for d in found} == {MOST + 1}
    assert {(d.num_requests, d.num_rows) for d in found} == {
        (size, size * rows) for size in (2, 4, 5) for rows in (2, 3, 4, 5)
    }
    lengths = engine.parts.scheduler.draft_lengths
    assert lengths is not None
    lengths.follow([(0, MOST, 2, 1), (MOST, 0)] * 500)
    served = []
    dispatch = graphs.manager.dispatch

    def noted(wanted):  # type: ignore[no-untyped-def]
        captured = dispatch(wanted)
        served.append((wanted, captured and captured.descriptor))
        return captured

    monkeypatch.setattr(graphs.manager, "dispatch", noted)
    run = run_requests(engine, mixture())
    assert run.tokens == plain_tokens("gemma4_mtp")
    assert run.num_accepted > 0
    ragged = [d for wanted, d in served if d is not None and d.most_rows is not None]
    assert len(ragged) > 10
    prompts = [
        d for wanted, d in served if (wanted.rows_per_request, wanted.most_rows) == (None, None)
    ]
    assert prompts
    assert not any(prompts)


@pytest.mark.parametrize(
    ("method", "mode"), [("gemma4_mtp", "none"), ("eagle3", "full_decode_only")]
)
def test_drafts_are_made_for_requests_that_want_them(
    method: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are padding to the drafter until they are to verify drafts, and have none in the first
    step in which they are."""
    attention_as_on_devices(monkeypatch)
    requests = zoo_requests(2, ignore_eos=True)
    for each in requests:
        each.sampling = replace(each.sampling, max_tokens=40)
    plain = graph_config("none", "none", pair=(PAIRS[method][0], None))
    wanted = run_requests(make_graph_engine(plain, None), requests).outputs
    config = config_of(method, tmp_path, mode, sizes=(1, 2))
    engine = make_graph_engine(config, None if mode == "none" else RecordedOps())
    lengths = engine.parts.scheduler.draft_lengths
    assert lengths is not None
    lengths.follow([*[(0, MOST)] * 12, *[MOST] * 500])
    run = run_requests(engine, requests)
    assert run.outputs == wanted
    late, early = ([len(drafts) for drafts in run.drafts[index]] for index in (0, 1))
    first = early.index(MOST)
    assert set(late[:12]) == {0} == {*early[:first]}
    assert set(early[first:12]) == {MOST}
    assert late[12:15] == [0, MOST, MOST]
