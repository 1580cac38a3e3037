"""Data parallelism: replicas that take requests from one queue, and rank 0, which receives all of
their steps and completions."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from hydraspec.engine.native import NativeEngine
from hydraspec.engine.schedule.admission import (
    Arrivals,
    Cancels,
    by_arrival,
    most_of_replica,
    obeyed,
)
from hydraspec.engine.turns import Conversations
from hydraspec.parallel.control import WATCH_EVERY_S, Control, Wait
from hydraspec.parallel.engines.outcome import raise_if_failed
from hydraspec.parallel.engines.prefixes import by_prefix
from hydraspec.parallel.engines.wire import from_event, to_event
from hydraspec.signals import interrupts_held_back
from hydraspec.types import Completion, Request, StepRecord

EVENTS = "events"  # the topic of replicas' steps and completions
CANCELLED = "cancelled"  # after the run's name: the topic of requests that were cancelled
LOOK_EVERY_S = 0.02  # between two looks at whether the run was stopped


@dataclass(slots=True, frozen=True, kw_only=True)
class Share:
    """Facts of a run that are equal on all replicas."""

    name: str  # prefix of the run's counters, another in every run
    concurrency: int | None  # of all replicas together
    has_arrivals: bool = False  # a replica may be idle until a request arrives, also at the start


class SharedQueue:
    """An Admission: the conversations of one run, each taken once it has arrived, by the replica
    that has room first. That replica serves all its turns, as it has their prefix. Every replica
    counts arrivals from its own start of the run.

    A replica holds at most its share of what may be in progress, and no more than it can run at
    once, so that a short queue is spread over all replicas. Where requests share prefixes it takes
    those assigned to it first, then any: no request waits while a replica has room. Requests with
    times of arrival are taken in their order.
    """

    def __init__(
        self,
        control: Control,
        requests: Sequence[Request],
        share: Share,
        *,
        max_num_seqs: int,
        cancels: Cancels | None = None,
        while_idle: Callable[[], object] = lambda: None,
    ) -> None:
        """while_idle: called again and again while this replica waits for a request."""
        self._control, self._name, self._while_idle = control, share.name, while_idle
        self._cancels = cancels or Cancels()
        self._conversations = Conversations(requests)
        self._starts = by_arrival(self._conversations.starts)
        self._lists: list[list[Request]] = [self._starts]  # of each replica
        if not share.has_arrivals:
            self._lists = by_prefix(self._starts, control.layout.data)
        self._limit = share.concurrency or len(self._starts)
        limits = max_num_seqs, control.layout.data
        self._room = most_of_replica(len(self._starts), share.concurrency, *limits)
        self._num_ended = self._num_told = 0  # conversations; of those, how many were told
        self._next_turns: list[Request] = []
        self._next: int | None = None  # place of a conversation that is taken and has not joined
        # _least_taken: conversations taken by all replicas, as far as this one knows.
        self._arrivals, self._least_taken = Arrivals(), 0
        self._has_arrivals = share.has_arrivals
        self._started_at = time.perf_counter()
        self._look_at = 0.0
        self._has_ended = False

    def joining(self, num_unfinished: int) -> Sequence[Request] | None:
        """See Admission."""
        wait = Wait(None, self._control.watch)
        while not self._is_stopped():
            found = self._taken(num_unfinished)
            if found or num_unfinished:
                return found
            if self._is_empty:
                self._has_ended = True
                return None
            self._while_idle()
            wait.goes_on()
        return None

    def _taken(self, num_unfinished: int) -> list[Request]:
        """Next turns, and as many new conversations as the room and the limit allow now."""
        self._tell_ended()
        found, self._next_turns = self._next_turns, []
        while num_unfinished + len(found) < self._room:
            if self._next is None:
                if self._has_arrivals and not self._is_one_waiting():
                    break
                self._next = self._add("taken", 1) - 1
                self._least_taken = self._next + 1
            if self._is_empty or not self._has_arrived(self._next):
                break
            if not self._is_allowed(self._next):
                break
            found.append(self._take(self._next))
            self._next = None
        return found

    def _take(self, ticket: int) -> Request:
        """The first turn for a ticket, of which there are as many as conversations: the next of
        this replica's list, or of the first other list that has any."""
        if len(self._lists) == 1:
            return self._lists[0][ticket]
        own = self._control.rank // len(self._control.replica)
        for i in range(len(self._lists)):
            number = (own + i) % len(self._lists)
            place = self._add(f"taken{number}", 1) - 1
            if place < len(self._lists[number]):
                return self._lists[number][place]
        raise AssertionError("more requests were taken than there are")

    def cancelled(self) -> Sequence[int]:
        """See Admission."""
        return self._cancels.take()

    def ended(self, index: int) -> None:
        """See Admission."""
        turn = self._conversations.next_turn(index)
        if turn is None:
            self._num_ended += 1
        else:
            self._next_turns.append(turn)

    @property
    def _is_empty(self) -> bool:
        return self._next is not None and self._next >= len(self._starts)

    def _is_one_waiting(self) -> bool:
        """Returns whether a request has arrived that no replica has taken, or all are taken. None
        is taken before it arrives, as the replica that takes it may be the busiest by then."""
        if not self._has_arrived(self._least_taken):
            return False
        self._least_taken = self._add("taken", 0)
        return self._has_arrived(self._least_taken)

    def _has_arrived(self, place: int) -> bool:
        starts = self._starts
        return place >= len(starts) or self._arrivals.due_in(starts[place]) <= 0

    def offered_at(self, request: Request) -> float | None:
        """See Admission. Without arrivals and a limit all are offered at the start."""
        if request.arrival_s is not None:
            return self._arrivals.at(request)
        return None if self._is_limited else self._started_at

    def _is_allowed(self, place: int) -> bool:
        """Returns whether the number of conversations in progress before `place` is below the
        limit."""
        return not self._is_limited or place - self._add("ended", 0) < self._limit

    @property
    def _is_limited(self) -> bool:
        return self._limit < len(self._starts)

    def _tell_ended(self) -> None:
        if self._is_limited and self._num_ended > self._num_told:
            self._add("ended", self._num_ended - self._num_told)
            self._num_told = self._num_ended

    def _is_stopped(self) -> bool:
        """Take rank 0's cancelled requests, and return whether a replica has left the run early.
        Between looks, which are LOOK_EVERY_S apart, the answer is False."""
        now = time.monotonic()
        if now < self._look_at:
            return False
        self._look_at = now + LOOK_EVERY_S
        while self._control.rank and (found := self._control.heard(0, self._name + CANCELLED)):
            self._cancels.add(found[0])
        return self._add("stopped", 0) > 0

    def _add(self, counter: str, amount: int) -> int:
        return self._control.add(f"{self._name}/{counter}", amount)

    def close(self) -> None:
        """See Admission. A replica that leaves early ends the run on all of them."""
        if not self._has_ended:
            self._add("stopped", 1)


