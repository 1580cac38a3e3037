"""Phase times of a device: events around the verbs of eager steps, and the engine as it was
afterwards. On a CPU, with events of a made-up device that takes a known time for each verb."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from graph_runs import (
    attention_as_on_devices,
    graph_config,
    make_graph_engine,
    run_requests,
    zoo_requests,
)
from recorded_graphs import RecordedOps

from hydraspec.engine.native import NativeEngine
from hydraspec.engine.run.device_runner import DeviceRunner
from hydraspec.engine.run.profiling import (
    MAX_STEPS,
    EventClock,
    milliseconds,
    profile_phases,
    profile_step,
)
from hydraspec.engine.schedule.sequence import Sequence
from hydraspec.types import PHASES

VERB_MS = {"place": 1.0, "prepare": 2.0, "forward": 30.0, "verify": 4.0, "commit": 5.0}
PROPOSE_MS = 6.0
WANTED = {"prepare": 3.0, "forward": 30.0, "verify": 9.0, "propose": 6.0}


@dataclass
class FakeDevice:
    """A clock that moves only where work is given to it."""

    now: float = 0.0
    num_waits: int = 0

    def event(self) -> FakeEvent:
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.at: float | None = None

    def record(self) -> None:
        assert self.at is None
        self.at = self._device.now

    def synchronize(self) -> None:
        self._device.num_waits += 1

    def elapsed_time(self, end_event: FakeEvent) -> float:
        assert self.at is not None
        assert end_event.at is not None
        return end_event.at - self.at


def give_work(engine: NativeEngine, device: FakeDevice, patch: pytest.MonkeyPatch) -> None:
    runner = engine.parts.runner

    def costing(true: Callable[..., Any], cost: float) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            device.now += cost
            return true(*args)

        return call

    for verb, cost in {**VERB_MS, "propose": PROPOSE_MS}.items():
        patch.setattr(runner, verb, costing(getattr(runner, verb), cost))


def test_a_device_profile_sums_verbs_by_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    """No graph is replayed meanwhile, also none of the drafter; afterwards they are."""
    attention_as_on_devices(monkeypatch)
    config = graph_config("eagle3", "full_and_piecewise", sizes=(5,))
    config.engine.async_scheduling = True
    backend = RecordedOps()
    engine = make_graph_engine(config, backend)
    wanted = run_requests(engine, zoo_requests(3))
    device = FakeDevice()
    requests = zoo_requests(3)
    engine.tokenize(requests)
    with pytest.MonkeyPatch.context() as patch:
        give_work(engine, device, patch)
        num_replays = backend.num_replays
        found = profile_phases(engine, requests, device.event)
        assert backend.num_replays == num_replays, "a graph ran in a profile"
    assert found is not None
    assert list(found) == list(PHASES)
    assert found.pop("schedule") > 0
    assert found == pytest.approx(WANTED)
    again = run_requests(engine, zoo_requests(3))
    assert again.outputs == wanted.outputs
    assert backend.num_replays > num_replays
    assert isinstance(engine.parts.runner, DeviceRunner)
    assert engine._num_ahead


def test_no_step_waits_for_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events are read once the last step has run, and steps that read prompts do not count."""
    engine = make_graph_engine(graph_config("none", "none"), None)
    device = FakeDevice()
    waits: list[int] = []
    steps: list[bool] = []
    step = engine.step

    def watched():  # type: ignore[no-untyped-def]
        collected = step()
        waits.append(device.num_waits)
        assert collected.record is not None
        steps.append(any(part.is_prefill for part in collected.record.requests))
        return collected

    monkeypatch.setattr(engine, "step", watched)
    requests = zoo_requests(5, longest=60)
    for request in requests:
        request.sampling.max_tokens, request.sampling.ignore_eos = 100, True
    engine.tokenize(requests)
    assert profile_phases(engine, requests, device.event) is not None
    assert not any(waits)
    assert steps.count(False) == MAX_STEPS
    assert steps[0]
    assert device.num_waits == 6 * (MAX_STEPS - 2)
    assert not engine.parts.scheduler.running, "the profile left requests running"


def test_prompts_may_take_more_steps_than_a_profile_has() -> None:
    """Long prompts in small chunks; of many requests, as many are read as fit into a batch."""
    engine = make_graph_engine(graph_config("none", "none", max_num_batched_tokens=5), None)
    requests = zoo_requests(9)
    for request in requests:
        request.sampling.max_tokens, request.sampling.ignore_eos = 8, True
        request.messages, request.prompt_token_ids = None, [5 + n % 40 for n in range(60)]
    taken = []
    add = engine._scheduler.add

    def watched(sequence: Sequence) -> None:
        taken.append(sequence.request.index)
        add(sequence)

    engine._scheduler.add = watched  # type: ignore[method-assign]
    assert profile_phases(engine, requests, FakeDevice().event) is not None
    assert taken == [0, 1, 2, 3, 4]


def test_a_step_profile_is_of_steps_as_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are replayed in it, and the engine is afterwards as it was."""
    attention_as_on_devices(monkeypatch)
    config = graph_config("eagle3", "full_and_piecewise", sizes=(5,))
    config.engine.async_scheduling = True
    backend = RecordedOps()
    engine = make_graph_engine(config, backend)
    requests = zoo_requests(3)
    engine.tokenize(requests)
    device = FakeDevice()
    num_replays, clock = backend.num_replays, engine.parts.runner.clock
    found = profile_step(engine, requests, device.event)
    assert found is not None
    assert backend.num_replays > num_replays
    assert found.step_ms > found.launch_ms > 0
    assert found.schedule_ms > 0
    assert found.device_ms == 0, "this device does nothing"
    assert engine.parts.runner.clock is clock
    assert not engine.parts.scheduler.running


def test_only_prompts_give_no_profile() -> None:
    engine = make_graph_engine(graph_config("none", "none"), None)
    requests = zoo_requests(2)
    for request in requests:
        request.sampling.max_tokens = 1
    engine.tokenize(requests)
    assert profile_phases(engine, requests, FakeDevice().event) is None
    assert profile_step(engine, requests, FakeDevice().event) is None
    assert engine.profile_phases(requests) is None, "a CPU measures phases in every step"
    assert engine.profile_step(requests) is None


def test_spans_of_a_phase_are_added() -> None:
    device = FakeDevice()
    clock = EventClock(device.event, PHASES)
    for phase, cost in (("verify", 1.0), ("forward", 2.0), ("verify", 4.0)):
        with clock(phase):
            device.now += cost
    with clock("device"):  # is not one of these phases
        device.now += 8.0
    spans = clock.take()
    assert milliseconds(spans) == dict.fromkeys(PHASES, 0.0) | {"verify": 5.0, "forward": 2.0}
    assert all(a.end.at == b.begin.at for a, b in pairwise(spans))  # type: ignore[attr-defined]
    assert clock.take() == []
