"""One engine for the lab, many ranks behind it: calls, early ends, errors and replicas."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from graph_runs import attention_as_on_devices, graph_config, zoo_requests
from many_ranks import Outputs, few, outputs, over_ranks, requests_of
from recorded_graphs import SmallMemory

from hydraspec.config.schema import RunConfig
from hydraspec.engine.base import Engine
from hydraspec.engine.cache import sizing
from hydraspec.engine.native import NativeEngine
from hydraspec.engine.run import loading
from hydraspec.engine.run.collect import Collected
from hydraspec.parallel.control import Control, RankError
from hydraspec.parallel.engines import outcome
from hydraspec.parallel.engines.calls import follow
from hydraspec.parallel.engines.engine import ParallelEngine
from hydraspec.parallel.layout import Layout
from hydraspec.parallel.ranks import Ranks, acting_as, current
from hydraspec.types import CheckpointError, NotFiniteError, Request

PAIR, REPLICAS = Layout(tensor=2), Layout(data=2)
BOTH = pytest.mark.parametrize("layout", [PAIR, REPLICAS], ids=["tp2", "dp2"])


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcome, "GRACE_S", 0.5)


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return graph_config("gemma4_mtp", "none")


@pytest.fixture(scope="module")
def wanted(config: RunConfig) -> Outputs:
    return outputs(NativeEngine(config), few())


def at_step_of(
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
    number: int,
    does: Callable[[NativeEngine, Collected], Collected],
) -> None:
    """Has `rank` do something with what its step `number` collects, once."""
    step, seen = NativeEngine.step, [0]

    def stepped(engine: NativeEngine) -> Collected:
        collected = step(engine)
        if current().rank == rank:
            seen[0] += 1
            if seen[0] == number:
                return does(engine, collected)
        return collected

    monkeypatch.setattr(NativeEngine, "step", stepped)


# ---------------------------------------------------------------- the same as one process


def test_every_call_is_made_by_every_rank(config: RunConfig, wanted: Outputs) -> None:
    alone = NativeEngine(config)
    plain = outputs(alone.baseline(), few(3))
    logits = alone.next_token_logits([5, 6, 7])

    def lab(engine: Engine) -> None:
        engine.prepare(requests_of(engine))
        baseline = engine.baseline()
        assert np.array_equal(engine.next_token_logits([5, 6, 7]), logits)
        assert outputs(baseline, few(3)) == plain
        assert np.array_equal(baseline.next_token_logits([5, 6, 7]), logits)
        assert engine.profile_step(requests_of(engine)) is None  # on a CPU
        assert engine.profile_phases(requests_of(engine)) is None
        assert outputs(engine, few(), 3) == wanted
        assert engine.num_built() == alone.num_built()
        assert engine.info.devices == ["cpu"] * 4
        assert engine.info.max_memory_bytes["weights"] == alone.info.memory_bytes["weights"]
        assert engine.info.memory_bytes == alone.info.memory_bytes

    over_ranks(Layout(tensor=2, data=2), config, lab)


SPLITS = {
    "tp2": Layout(tensor=2),
    "pp2": Layout(pipeline=2),
    "tp2_pp2": Layout(tensor=2, pipeline=2),
    "pp2_dp2": Layout(pipeline=2, data=2),
}


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, id=name, marks=[pytest.mark.slow] if name != "pp2_dp2" else [])
        for name, layout in SPLITS.items()
    ],
)
def test_ranks_that_divide_the_layers(layout: Layout, config: RunConfig, wanted: Outputs) -> None:
    """Logits, a baseline, runs that are closed with steps in flight, and a whole one."""
    alone = NativeEngine(config)
    plain = outputs(alone.baseline(), few(3))
    logits = alone.next_token_logits([5, 6, 7])

    def lab(engine: Engine) -> None:
        assert np.allclose(engine.next_token_logits([5, 6, 7]), logits, rtol=0, atol=1e-9)
        assert outputs(engine.baseline(), few(3)) == plain
        for num_events in (1, 6):
            with closing(engine.run(requests_of(engine), concurrency=3)) as events:
                for _ in range(num_events):
                    next(events)
        assert outputs(engine, few(), 4) == wanted

    over_ranks(layout, config, lab, splits=True)


# ---------------------------------------------------------------- early ends


@pytest.mark.parametrize(
    ("layout", "ahead"),
    [
        pytest.param(PAIR, True, id="tp2-ahead"),
        pytest.param(REPLICAS, False, id="dp2"),
        # What the two quick ones leave out: another layout with the same steps in flight.
        pytest.param(PAIR, False, id="tp2", marks=pytest.mark.slow),
        pytest.param(REPLICAS, True, id="dp2-ahead", marks=pytest.mark.slow),
    ],
)
def test_a_run_may_be_closed_anywhere(layout: Layout, ahead: bool, wanted: Outputs) -> None:
    """Before the first event, at a record, between completions: the next run is a whole one."""
    config = graph_config("gemma4_mtp", "none")
    config.engine.async_scheduling = ahead

    def lab(engine: Engine) -> None:
        requests = requests_of(engine)
        engine.run(requests, concurrency=3).close()  # not begun
        for num_events in (1, 2, 8):
            with closing(engine.run(requests, concurrency=3)) as events:
                for _ in range(num_events):
                    next(events)
            assert outputs(engine, few(2)).items() <= wanted.items()
        assert outputs(engine, few()) == wanted

    over_ranks(layout, config, lab)


def test_an_interrupt_waits_for_the_end_of_a_step(
    config: RunConfig, wanted: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the main thread, where signals arrive: the step ends on both ranks, and both go on."""
    store = dist.HashStore()

    def rank_of(rank: int) -> Ranks:
        return Ranks(layout=PAIR, rank=rank, control=Control(store, PAIR, rank))

    def second() -> None:
        with acting_as(rank_of(1)):
            follow(config)

    ended_steps: list[Collected] = []

    def interrupted(engine: NativeEngine, collected: Collected) -> Collected:
        signal.raise_signal(signal.SIGINT)
        ended_steps.append(collected)
        return collected

    at_step_of(monkeypatch, 0, 3, interrupted)
    thread = threading.Thread(target=second)
    thread.start()
    with acting_as(rank_of(0)), closing(ParallelEngine(config)) as engine:
        events = engine.run(requests_of(engine), concurrency=None)
        with pytest.raises(KeyboardInterrupt):
            list(events)
        assert ended_steps
        assert outputs(engine, few()) == wanted
    thread.join(10)
    assert not thread.is_alive()


