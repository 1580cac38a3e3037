"""Clocks of the engine's loop, used as `with clock("forward"):`."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from hydraspec.types import PHASES

_NOTHING = nullcontext()
HOST_DRAFTS = "host_drafts"  # a part of "schedule"
NO_LAUNCH = {"schedule": 0.0, "launch": 0.0}


class Clock(Protocol):
    """Times the body of `with clock(phase):`."""

    def __call__(self, phase: str) -> AbstractContextManager[object]: ...


def no_clock(phase: str) -> AbstractContextManager[object]:
    """A clock that times nothing."""
    return _NOTHING


class _Span:
    """Wall milliseconds spent in the blocks of a phase: their sum, and those of the last block."""

    __slots__ = ("_began", "last_ms", "ms")

    def __init__(self) -> None:
        self.ms = self.last_ms = 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        self.last_ms = (time.perf_counter() - self._began) * 1e3
        self.ms += self.last_ms


class StepClock:
    """Wall time of a step on the host, and of its phases since `start`.

    The phases are those of the device's work only where the host itself does that work, one step at
    a time: on CUDA a launch returns before the work is done.

    Scheduling and launching count for the step that is launched: where the host runs a step ahead,
    the time to launch a prompt is no part of the decode step whose results it collects next.
    """

    def __init__(self, *, has_phases: bool) -> None:
        """has_phases: every phase of a step is timed with this clock."""
        self._has_phases = has_phases
        self._spans = defaultdict[str, _Span](_Span)
        self._started = 0.0
        self.last_launch_ms: dict[str, float] = {}  # of the step that ended last

    def __call__(self, phase: str) -> AbstractContextManager[object]:
        return self._spans[phase]

    def start(self, ended_launch_ms: Mapping[str, float] = NO_LAUNCH) -> None:
        """Begin a step. ended_launch_ms: `launch_ms` of the step that ended before it."""
        self.last_launch_ms = dict(ended_launch_ms)
        for span in self._spans.values():
            span.ms = 0.0
        self._started = time.perf_counter()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of the block out of every step's."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._started += time.perf_counter() - began

    def launch_ms(self) -> dict[str, float]:
        """Milliseconds of the newest "schedule" and the newest "launch"."""
        return {phase: self._spans[phase].last_ms for phase in NO_LAUNCH}

    def total_ms(self, launch_ms: Mapping[str, float]) -> float:
        """Milliseconds since `start`, with the step's own `launch_ms` in place of all launching
        since then, which may be other steps'."""
        elapsed = (time.perf_counter() - self._started) * 1e3
        launching = sum(self._spans[phase].ms for phase in NO_LAUNCH)
        return elapsed - launching + sum(launch_ms.values())

    def phase_ms(self) -> dict[str, float | None]:
        """Milliseconds by phase in PHASES; None where phases are not timed. Drafting on the host is
        part of "propose", though it is a part of scheduling."""
        if not self._has_phases:
            return dict.fromkeys(PHASES)
        found: dict[str, float | None] = {phase: self._spans[phase].ms for phase in PHASES}
        drafting = self._spans[HOST_DRAFTS].ms
        found["schedule"] = self._spans["schedule"].ms - drafting
        found["propose"] = self._spans["propose"].ms + drafting
        return found
