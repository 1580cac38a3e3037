"""Wall time of a step, and of its phases where the host runs it: on CUDA a launch returns before
the work is done, and a host that runs ahead does two steps' work at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ParamSpec, Protocol, TypeVar

from hydraspec.types import PHASES as PHASES

P = ParamSpec("P")
R = TypeVar("R")


class Clock(Protocol):
    """Takes the time of calls."""

    def timed(self, phase: str, function: Callable[P, R]) -> Callable[P, R]:
        """`function`, with what it takes added to `phase`."""
        ...


class HostClock:
    """Wall milliseconds of calls by name, since the last `take`."""

    def __init__(self) -> None:
        self._ms: dict[str, float] = {}

    def timed(self, phase: str, function: Callable[P, R]) -> Callable[P, R]:
        """`function`, with its wall time added to `phase`."""

        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                taken = (time.perf_counter() - begin) * 1e3
                self._ms[phase] = self._ms.get(phase, 0.0) + taken

        return call

    def take(self) -> dict[str, float]:
        """What was taken since the last call."""
        taken, self._ms = self._ms, {}
        return taken


class PhaseClock:
    """Accumulates seconds per phase since `start`. Disabled, phases read null and only the total is
    taken.

    A launch counts for the step that is launched: where the host runs a step ahead, the time to
    launch a prompt is no part of the decode step whose results it has not collected yet.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._started = self._launching = 0.0

    def start(self) -> None:
        self._started, self._launching = time.perf_counter(), 0.0
        for phase in PHASES:
            self._seconds[phase] = 0.0

    def timed(self, phase: str, function: Callable[P, R]) -> Callable[P, R]:
        """`function`, with its wall time added to `phase`."""
        if not self._enabled:
            return function

        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            begin = time.perf_counter()
            result = function(*args, **kwargs)
            self._seconds[phase] += time.perf_counter() - begin
            return result

        return call

    def launched(self, seconds: float) -> None:
        """A step was launched since `start`, which took so long."""
        self._launching += seconds

    def total_ms(self, launch_s: float) -> float:
        """Since `start`, but of the launches only that of the step itself, whenever it was."""
        return (time.perf_counter() - self._started - self._launching + launch_s) * 1e3

    def phase_ms(self) -> dict[str, float | None]:
        return {phase: self._seconds[phase] * 1e3 if self._enabled else None for phase in PHASES}
