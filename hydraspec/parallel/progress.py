"""Progress of ranks: a few numbers per rank, from which the one that stands still is found.

Only changes of these numbers count, never the ranks' clocks, so that one rank can judge those of
several hosts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from hydraspec.parallel.faults import Fault, Kind

STOPPED_S = 10.0  # without a sign of life; the thread that gives it needs the processor rarely
TO_IMPORT_S = 60.0  # the same before the first step: loading a library stops all threads
OWN_PAUSE_S = 2.0  # a judge that slept for so long was stopped itself


@dataclass(slots=True, frozen=True)
class Signs:
    """Numbers that show the progress of one rank."""

    ticks: int = 0  # counted by a thread that does nothing else
    moves: int = 0  # changes of the main thread's state: steps, and waits for other ranks
    steps: int = 0
    state: int = 0  # see State


class State:
    """Activities of the main thread."""

    idle, busy, waiting = range(3)  # outside a step, in one, in one and waiting for other ranks


class Progress:
    """A rank's own signs of life, posted at every tick and as each step begins."""

    def __init__(self, post: Callable[[Signs], None] = lambda signs: None) -> None:
        self._post = post
        self._ticks = self._moves = self.num_steps = 0
        self._state = State.idle

    def tick(self) -> None:
        """Post that the process runs."""
        self._ticks += 1
        self._post(self.signs())

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context of a step, in which the rank has to make progress."""
        self.num_steps += 1
        self._move(State.busy)
        self._post(self.signs())
        try:
            yield
        finally:
            self._move(State.idle)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Context of a wait for other ranks, within a step or outside."""
        before = self._state
        self._move(State.waiting if before != State.idle else State.idle)
        try:
            yield
        finally:
            self._move(before)

    def _move(self, state: int) -> None:
        self._moves += 1
        self._state = state

    def signs(self) -> Signs:
        """The signs as of now."""
        return Signs(self._ticks, self._moves, self.num_steps, self._state)


@dataclass(slots=True)
class _Seen:
    signs: Signs
    ticked: float  # when its ticks changed last
    moved: float


@dataclass(slots=True)
class Judge:
    """Finds the rank that stands still and for which the others wait.

    Attributes:
        timeout_s: seconds for which a step may go without any progress.
        silence: a guess why a process gives no sign of life.
        is_stopped: returns whether the process of a rank is known to be stopped by a signal.
    """

    num_ranks: int
    timeout_s: float
    silence: str = "it was stopped (SIGSTOP), or got no processor"
    is_stopped: Callable[[int], bool] = lambda rank: False
    _seen: dict[int, _Seen] = field(default_factory=dict)
    _looked: float = 0.0

    @property
    def stopped_s(self) -> float:
        """Seconds for which a process may give no sign of life: less than timeout_s, so that it is
        named rather than those that wait for it."""
        return min(STOPPED_S, self.timeout_s * 2 / 3)

    def look(self, signs: Mapping[int, Signs]) -> Fault | None:
        """Compare signs, by rank, with earlier ones; returns the fault of a rank that stands still,
        or None. Called about once a second or more often."""
        now = time.monotonic()
        paused = now - self._looked > OWN_PAUSE_S
        self._looked = now
        for rank, found in signs.items():
            seen = self._seen.get(rank)
            if seen is None or paused:
                self._seen[rank] = _Seen(found, now, now)
                continue
            if found.ticks != seen.signs.ticks:
                seen.ticked = now
            if found.moves != seen.signs.moves or found.state == State.idle:
                seen.moved = now
            seen.signs = found
        return self._stopped(now) or self._stuck(now)

    def _stopped(self, now: float) -> Fault | None:
        for rank, seen in self._seen.items():
            if not seen.signs.ticks or now - seen.ticked <= self.stopped_s:
                continue
            may_import = not (seen.signs.steps or self.is_stopped(rank))
            limit_s = TO_IMPORT_S if may_import else self.stopped_s
            if now - seen.ticked > limit_s:
                what = f"gave no sign of life for {limit_s:g} s"
                return self._fault(rank, seen, what, self.silence)
        return None

    def _stuck(self, now: float) -> Fault | None:
        stuck = {r: s for r, s in self._seen.items() if now - s.moved > self.timeout_s}
        if not stuck:
            return None
        computing = [r for r, s in stuck.items() if s.signs.state == State.busy]
        # If none computes, the rank that others wait for is the least far, or has left its step.
        rank = min(
            computing or self._seen,
            key=lambda r: (
                self._seen[r].signs.steps,
                self._seen[r].signs.state == State.waiting,
                r,
            ),
        )
        what = f"made no progress for {self.timeout_s:g} s"
        why = "where steps take so long raise parallelism.timeout_s"
        return self._fault(rank, self._seen[rank], what, why)

    def _fault(self, rank: int, seen: _Seen, what: str, why: str) -> Fault:
        return Fault(
            rank=rank,
            num_ranks=self.num_ranks,
            kind=Kind.hung,
            step=seen.signs.steps,
            what=what,
            why=why,
            time=time.time(),
        )