# ---------------------------------------------------------------- errors


def _fails(engine: NativeEngine, collected: Collected) -> Collected:
    raise OSError("the disk of this rank is full")


def _not_finite(engine: NativeEngine, collected: Collected) -> Collected:
    return Collected(collected.record, collected.completions, NotFiniteError("2", 4, "float64"))


def list_run(engine: Engine) -> None:
    list(engine.run(requests_of(engine), concurrency=None))


@BOTH
def test_an_error_of_another_rank_ends_the_call(
    layout: Layout, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_step_of(monkeypatch, 1, 3, _fails)

    def lab(engine: Engine) -> None:
        with pytest.raises(RankError, match="rank 1: OSError: the disk of this rank is full"):
            list_run(engine)
        if layout == PAIR:  # a replica of one rank is as it was before the run
            with pytest.raises(RankError, match="no further call"):
                engine.next_token_logits([1, 2])

    if layout == PAIR:
        with pytest.raises(OSError, match="the disk"):  # rank 1 ends with its own
            over_ranks(layout, config, lab)
    else:
        over_ranks(layout, config, lab)


@BOTH
def test_an_error_of_the_first_rank_ends_the_others(
    layout: Layout, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_step_of(monkeypatch, 0, 3, _fails)

    def lab(engine: Engine) -> None:
        with pytest.raises(OSError, match="the disk"):
            list_run(engine)

    if layout == PAIR:
        with pytest.raises(RankError, match="rank 0: OSError"):  # rank 1
            over_ranks(layout, config, lab)
    else:
        over_ranks(layout, config, lab)


def test_a_rank_that_fails_leaves_none_waiting_for_its_sums(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With layers that ranks share, the other rank is in the middle of a step."""
    config = graph_config("none", "none")
    at_step_of(monkeypatch, 1, 3, _fails)

    def lab(engine: Engine) -> None:
        with pytest.raises(RankError, match="rank 1: OSError: the disk of this rank is full"):
            list_run(engine)

    with pytest.raises(OSError, match="the disk"):
        over_ranks(PAIR, config, lab, splits=True)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_replica_whose_logits_are_not_finite_ends_the_run_on_all(
    rank: int, config: RunConfig, wanted: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_step_of(monkeypatch, rank, 4, _not_finite)

    def lab(engine: Engine) -> None:
        with pytest.raises(NotFiniteError) as raised:
            list_run(engine)
        assert (raised.value.request_id, raised.value.position) == ("2", 4)
        assert str(raised.value) == str(NotFiniteError("2", 4, "float64"))
        assert outputs(engine, few()) == wanted

    over_ranks(REPLICAS, config, lab)


def test_an_error_that_ranks_share_leaves_them_ready(
    config: RunConfig, wanted: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, seen = NativeEngine.step, {0: 0, 1: 0}

    def stepped(engine: NativeEngine) -> Collected:
        collected = step(engine)
        seen[current().rank] += 1
        return _not_finite(engine, collected) if seen[current().rank] == 4 else collected

    monkeypatch.setattr(NativeEngine, "step", stepped)

    def lab(engine: Engine) -> None:
        with pytest.raises(NotFiniteError):
            list_run(engine)
        assert outputs(engine, few()) == wanted

    over_ranks(PAIR, config, lab)


def test_a_rank_that_cannot_load_ends_all_with_its_error(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank has loaded and waits for the size of the cache."""
    new_cache = sizing.plan_num_blocks

    def planned(*args: object) -> list[int]:
        if current().rank == 1:
            raise CheckpointError("shard 2 cannot be read", key="target.checkpoint")
        return new_cache(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(sizing, "plan_num_blocks", planned)
    raised: list[CheckpointError] = []

    def build() -> Iterator[None]:
        try:
            over_ranks(PAIR, config, lambda engine: None)
        except CheckpointError as error:
            raised.append(error)
            yield

    assert len(list(build())) == 1
    assert (str(raised[0]), raised[0].key) == ("shard 2 cannot be read", "target.checkpoint")


def test_ranks_that_finish_other_requests_are_noticed(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drops(engine: NativeEngine, collected: Collected) -> Collected:
        return Collected(collected.record, [*collected.completions, *collected.completions])

    step = NativeEngine.step

    def stepped(engine: NativeEngine) -> Collected:
        collected = step(engine)
        return drops(engine, collected) if current().rank == 1 else collected

    monkeypatch.setattr(NativeEngine, "step", stepped)

    def lab(engine: Engine) -> None:
        with pytest.raises(RankError, match="the tokens of the two differ"):
            list_run(engine)

    with pytest.raises(RankError, match="the tokens of the two differ"):
        over_ranks(PAIR, config, lab)


# ---------------------------------------------------------------- agreement


def test_the_smallest_cache_is_everyones(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = sizing.plan_num_blocks

    def planned(*args: object) -> list[int]:
        found = plan(*args)  # type: ignore[arg-type]
        return [found[0] - current().rank, found[1] + current().rank]

    monkeypatch.setattr(sizing, "plan_num_blocks", planned)
    alone = NativeEngine(config).parts.runner.kv.num_blocks

    def lab(engine: Engine) -> list[int]:
        assert isinstance(engine, ParallelEngine)
        return engine._engine.parts.runner.kv.num_blocks

    assert over_ranks(Layout(tensor=2, data=2), config, lab) == [alone[0] - 3, alone[1]]


def test_a_graph_that_one_rank_has_no_memory_for_is_dropped_by_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both capture a way of sampling late; the second rank's device is full."""
    attention_as_on_devices(monkeypatch)
    backends = {rank: SmallMemory() for rank in (0, 1)}
    whole = loading.assemble

    def assemble(*args: Any, **kwargs: Any) -> loading.Loaded:
        return whole(*args, **{"backend": backends[current().rank], **kwargs})

    def sampled() -> list[Request]:
        return zoo_requests(3, longest=6, temperature=0.9)

    wanted = outputs(NativeEngine(graph_config("none", "none")), sampled())
    monkeypatch.setattr(loading, "assemble", assemble)

    def lab(engine: Engine) -> None:
        backends[1].num_left = 0
        assert outputs(engine, sampled()) == wanted
        assert all("without CUDA graphs" in warning for warning in engine.info.warnings)
        assert len(engine.info.warnings) == 2, "the rank that had no memory, and the other"
        num_replays = backends[0].num_replays
        assert outputs(engine, sampled()) == wanted
        assert backends[0].num_replays == num_replays
        assert not backends[1].num_refused, "a capture was begun, which exchanges with other ranks"

    over_ranks(PAIR, graph_config("none", "full"), lab)
