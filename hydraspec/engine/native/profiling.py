"""What the phases of a decode step take on a device: a short run of its own, in eager steps.

Steps that replay graphs have no phases to see, and timing them would cost what graphs save. So this
run has no graphs, and its launches take the host longer than the device: it says where the work
is, not how fast steps are.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from typing import Any, ParamSpec, Protocol, TypeVar

from hydraspec.engine.base import StepProfile
from hydraspec.engine.native.loading import Loaded
from hydraspec.engine.native.timing import PHASES, Clock, HostClock, PhaseClock
from hydraspec.types import Completion, Request, StepRecord

MAX_STEPS = 32  # decode steps
UNSETTLED_STEPS = 2  # first decode steps, which load kernels; left out where others follow

P = ParamSpec("P")
R = TypeVar("R")


class Profiled(Protocol):
    """What is asked of the engine."""

    parts: Loaded

    def run(
        self, requests: Sequence[Request], *, concurrency: int | None
    ) -> Generator[StepRecord | Completion]: ...

    def scheduling_timed_by(self, clock: Clock) -> AbstractContextManager[None]: ...

    def launches_timed_by(self, clock: Clock, device: Clock) -> AbstractContextManager[None]: ...


class Event(Protocol):
    """What is asked of `torch.cuda.Event(enable_timing=True)`."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: Any, /) -> float:
        """Milliseconds of the device between this event and a later one."""
        ...


class EventClock:
    """Puts events around calls, in the order of the device's work. Nobody waits for them before
    `milliseconds`."""

    def __init__(self, make_event: Callable[[], Event]) -> None:
        self._make_event = make_event
        self._spans: list[tuple[str, Event, Event]] = []

    def timed(self, phase: str, function: Callable[P, R]) -> Callable[P, R]:
        """`function` between two events of `phase`."""

        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            begin, end = self._make_event(), self._make_event()
            begin.record()
            result = function(*args, **kwargs)
            end.record()
            self._spans.append((phase, begin, end))
            return result

        return call

    def take(self) -> list[tuple[str, Event, Event]]:
        """The spans since the last call."""
        spans, self._spans = self._spans, []
        return spans


def milliseconds(spans: Sequence[tuple[str, Event, Event]]) -> dict[str, float]:
    """Sums by phase; waits until the device has passed the last event."""
    found = dict.fromkeys(PHASES, 0.0)
    for span in spans:
        found[span[0]] += elapsed([span])
    return found


def elapsed(spans: Sequence[tuple[str, Event, Event]]) -> float:
    """Milliseconds of all spans together; waits until the device has passed the last event."""
    found = 0.0
    for _, begin, end in spans:
        end.synchronize()
        found += begin.elapsed_time(end)
    return found


def profile(
    engine: Profiled, requests: Sequence[Request], make_event: Callable[[], Event]
) -> dict[str, float] | None:
    """Mean milliseconds per decode step of each phase, the host's for `schedule` and the device's
    for the others, over at most MAX_STEPS of them; None where no step only decodes.

    Of the requests, as many run as fit into a batch: those behind would bring prefills all along.
    """
    clock, host = EventClock(make_event), PhaseClock(enabled=True)
    steps: list[tuple[list[tuple[str, Event, Event]], float]] = []
    batch = requests[: engine.parts.config.engine.max_num_seqs]
    events = engine.run(batch, concurrency=None)
    with _timed(engine, clock, host), closing(events):
        host.start()
        for event in events:
            if not isinstance(event, StepRecord):
                continue
            spans, scheduled = clock.take(), host.phase_ms()["schedule"]
            host.start()
            if not any(part.is_prefill for part in event.requests):
                steps.append((spans, scheduled or 0.0))
            if len(steps) == MAX_STEPS:
                break
    if len(steps) > UNSETTLED_STEPS:
        steps = steps[UNSETTLED_STEPS:]
    if not steps:
        return None
    phases = [milliseconds(spans) | {"schedule": scheduled} for spans, scheduled in steps]
    return {name: sum(step[name] for step in phases) / len(phases) for name in PHASES}


def profile_steps(
    engine: Profiled, requests: Sequence[Request], make_event: Callable[[], Event]
) -> StepProfile | None:
    """Means over at most MAX_STEPS decode steps that run as in a measured round, with graphs and
    steps ahead of results; None where too few steps only decode.

    A step that is launched ahead is timed with the step whose results come next: over a run of
    decode steps the means are those of one step.
    """
    host, device = HostClock(), EventClock(make_event)
    steps: list[tuple[float, dict[str, float], list[tuple[str, Event, Event]]]] = []
    batch = requests[: engine.parts.config.engine.max_num_seqs]
    events = engine.run(batch, concurrency=None)
    with engine.launches_timed_by(host, device), closing(events):
        for event in events:
            if not isinstance(event, StepRecord):
                continue
            times, spans = host.take(), device.take()
            if not any(part.is_prefill for part in event.requests):
                steps.append((event.total_ms, times, spans))
            if len(steps) == MAX_STEPS:
                break
    settled = steps[UNSETTLED_STEPS:]
    if not settled:
        return None

    def mean(values: list[float]) -> float:
        return sum(values) / len(settled)

    return StepProfile(
        step_ms=mean([total for total, _, _ in settled]),
        device_ms=mean([elapsed(spans) for _, _, spans in settled]),
        schedule_ms=mean([times.get("schedule", 0.0) for _, times, _ in settled]),
        launch_ms=mean([times.get("launch", 0.0) for _, times, _ in settled]),
    )


@contextmanager
def _timed(engine: Profiled, clock: EventClock, host: PhaseClock) -> Iterator[None]:
    """The engine without graphs and one step at a time, its verbs timed; as it was afterwards."""
    runner = engine.parts.runner
    with runner.eagerly(), runner.timed_with(clock), engine.scheduling_timed_by(host):
        yield