def replica_events(
    engine: NativeEngine,
    control: Control,
    requests: Sequence[Request],
    share: Share,
    cancels: Cancels | None = None,
    while_idle: Callable[[], object] = lambda: None,
) -> Generator[StepRecord | Completion]:
    """Runs requests on this rank's replica; yields its events. On rank 0 requests in `cancels` end
    early."""
    cancels = cancels or Cancels()
    if control.layout.data == 1:
        return engine.offer(requests, share.concurrency, cancels)
    queue = SharedQueue(
        control,
        requests,
        share,
        max_num_seqs=engine.parts.config.engine.max_num_seqs,
        cancels=cancels,
        while_idle=while_idle,
    )
    return engine.decode(requests, obeyed(queue, requests, control))


def send_events(events: Iterable[StepRecord | Completion], control: Control) -> None:
    """Run through `events`, and send those of another replica than rank 0's to rank 0; the last
    message is null."""
    sends = control.leads and control.replica[0] != 0
    try:
        for event in events:
            if sends:
                control.tell([0], EVENTS, from_event(event))
    finally:
        if sends:
            control.tell([0], EVENTS, None)


class Inbox:
    """Steps and completions of all replicas, in the order in which rank 0 receives them. Requests
    that are cancelled are passed on to all replicas.

    Attributes:
        cancels: cancelled requests, for rank 0's replica.
    """

    def __init__(
        self, control: Control, share: Share, cancels: Cancels, num_steps: int = 0
    ) -> None:
        """cancels: requests that the caller cancels. num_steps: steps of earlier runs."""
        size = len(control.replica)
        self._name, self._cancelled = share.name, cancels
        self.cancels = cancels if control.layout.data == 1 else Cancels()
        self.num_steps = num_steps
        self._control = control
        self._working = control.all_ranks[size::size]  # first ranks of the other replicas
        self._works_here = True
        # An idle replica counts as working once its first step is received.
        self._has_arrivals = share.has_arrivals
        self._idle = set(control.all_ranks) if share.has_arrivals else set[int]()
        self._seen: deque[StepRecord | Completion] = deque()

    def receive(self) -> None:
        """Take events that have come, and pass on cancelled requests; does not wait."""
        with interrupts_held_back():  # no event that is taken is lost
            for index in self._cancelled.take():
                self.cancels.add(index)
                self._control.tell(self._working, self._name + CANCELLED, index)
            for rank in list(self._working):
                while found := self._control.heard(rank, EVENTS):
                    if found[0] is None:
                        self._working.remove(rank)
                        break
                    self._see(to_event(found[0]), rank)

    def _see(self, event: StepRecord | Completion, rank: int) -> None:
        if isinstance(event, StepRecord):
            self._idle.discard(rank)
            in_the_run = {*self._working, *([0] if self._works_here else [])}
            event = replace(
                event,
                step=self.num_steps,
                replica=rank // len(self._control.replica),
                num_replicas=max(1, len(in_the_run - self._idle)),
            )
            if self._has_arrivals and not event.num_running + event.num_waiting:
                self._idle.add(rank)
            self.num_steps += 1
        self._seen.append(event)

    def merged(
        self, events: Generator[StepRecord | Completion]
    ) -> Generator[StepRecord | Completion]:
        """Yields `events` of this rank's replica and those of the others, until all are done."""
        if self._control.layout.data == 1:
            yield from events
            return
        self.receive()  # requests that were cancelled before the run began
        try:
            for event in events:
                self._see(event, 0)
                self.receive()
                yield from self._take()
            self._works_here = False
            for _ in self._until_done():
                yield from self._take()
        finally:
            events.close()
            for _ in self._until_done():
                pass

    def _take(self) -> Iterator[StepRecord | Completion]:
        while self._seen:
            yield self._seen.popleft()

    def _until_done(self) -> Iterator[None]:
        """Receives events until the other replicas are done; yields after each look, and at the
        end."""
        wait = Wait(None, self._control.watch)
        look_at = 0.0
        while self._working:
            self.receive()
            yield
            if time.monotonic() >= look_at:
                raise_if_failed(self._control)
                look_at = time.monotonic() + WATCH_EVERY_S
            wait.goes_on()
        yield
