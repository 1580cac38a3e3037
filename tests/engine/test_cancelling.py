"""A cancelled request ends with the tokens it has; what it held is given back, and the others go on
as they would have."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pytest
from graph_runs import cache_gib, graph_config, zoo_requests
from late_device import LateDevice
from many_ranks import over_ranks
from side_by_side import assert_nothing_is_held

from hydraspec.config.schema import RunConfig
from hydraspec.engine.base import Engine
from hydraspec.engine.native import NativeEngine
from hydraspec.parallel.engines import replicas
from hydraspec.parallel.engines.engine import ParallelEngine
from hydraspec.parallel.layout import Layout
from hydraspec.types import Completion, Request, StepRecord

METHOD = "gemma4_mtp"
LAYOUTS = {
    "tp2": Layout(tensor=2),
    "pp2": Layout(pipeline=2),
    "dp2": Layout(data=2),
    "tp2_pp2_dp2": Layout(tensor=2, pipeline=2, data=2),
}
Events = Iterator[StepRecord | Completion]
Ends = dict[int, Completion]


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return graph_config(METHOD, "none")


@pytest.fixture(scope="module")
def whole(config: RunConfig) -> Ends:
    engine = NativeEngine(config)
    return ends(engine.run(requests_for(engine), concurrency=None))


def requests_for(engine: Engine, count: int = 5) -> list[Request]:
    requests = zoo_requests(count)
    for request in requests:
        request.sampling.max_tokens, request.sampling.ignore_eos = 12, True
    requests[-1].sampling.max_tokens = 40
    engine.tokenize(requests)
    return requests


def ends(events: Events) -> Ends:
    return {event.index: event for event in events if isinstance(event, Completion)}


def run_and_cancel(
    engine: NativeEngine | ParallelEngine, cancelled: dict[int, int], count: int = 5
) -> Ends:
    """Cancels request -> after so many events of the run, and sees it to its end."""
    events = engine.run(requests_for(engine, count), concurrency=None)
    found: Ends = {}
    for number, event in enumerate(events):
        if isinstance(event, Completion):
            found[event.index] = event
        for index, at in cancelled.items():
            if at == number:
                engine.cancel(index)
    return found


def assert_cut(found: Ends, whole: Ends, cancelled: set[int]) -> None:
    """All ended once, the cancelled with less than they would have had."""
    assert set(found) == set(whole)
    for index, end in found.items():
        tokens = whole[index].output_token_ids
        if index in cancelled:
            assert (end.finish_reason, end.error) == ("error", "cancelled")
            assert end.output_token_ids == tokens[: len(end.output_token_ids)]
            assert len(end.output_token_ids) < len(tokens)
        else:
            assert end.error is None, end.error
            assert (end.finish_reason, end.output_token_ids) == ("length", tokens)


@pytest.mark.parametrize("ahead", [False, True], ids=["waiting", "ahead"])
def test_others_keep_their_tokens_and_nothing_is_held(
    ahead: bool, whole: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of a cancelled request become poison while its step is still in flight."""
    config = graph_config(METHOD, "none", max_num_seqs=3)
    config.engine.async_scheduling = ahead
    engine = NativeEngine(config)
    with monkeypatch.context() as patch:
        if ahead:
            LateDevice(engine, patch).poison_freed_blocks(patch)
        # While prompts are read, while it decodes, while it waits for a slot, twice, and unknown.
        found = run_and_cancel(engine, {1: 0, 0: 5, 4: 2, 2: 7, 99: 1})
    assert_cut(found, whole, {0, 1, 2, 4})
    assert found[0].output_token_ids
    assert not found[4].output_token_ids
    assert not engine._in_flight
    assert engine.parts.runner.kv.usage == 0.0
    if not ahead:
        assert_nothing_is_held(engine)


def test_before_the_first_event_and_from_another_thread(config: RunConfig, whole: Ends) -> None:
    engine = NativeEngine(config)
    events = engine.run(requests_for(engine), concurrency=2)
    engine.cancel(3)  # it joins last but one
    found: Ends = {}
    for number, event in enumerate(events):
        if number == 2:
            thread = threading.Thread(target=engine.cancel, args=(0,))
            thread.start()
            thread.join()
        if isinstance(event, Completion):
            found[event.index] = event
    assert_cut(found, whole, {0, 3})
    assert found[0].output_token_ids
    assert not found[3].output_token_ids


def test_one_that_has_ended_and_the_next_run_are_left_alone(config: RunConfig, whole: Ends) -> None:
    engine = NativeEngine(config)
    found: Ends = {}
    for event in engine.run(requests_for(engine), concurrency=None):
        if isinstance(event, Completion):
            engine.cancel(event.index)
            found[event.index] = event
    engine.cancel(1)  # after the run
    assert_cut(found, whole, set())
    again = ends(engine.run(requests_for(engine)[:2], concurrency=None))
    assert_cut(again, {index: whole[index] for index in (0, 1)}, set())


@pytest.mark.slow
def test_all_at_once(config: RunConfig, whole: Ends) -> None:
    engine = NativeEngine(config)
    found = run_and_cancel(engine, dict.fromkeys(range(5), 3))
    assert_cut(found, whole, set(range(5)))
    assert_nothing_is_held(engine)


def test_later_turns_of_its_conversation_are_not_sent(config: RunConfig) -> None:
    engine = NativeEngine(config)
    requests = requests_for(engine, 3)
    requests[1].after = 0
    events = engine.run(requests, concurrency=None)
    next(events)
    engine.cancel(0)
    found = ends(events)
    assert found[0].error == "cancelled"
    assert "ended with an error: cancelled" in (found[1].error or "")
    assert found[2].finish_reason == "length"


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("tp2", marks=pytest.mark.slow),
        *("pp2", "dp2"),
        pytest.param("tp2_pp2_dp2", marks=pytest.mark.slow),
    ],
)
def test_every_rank_drops_it_in_the_same_step(
    layout: str, config: RunConfig, whole: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that did not would compute other rows, or notice that the others finish more."""

    def lab(engine: Engine) -> Ends:
        assert isinstance(engine, ParallelEngine)
        return run_and_cancel(engine, {1: 0, 4: 4})

    monkeypatch.setattr(replicas, "LOOK_EVERY_S", 0.0)
    assert_cut(over_ranks(LAYOUTS[layout], config, lab), whole, {1, 4})


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True], ids=["waiting", "ahead"])
def test_at_any_time(ahead: bool, whole: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a cache that preempts, so that some are cancelled while they wait to be recomputed."""
    config = graph_config(METHOD, "none", max_num_seqs=4, block_size=8)
    config.engine.async_scheduling = ahead
    config.engine.kv_cache.memory_gib = 0.35 * cache_gib(config)
    engine = NativeEngine(config)
    rng, num_cut = random.Random(0), 0
    for _ in range(60):
        cancelled = {i: rng.randrange(40) for i in rng.sample(range(5), rng.randint(1, 4))}
        with monkeypatch.context() as patch:
            if ahead:
                LateDevice(engine, patch).poison_freed_blocks(patch)
            found = run_and_cancel(engine, cancelled)
        cut = {index for index, end in found.items() if end.error == "cancelled"}
        assert cut <= set(cancelled)
        assert_cut(found, whole, cut)
        assert engine.parts.runner.kv.usage == 0.0
        num_cut += len(cut)
        for cache in engine.parts.runner.kv.caches:
            if cache is not None:
                cache.nan_to_num_(0.0)  # the poison of the run before
    assert num_cut > 60
