"""Filled requests and recorded acceptance in CUDA graphs, with steps scheduled ahead."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from graph_runs import graph_config, make_graph_engine, no_waiting, zoo_requests

from hydraspec.config.schema import Device, Dtype, PerStep, RunConfig, Verification
from hydraspec.engine.costs import filled_to
from hydraspec.engine.native import NativeEngine
from hydraspec.types import Completion, Request

pytestmark = pytest.mark.gpu

ACCEPTED = [3, 0, 1, 3, 2]  # of a recorded request, step by step
CONTEXT, NUM_TOKENS = 1500, 40


def gpu_config(method: str, k: int | PerStep, trace: Path) -> RunConfig:
    config = graph_config(
        method,
        "full_and_piecewise",
        device=Device.cuda,
        dtype=Dtype.bfloat16,
        sizes=(1, 2, 4, 8),
        k=k,
        max_speculative_tokens=3 if k is PerStep.auto else None,
        verification=Verification.synthetic,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        max_model_len=CONTEXT + 300,
    )
    config.method.synthetic_trace = str(trace)
    return config


def write_record(folder: Path) -> Path:
    steps, place = [], 4
    for count in ACCEPTED:
        steps.append({"request": "0", "num_computed_tokens": place, "num_accepted": count})
        place += count + 1
    row = {
        "id": "0",
        "category": None,
        "prompt_token_ids": [0] * 4,
        "output_token_ids": [0] * (place + 1 - 4),
        "num_drafts": len(steps),
        "drafted_per_position": [len(steps)] * 3,
        "accepted_per_position": [sum(n > i for n in ACCEPTED) for i in range(3)],
    }
    (folder / "requests.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    lines = "".join(json.dumps(step) + "\n" for step in steps)
    (folder / "trace.jsonl").write_text(lines, encoding="utf-8")
    return folder


def filled_requests(engine: NativeEngine, count: int) -> list[Request]:
    requests = zoo_requests(count, ignore_eos=True)
    engine.tokenize(requests)
    found = [filled_to(request, CONTEXT) for request in requests]
    for request in found:
        request.sampling.max_tokens = NUM_TOKENS
    return found


def accepted_of(engine: NativeEngine) -> dict[int, list[int]]:
    """Drafts that each verify step of filled requests accepted, by request."""
    found: dict[int, list[int]] = {}
    for event in engine.run(filled_requests(engine, 8), concurrency=None):
        if isinstance(event, Completion):
            assert len(event.output_token_ids) == NUM_TOKENS
            continue
        for part in event.requests:
            assert part.num_computed_tokens >= CONTEXT - 1
            if part.draft_token_ids:
                found.setdefault(part.index, []).append(part.num_accepted)
    return found


@pytest.mark.parametrize("method", ["gemma4_mtp", "eagle3"])
def test_filled_requests_follow_their_record_in_graphs(method: str, tmp_path: Path) -> None:
    """From the first step on at their context; in the second run, whose cache is filled already,
    the host never waits for the device."""
    engine = make_graph_engine(gpu_config(method, 3, write_record(tmp_path)), None)
    found = accepted_of(engine)
    for lengths in found.values():
        assert lengths[:-1] == (ACCEPTED * 9)[: len(lengths) - 1]
    with no_waiting():
        assert accepted_of(engine) == found


def test_costs_of_a_long_context_are_measured_over_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is compiled or captured by the contexts after the first."""
    monkeypatch.setattr("hydraspec.engine.run.step_costs.LADDER", (512,))
    engine = make_graph_engine(gpu_config("eagle3", PerStep.auto, write_record(tmp_path)), None)
    requests = zoo_requests(8)
    engine.tokenize(requests)
    for request in requests:
        request.sampling.max_tokens = CONTEXT
    engine.prepare(requests)
    table = engine.info.costs
    assert table is not None
    assert len(table.contexts) == 3
    assert table.batches == (1, 2, 4, 8)
    built = engine.num_built()
    with engine.with_drafts(2):
        for _ in engine.run(filled_requests(engine, 8), concurrency=None):
            pass
    assert engine.num_built() == built
