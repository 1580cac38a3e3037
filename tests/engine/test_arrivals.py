"""Requests that arrive while an engine runs: times count from arrival, idle time is no step's, and
tokens are those of requests that are offered at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace

import pytest
from graph_runs import graph_config
from many_ranks import few, over_ranks

from hydraspec.adapters.transformers.engine import TransformersEngine
from hydraspec.adapters.vllm.engine import VllmEngine
from hydraspec.config.schema import RunConfig
from hydraspec.engine.base import Engine
from hydraspec.engine.native import NativeEngine
from hydraspec.parallel.layout import Layout
from hydraspec.types import Completion, Request, StepRecord

# Two at once, then a pause that no step of the tiny target is as long as, then one after another.
TIMES = (0.0, 0.0, 1.0, 1.02, 1.04)
SLACK_S = 0.05


@dataclass(slots=True)
class Seen:
    """What a run yielded, and its wall time in seconds."""

    wall_s: float = 0.0
    steps: list[StepRecord] = field(default_factory=list)
    completions: dict[int, Completion] = field(default_factory=dict)
    ended_s: dict[int, float] = field(default_factory=dict)  # after the start, by request

    @property
    def outputs(self) -> dict[int, list[int]]:
        return {index: found.output_token_ids for index, found in self.completions.items()}


def arriving(requests: Sequence[Request], times: Sequence[float] = TIMES) -> list[Request]:
    return [replace(r, arrival_s=at) for r, at in zip(requests, times, strict=True)]


def seen(engine: Engine, requests: Sequence[Request], concurrency: int | None = None) -> Seen:
    engine.tokenize(requests)
    found, began = Seen(), time.perf_counter()
    for event in engine.run(requests, concurrency=concurrency):
        if isinstance(event, StepRecord):
            found.steps.append(event)
        else:
            found.completions[event.index] = event
            found.ended_s[event.index] = time.perf_counter() - began
    found.wall_s = time.perf_counter() - began
    return found


def check_times(found: Seen, requests: Sequence[Request]) -> None:
    """Catches times that count from the start of the run, or from the step that a request joins."""
    for request in requests:
        done = found.completions[request.index]
        assert request.arrival_s is not None
        assert done.queue_ms is not None
        assert done.ttft_ms is not None
        assert 0 <= done.queue_ms < done.ttft_ms <= done.latency_ms
        assert request.arrival_s + done.latency_ms / 1e3 <= found.wall_s
        gaps = done.inter_token_ms
        assert sum(gaps) == pytest.approx(done.latency_ms - done.ttft_ms, abs=1e-6)
        assert 1 <= len(gaps) < len(done.output_token_ids)
    assert found.wall_s > max(TIMES)


def check_idle(found: Seen) -> None:
    """Catches a step that lasts as long as the wait before it."""
    idle_s = max(0.0, TIMES[2] - max(found.ended_s[0], found.ended_s[1]))
    for replica in {record.replica for record in found.steps}:
        spent_s = sum(r.total_ms for r in found.steps if r.replica == replica) / 1e3
        assert spent_s <= found.wall_s - idle_s + SLACK_S


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return graph_config("gemma4_mtp", "none")


@pytest.fixture(scope="module")
def wanted(config: RunConfig) -> dict[int, list[int]]:
    return seen(NativeEngine(config), few(len(TIMES))).outputs


@pytest.mark.parametrize("ahead", [False, True], ids=["in_step", "ahead"])
def test_native(config: RunConfig, wanted: dict[int, list[int]], ahead: bool) -> None:
    """A step ahead: when all requests have ended, one is in flight, and collected after a wait."""
    config = replace(config, engine=replace(config.engine, async_scheduling=ahead))
    requests = arriving(few(len(TIMES)))
    found = seen(NativeEngine(config), requests)
    assert found.outputs == wanted
    check_times(found, requests)
    check_idle(found)


def test_the_limit_holds_arrivals_back(config: RunConfig, wanted: dict[int, list[int]]) -> None:
    """One at a time: the second of two that arrive together waits for the first, and its queue time
    says so."""
    requests = arriving(few(len(TIMES)))
    found = seen(NativeEngine(config), requests, concurrency=1)
    assert found.outputs == wanted
    check_times(found, requests)
    assert max(len(record.requests) for record in found.steps) == 1
    first, second = found.completions[0], found.completions[1]
    assert second.queue_ms is not None
    assert second.queue_ms >= first.latency_ms


def test_an_interrupt_ends_a_wait_at_once(config: RunConfig) -> None:
    """And leaves the engine usable."""
    engine = NativeEngine(config)
    requests = arriving(few(1), [3600.0])
    engine.tokenize(requests)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    began = time.perf_counter()
    with closing(engine.run(requests, concurrency=None)) as events:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            next(events)
    assert time.perf_counter() - began < 2
    assert seen(engine, few(1)).completions[0].finish_reason


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(Layout(pipeline=2), id="pp2"),
        pytest.param(Layout(data=2), id="dp2"),
        pytest.param(Layout(tensor=2), id="tp2", marks=pytest.mark.slow),
        pytest.param(Layout(tensor=2, data=2), id="tp2_dp2", marks=pytest.mark.slow),
    ],
)
def test_ranks(layout: Layout, config: RunConfig, wanted: dict[int, list[int]]) -> None:
    """Replicas take what has arrived; a step made while another replica is idle is not shared."""
    requests = arriving(few(len(TIMES)))
    found = over_ranks(layout, config, lambda engine: seen(engine, requests))
    assert found.outputs == wanted
    check_times(found, requests)
    check_idle(found)
    shares = {record.num_replicas for record in found.steps}
    assert shares <= set(range(1, layout.data + 1))


def test_a_replica_that_waits_has_no_share_of_a_step(config: RunConfig) -> None:
    """One request at a time over two replicas: catches a throughput that is twice what it was."""
    requests = arriving(few(2), [0.0, 1.0])
    found = over_ranks(Layout(data=2), config, lambda engine: seen(engine, requests))
    assert {record.num_replicas for record in found.steps} == {1}


def test_transformers() -> None:
    """Static batches: those that have arrived run together, the others after them."""
    config = graph_config("none", "none")
    config.engine.name = "transformers"
    requests = arriving(few(len(TIMES)))
    found = seen(TransformersEngine(config), requests)
    assert set(found.completions) == set(range(len(TIMES)))
    check_times(found, requests)
    check_idle(found)
    batches = [{step.index for step in record.requests} for record in found.steps]
    assert batches[0] == {0, 1}
    assert not any({1, 2} <= batch for batch in batches)


@pytest.mark.parametrize("data", [1, 2])
def test_vllm(data: int, start: Callable[..., VllmEngine]) -> None:
    """Over the fake. vLLM's data-parallel engine gives no times but those of whole requests."""
    requests = arriving([replace(r, prompt=None, prompt_token_ids=[3 + r.index]) for r in few(5)])
    found = seen(start(data=data), requests)
    for request in requests:
        done = found.completions[request.index]
        assert request.arrival_s is not None
        assert request.arrival_s + done.latency_ms / 1e3 <= found.wall_s
    assert found.wall_s > max(TIMES)
    if data == 1:
        check_times(found, requests)
        check_idle(found)
