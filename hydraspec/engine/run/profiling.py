"""Breakdown of a decode step's time on a device, from two short runs with events around the work.

Steps that replay graphs show no phases, so phases are those of eager steps: they say where the work
is, not how fast steps are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from hydraspec.engine.base import StepProfile
from hydraspec.engine.run.timing import no_clock
from hydraspec.types import PHASES, Request, StepRecord

if TYPE_CHECKING:
    from hydraspec.engine.native import NativeEngine

MAX_STEPS = 32  # decode steps
UNSETTLED_STEPS = 2  # first decode steps, which load kernels; left out where others follow


class Event(Protocol):
    """The methods of `torch.cuda.Event(enable_timing=True)` that a profile uses."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: Any, /) -> float:
        """Milliseconds of the device between this event and a later one."""
        ...


MakeEvent: TypeAlias = Callable[[], Event]


@dataclass(slots=True, frozen=True)
class Span:
    """A phase on the device, between two events."""

    phase: str
    begin: Event
    end: Event


class EventClock:
    """Puts events around phases, in the order of the device's work. The host waits for them only in
    `milliseconds`."""

    def __init__(self, make_event: MakeEvent, phases: Sequence[str]) -> None:
        """phases: names of the phases to time; others are not timed."""
        self._make_event, self._phases = make_event, frozenset(phases)
        self._spans: list[Span] = []

    def __call__(self, phase: str) -> AbstractContextManager[object]:
        return self._timed(phase) if phase in self._phases else no_clock(phase)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        span = Span(phase, self._make_event(), self._make_event())
        span.begin.record()
        yield
        span.end.record()
        self._spans.append(span)

    def take(self) -> list[Span]:
        """The spans since the last call."""
        spans, self._spans = self._spans, []
        return spans


def milliseconds(spans: Sequence[Span], phases: Sequence[str] = PHASES) -> dict[str, float]:
    """Milliseconds by phase, summed over `spans`; waits until the device has passed them."""
    found = dict.fromkeys(phases, 0.0)
    for span in spans:
        span.end.synchronize()
        found[span.phase] += span.begin.elapsed_time(span.end)
    return found


@dataclass(slots=True, frozen=True)
class _TimedStep:
    total_ms: float
    launch_ms: dict[str, float]
    spans: list[Span]


def _decode_steps(
    engine: NativeEngine, requests: Sequence[Request], clock: EventClock
) -> list[_TimedStep]:
    """Times of at most MAX_STEPS steps that only decode. Only as many requests run as fit into a
    batch: further ones would mix prefills into the steps."""
    steps: list[_TimedStep] = []
    batch = requests[: engine.parts.config.engine.max_num_seqs]
    with closing(engine.run(batch, concurrency=None)) as events:
        for event in events:
            if not isinstance(event, StepRecord):
                continue
            spans = clock.take()
            if not any(part.is_prefill for part in event.requests):
                steps.append(_TimedStep(event.total_ms, engine.clock.last_launch_ms, spans))
            if len(steps) == MAX_STEPS:
                break
    return steps


def profile_phases(
    engine: NativeEngine, requests: Sequence[Request], make_event: MakeEvent
) -> dict[str, float] | None:
    """Mean milliseconds per decode step of each phase, the host's for `schedule` and the device's
    for the others; None where no step only decodes. Steps run without graphs, one at a time.
    """
    clock = EventClock(make_event, PHASES)
    with engine.parts.runner.eagerly(), engine.timed_by(clock, ahead=False):
        steps = _decode_steps(engine, requests, clock)
    settled = steps[UNSETTLED_STEPS:] or steps
    if not settled:
        return None
    phases = [milliseconds(s.spans) | {"schedule": s.launch_ms["schedule"]} for s in settled]
    return {name: sum(step[name] for step in phases) / len(phases) for name in PHASES}


def profile_step(
    engine: NativeEngine, requests: Sequence[Request], make_event: MakeEvent
) -> StepProfile | None:
    """Means over decode steps that run as in a measured round, with graphs and ahead of results;
    None where too few steps only decode.

    The events of a step that is launched ahead are read with the results of the step before it:
    over a run of decode steps the means are those of one step.
    """
    clock = EventClock(make_event, ["device"])
    with engine.timed_by(clock, ahead=True):
        settled = _decode_steps(engine, requests, clock)[UNSETTLED_STEPS:]
    if not settled:
        return None

    def mean(values: list[float]) -> float:
        return sum(values) / len(settled)

    return StepProfile(
        step_ms=mean([step.total_ms for step in settled]),
        device_ms=mean([milliseconds(step.spans, ["device"])["device"] for step in settled]),
        schedule_ms=mean([step.launch_ms["schedule"] for step in settled]),
        launch_ms=mean([step.launch_ms["launch"] for step in settled]),
    )
