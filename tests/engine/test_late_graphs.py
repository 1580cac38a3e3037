"""Graphs that are captured while requests run: a way of sampling is met for the first time."""

from __future__ import annotations

from typing import TypeVar

import pytest
from graph_runs import (
    assert_same,
    attention_as_on_devices,
    graph_config,
    make_graph_engine,
    run_requests,
    zoo_requests,
)
from recorded_graphs import RecordedOps, SmallMemory

from hydraspec.config.schema import DraftSampling, Verification

T = TypeVar("T")

FEW = 4


@pytest.fixture(autouse=True)
def _static_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    attention_as_on_devices(monkeypatch)


@pytest.mark.parametrize(
    "verification",
    [
        Verification.standard,
        pytest.param(Verification.block, marks=pytest.mark.slow),
        pytest.param(Verification.synthetic, marks=pytest.mark.slow),
    ],
)
def test_other_ways_of_sampling_get_graphs_when_met(verification: Verification) -> None:
    """Greedy and sampled requests in turn, drafts drawn from distributions: the steps of a graph
    draw what eager steps draw, because a draw follows from seed and position alone."""
    fields = {
        "verification": verification,
        "draft_sampling": DraftSampling.probabilistic,
        "synthetic_acceptance_length": 2.0 if verification is Verification.synthetic else None,
    }
    requests = zoo_requests(3, temperature=0.9, top_p=0.9) + zoo_requests(5)[3:]
    wanted = run_requests(
        make_graph_engine(graph_config("eagle3", "none", **fields), None), requests, concurrency=3
    )
    backend = RecordedOps()
    engine = make_graph_engine(graph_config("eagle3", "full", **fields), backend)
    num_captured = backend.num_captures
    requests = zoo_requests(3, temperature=0.9, top_p=0.9) + zoo_requests(5)[3:]
    assert_same(run_requests(engine, requests, concurrency=3), wanted)
    assert backend.num_captures > num_captured


def test_prepared_ways_of_sampling_are_captured_before_they_are_met() -> None:
    """Batches shrink to every size at the end of a workload: a graph captured there is measured."""
    config = graph_config("gemma4_mtp", "full_and_piecewise", sizes=(1, 2, 5))
    engine = make_graph_engine(config, RecordedOps())
    requests = zoo_requests(3, temperature=0.9, top_p=0.9) + zoo_requests(5)[3:]
    engine.prepare(requests)
    built = engine.num_built()
    run_requests(engine, requests, concurrency=5)
    assert engine.num_built() == built
    unprepared = make_graph_engine(config, RecordedOps())
    built = unprepared.num_built()
    run_requests(unprepared, requests, concurrency=5)
    assert unprepared.num_built().graphs > built.graphs


@pytest.mark.parametrize("num_left", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_without_memory_for_later_graphs_such_steps_run_eagerly(num_left: int) -> None:
    """And the engine's facts say so: what graphs take, and what could not be captured."""
    plain = make_graph_engine(graph_config("eagle3", "none"), None)
    wanted = run_requests(plain, zoo_requests(FEW, temperature=0.9))
    backend = SmallMemory()
    engine = make_graph_engine(graph_config("eagle3", "full"), backend)
    assert engine.info.memory_bytes["graphs"] == backend.num_captures
    backend.num_left = num_left
    assert_same(run_requests(engine, zoo_requests(FEW, temperature=0.9)), wanted)
    assert engine.info.memory_bytes["graphs"] == backend.num_captures
    (warning,) = engine.info.warnings
    assert "without CUDA graphs" in warning
    assert warning.endswith("CUDA out of memory")
    num_refused, num_replays = backend.num_refused, backend.num_replays
    assert num_refused > 0
    run_requests(engine, zoo_requests(FEW, temperature=0.9))
    assert backend.num_refused == num_refused, "what cannot be had is asked for again"
    assert_same(run_requests(engine, zoo_requests(FEW)), run_requests(plain, zoo_requests(FEW)))
    assert backend.num_replays > num_replays
