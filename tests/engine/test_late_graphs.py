"""Graphs that are captured while requests run: a way of sampling is met for the first time."""

from __future__ import annotations

from typing import Any, TypeVar

import pytest
import torch
from graph_runs import (
    Run,
    assert_same,
    attention_as_on_devices,
    graph_config,
    make_graph_engine,
    run_requests,
    zoo_requests,
)
from recorded_graphs import AMPLE, RecordedOps, SmallMemory
from thread_ranks import as_ranks

from hydraspec.config.schema import DraftSampling, Verification
from hydraspec.engine.native import NativeEngine
from hydraspec.engine.run import loading
from hydraspec.parallel.layout import Layout
from hydraspec.parallel.ranks import Ranks, current
from hydraspec.types import Request

T = TypeVar("T")

FEW = 4


def requests_of(count: int, **sampling: float) -> list[Request]:
    """Short answers, of unlike lengths."""
    return zoo_requests(count, longest=12, **sampling)


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
    requests = requests_of(3, temperature=0.9, top_p=0.9) + requests_of(5)[3:]
    wanted = run_requests(
        make_graph_engine(graph_config("eagle3", "none", **fields), None), requests, concurrency=3
    )
    backend = RecordedOps()
    engine = make_graph_engine(graph_config("eagle3", "full", sizes=(5,), **fields), backend)
    num_captured = backend.num_captures
    requests = requests_of(3, temperature=0.9, top_p=0.9) + requests_of(5)[3:]
    assert_same(run_requests(engine, requests, concurrency=3), wanted)
    assert backend.num_captures > num_captured


def test_prepared_ways_of_sampling_are_captured_before_they_are_met() -> None:
    """Batches shrink to every size at the end of a workload: a graph captured there is measured."""
    config = graph_config("gemma4_mtp", "full_decode_only", sizes=(1, 2, 5))
    engine = make_graph_engine(config, RecordedOps())
    requests = requests_of(3, temperature=0.9, top_p=0.9) + requests_of(5)[3:]
    engine.prepare(requests)
    built = engine.num_built()
    run_requests(engine, requests, concurrency=5)
    assert engine.num_built() == built
    unprepared = make_graph_engine(config, RecordedOps())
    built = unprepared.num_built()
    run_requests(unprepared, requests, concurrency=5)
    assert unprepared.num_built().graphs > built.graphs


@pytest.mark.parametrize("num_left", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_without_memory_for_later_graphs_such_steps_run_eagerly(
    num_left: int, caplog: pytest.LogCaptureFixture
) -> None:
    """And the engine's facts say so, not its log: what graphs take, and what was not captured."""
    plain = make_graph_engine(graph_config("eagle3", "none"), None)
    wanted = run_requests(plain, requests_of(FEW, temperature=0.9))
    backend = SmallMemory()
    engine = make_graph_engine(graph_config("eagle3", "full", sizes=(5,)), backend)
    assert engine.info.memory_bytes["graphs"] == backend.num_captures
    backend.num_left = num_left
    assert_same(run_requests(engine, requests_of(FEW, temperature=0.9)), wanted)
    assert engine.info.memory_bytes["graphs"] == backend.num_captures
    (warning,) = engine.info.warnings
    assert "without CUDA graphs" in warning
    assert warning.endswith("CUDA out of memory")
    assert warning not in caplog.messages
    num_refused, num_replays = backend.num_refused, backend.num_replays
    assert num_refused > 0
    run_requests(engine, requests_of(FEW, temperature=0.9))
    assert backend.num_refused == num_refused, "what cannot be had is asked for again"
    assert_same(run_requests(engine, requests_of(FEW)), run_requests(plain, requests_of(FEW)))
    assert backend.num_replays > num_replays


class Full(RecordedOps):
    """Captures that come late fail where the memory is full, in the middle of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.is_full, self.says_so = False, True

    def free_bytes(self) -> int:
        return 0 if self.is_full and self.says_so else AMPLE

    def warm_up(self, run: Any) -> None:
        if self.is_full:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0")
        super().warm_up(run)


def sampled_on_two_ranks(patch: pytest.MonkeyPatch, *, says_so: bool) -> list[Run]:
    """Runs of ranks that add up, of which the second has no memory for late graphs."""
    backends, whole = (Full(), Full()), loading.assemble
    backends[1].says_so = says_so
    patch.setattr(
        *(loading, "assemble"),
        lambda *args, **given: whole(*args, **given, backend=backends[current().rank]),
    )

    def work(ranks: Ranks) -> Run:
        engine = NativeEngine(graph_config("none", "full", sizes=(5,)))
        backends[ranks.rank].is_full = ranks.rank == 1
        run = run_requests(engine, requests_of(FEW, temperature=0.9))
        assert engine.info.warnings
        end = "0.25 wanted" if ranks.rank else "that of another rank"
        assert all(warning.endswith(end) for warning in engine.info.warnings)
        return run

    return as_ranks(Layout(tensor=2), work)


def test_no_rank_begins_a_late_graph_that_one_has_no_memory_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = run_requests(
        make_graph_engine(graph_config("none", "none"), None), requests_of(FEW, temperature=0.9)
    )
    for run in sampled_on_two_ranks(monkeypatch, says_so=True):
        assert_same(run, wanted)


def test_a_rank_that_runs_out_of_memory_in_a_late_graph_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others have sent what it never receives: going on would add up parts of two steps."""
    with pytest.raises(torch.OutOfMemoryError) as raised:
        sampled_on_two_ranks(monkeypatch, says_so=False)
    (note,) = raised.value.__notes__
    assert "cudagraph=none runs without graphs" in note
