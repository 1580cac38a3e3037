"""CUDA graphs of every number of drafts: bit for bit what the same padded steps compute eagerly, in
any order of lengths; costs are measured over them."""

from __future__ import annotations

import time

import pytest
import torch
from graph_runs import (
    GRAPH_MODES,
    Run,
    count_launches,
    graph_config,
    lengths_at_random,
    make_graph_engine,
    run_requests,
    zoo_requests,
)
from recorded_graphs import CalledAgain

from hydraspec.config.schema import Device, Dtype, PerStep, RunConfig
from hydraspec.graphs import GraphBackend
from hydraspec.types import StepRecord

pytestmark = pytest.mark.gpu

MOST = 4


def gpu_config(method: str, mode: str) -> RunConfig:
    return graph_config(
        method,
        mode,
        device=Device.cuda,
        dtype=Dtype.bfloat16,
        sizes=(1, 2, 3, 8, 16),
        k=PerStep.auto,
        max_speculative_tokens=MOST,
        max_num_seqs=16,
        max_num_batched_tokens=256,
        max_model_len=256,
    )


@pytest.mark.parametrize("mode", GRAPH_MODES)
@pytest.mark.parametrize("method", ["gemma4_mtp", "eagle3", "peagle", "mtp"])
def test_graphs_of_every_length_replay_what_eager_steps_compute(method: str, mode: str) -> None:
    runs: list[Run] = []
    backends: list[GraphBackend | None] = [CalledAgain(), None]
    for backend in backends:
        engine = make_graph_engine(gpu_config(method, mode), backend)
        lengths = engine.parts.scheduler.draft_lengths
        assert lengths is not None
        lengths.follow(lengths_at_random(MOST))
        with pytest.MonkeyPatch.context() as patch:
            counts = count_launches(engine, patch)
            runs.append(run_requests(engine, zoo_requests(20), concurrency=16))
        assert counts["decode"] > 10
        del engine
        torch.cuda.empty_cache()
    called, replayed = runs
    assert replayed.outputs == called.outputs
    assert replayed.drafts == called.drafts
    assert replayed.num_accepted > 0


def test_costs_are_those_of_graphs() -> None:
    """More drafts take longer, by the shortest of three measurements, since other tests may run on
    the device; a run over them finishes, and captures nothing further."""
    measured = []
    for _ in range(3):
        engine = make_graph_engine(gpu_config("eagle3", "full_and_piecewise"), None)
        requests = zoo_requests(16)
        engine.tokenize(requests)
        engine.prepare(requests)
        table = engine.info.costs
        assert table is not None
        assert table.batches == (1, 2, 4, 8, 16)
        measured.append(torch.tensor(table.step_ms))
    shortest = torch.stack(measured).amin(0)
    assert (shortest[:, 0] < shortest[:, MOST]).all(), shortest
    built = engine.num_built().graphs
    assert len(run_requests(engine, requests, concurrency=16).outputs) == len(requests)
    assert engine.num_built().graphs == built


def test_steps_that_are_launched_ahead_have_the_devices_time() -> None:
    """From the end of one step to that of the next: together they are the time of the run."""
    engine = make_graph_engine(gpu_config("eagle3", "full"), None)
    requests = zoo_requests(16)
    engine.tokenize(requests)
    engine.prepare(requests)
    list(engine.run(requests, concurrency=4))
    began = time.perf_counter()
    events = list(engine.run(requests, concurrency=4))
    run_ms = 1e3 * (time.perf_counter() - began)
    times = [event.device_ms for event in events if isinstance(event, StepRecord)]
    known = [each for each in times if each is not None]
    assert len(known) >= len(times) - 1 > 10
    assert min(known) > 0
    assert 0.5 * run_ms < sum(known) < run_ms
