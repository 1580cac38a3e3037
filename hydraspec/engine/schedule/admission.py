"""Admission of requests to steps, and the end of a run: decided alone, or by the first rank of a
replica, which the others obey."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Protocol

from hydraspec.engine.turns import Conversations
from hydraspec.parallel.control import Control, RankError
from hydraspec.signals import interrupts_held_back
from hydraspec.types import Request

LONGEST_SLEEP_S = 0.1  # while no request has arrived; between two looks at the other ranks


def most_of_replica(
    num_conversations: int, concurrency: int | None, max_num_seqs: int, num_replicas: int
) -> int:
    """Number of requests that a replica may run at once, of conversations of which `concurrency`
    may be in progress on all replicas together (None: any number)."""
    together = min(concurrency or num_conversations, num_conversations)
    return min(max_num_seqs, -(-together // num_replicas))


class Admission(Protocol):
    """Source of a run's requests, which the engine asks before each step."""

    def joining(self, num_unfinished: int) -> Sequence[Request] | None:
        """The requests that join the next step, beside `num_unfinished` earlier ones; None: the run
        is over, and unfinished requests are dropped. With none unfinished it waits until one joins.
        """
        ...

    def offered_at(self, request: Request) -> float | None:
        """Time (time.perf_counter()) at which a request that has joined was offered; None: when it
        joined."""
        return None

    def cancelled(self) -> Sequence[int]:
        """Indices of requests to end before the step, cancelled since the last call. It is called
        after `joining`; some may not have joined yet, or have ended."""
        return ()

    def ended(self, index: int) -> None:
        """Record that request `index` has ended: the next turn of its conversation may join."""
        return None

    def close(self) -> None:
        """End the run, early or not."""
        return None


class Cancels:
    """Requests of one run, by index, that the caller has cancelled. Any thread may add one."""

    def __init__(self) -> None:
        self._indices: deque[int] = deque()

    def add(self, index: int) -> None:
        self._indices.append(index)

    def take(self) -> list[int]:
        """Requests that were added since the last call."""
        return [self._indices.popleft() for _ in range(len(self._indices))]


class Arrivals:
    """The times at which the requests of one run arrive: `Request.arrival_s` after its start, which
    is the first call of `due_in`."""

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._start: float | None = None

    def due_in(self, request: Request) -> float:
        """Seconds until a request arrives; 0 or less once it has."""
        if self._start is None:
            self._start = self._clock()
        if request.arrival_s is None:
            return 0.0
        return self._start + request.arrival_s - self._clock()

    def at(self, request: Request) -> float | None:
        """Time of arrival of a request, by the clock; None: it has none. Call `due_in` before."""
        if request.arrival_s is None or self._start is None:
            return None
        return self._start + request.arrival_s

    def wait_for(self, request: Request, watch: Callable[[], None]) -> None:
        """Sleep until a request arrives. `watch` is called at least every LONGEST_SLEEP_S."""
        while (left := self.due_in(request)) > 0:
            watch()
            self._sleep(min(left, LONGEST_SLEEP_S))


def by_arrival(requests: Sequence[Request]) -> list[Request]:
    """Requests in the order in which they are offered: by arrival, then in the given order."""
    return sorted(requests, key=lambda request: request.arrival_s or 0.0)


class Pending(Admission):
    """Conversations as they arrive, at most `concurrency` of them in progress (None: any number).
    A conversation in progress keeps its place: its next turn joins at once."""

    def __init__(
        self,
        requests: Sequence[Request],
        concurrency: int | None,
        *,
        cancels: Cancels | None = None,
        watch: Callable[[], None] = lambda: None,
        arrivals: Arrivals | None = None,
    ) -> None:
        """watch: called during waits; raises where a rank is lost."""
        self._conversations = Conversations(requests)
        self._pending = deque(by_arrival(self._conversations.starts))
        self._next_turns: list[Request] = []
        self._limit = concurrency or len(requests)
        self._cancels = cancels or Cancels()
        self._watch, self._arrivals = watch, arrivals or Arrivals()

    def joining(self, num_unfinished: int) -> Sequence[Request] | None:
        found, self._next_turns = self._next_turns, []
        if not found and not num_unfinished:
            if not self._pending:
                return None
            self._arrivals.wait_for(self._pending[0], self._watch)
        while self._pending and num_unfinished + len(found) < self._limit:
            if self._arrivals.due_in(self._pending[0]) > 0:
                break
            found.append(self._pending.popleft())
        return found

    def cancelled(self) -> Sequence[int]:
        return self._cancels.take()

    def ended(self, index: int) -> None:
        if (turn := self._conversations.next_turn(index)) is not None:
            self._next_turns.append(turn)

    def offered_at(self, request: Request) -> float | None:
        return self._arrivals.at(request)


class Leading(Admission):
    """Admission on the first rank of a replica: asks another admission, and announces its answers.

    Interrupts wait for the next call: the other ranks cannot leave a step half done.
    """

    def __init__(self, source: Admission, requests: Sequence[Request], control: Control) -> None:
        self._source, self._control = source, control
        self._topic = _topic(control)
        self._places = {id(request): place for place, request in enumerate(requests)}
        self._held = ExitStack()
        self._cancelled: Sequence[int] = ()
        self._has_ended = False

    def offered_at(self, request: Request) -> float | None:
        return self._source.offered_at(request)

    def joining(self, num_unfinished: int) -> Sequence[Request] | None:
        """See Admission. Raises KeyboardInterrupt if an interrupt came since the last call."""
        self._held.close()
        found = self._source.joining(num_unfinished)
        self._cancelled = self._source.cancelled()
        self._held.enter_context(interrupts_held_back())
        self._announce(num_unfinished, found)
        return found

    def _announce(self, num_unfinished: int, found: Sequence[Request] | None) -> None:
        self._has_ended = found is None
        places = None if found is None else [self._places[id(request)] for request in found]
        message = [num_unfinished, places, self._cancelled]
        self._control.tell(self._control.replica, self._topic, message)

    def cancelled(self) -> Sequence[int]:
        return self._cancelled

    def ended(self, index: int) -> None:
        self._source.ended(index)

    def close(self) -> None:
        with self._held:
            self._source.close()
            if not self._has_ended:
                self._announce(0, None)


class Following(Admission):
    """Admission on another rank of a replica: gives the answers that the first one announces."""

    def __init__(self, requests: Sequence[Request], control: Control) -> None:
        self._requests, self._control = requests, control
        self._topic = _topic(control)
        self._cancelled: Sequence[int] = ()

    def joining(self, num_unfinished: int) -> Sequence[Request] | None:
        """See Admission. Raises RankError if `num_unfinished` differs from the first rank's."""
        heard = self._control.hear(self._control.replica[0], self._topic)
        unfinished_there, places, self._cancelled = heard
        if places is None:
            return None
        if unfinished_there != num_unfinished:
            raise RankError(
                self._control.rank,
                f"{num_unfinished} requests are unfinished where the first rank of its replica has "
                f"{unfinished_there}: the tokens of the two differ",
            )
        return [self._requests[place] for place in places]

    def cancelled(self) -> Sequence[int]:
        return self._cancelled


def _topic(control: Control) -> str:
    """The topic of a run. When every rank fails with the same error, the end-of-run message is not
    read."""
    return f"step{next(control.runs)}"


def obeyed(source: Admission, requests: Sequence[Request], control: Control) -> Admission:
    """Admission with the answers of `source` on every rank of a replica; only its first rank asks
    `source`."""
    if control.layout.num_ranks == 1:
        return source
    return Leading(source, requests, control) if control.leads else Following(requests, control)
