"""A model of the exchange in `hydraspec_kernels.collectives.messages_kernel`, every order of whose
steps is tried.

Ranks run the same launches, one after another. A program of a launch (one a box) stores its message
in the box of every rank, waits for everyone's, reads and resets its own boxes. Stores to peers land
at any time later, in any order; resets land by the end of their launch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

EMPTY = -1


class BrokenError(AssertionError):
    """A message was overwritten, lost or taken for another one."""


@dataclass(slots=True, frozen=True)
class Rank:
    """Where one rank is."""

    launch: int = 0
    received: frozenset[int] = frozenset()  # boxes of this launch that are done
    sent: frozenset[int] = frozenset()
    blamed: int | None = None  # whose message did not come, once this rank has given up


@dataclass(slots=True, frozen=True)
class State:
    """All ranks, their boxes and the stores that have not landed."""

    ranks: tuple[Rank, ...]
    boxes: frozenset[tuple[tuple[int, int, int, int], int]]  # (owner, slot, sender, box): launch
    flying: frozenset[tuple[tuple[int, int, int, int], int]]  # messages
    resets: frozenset[tuple[int, int, int, int]]


@dataclass(slots=True, frozen=True)
class Model:
    """The exchange of `size` ranks: launches[k] programs in launch k."""

    size: int
    launches: tuple[int, ...]
    slots: int = 2  # that the messages of a box alternate between
    resets_land: bool = True  # before their launch ends
    stops: tuple[int, int] | None = None  # (rank, launch) at which a rank stands still

    def start(self) -> State:
        """Everything empty."""
        ranks = tuple(Rank() for _ in range(self.size))
        return State(ranks, frozenset(), frozenset(), frozenset())

    def count(self, launch: int, box: int) -> int:
        """Messages that a box has received before a launch."""
        return sum(box < programs for programs in self.launches[:launch])

    def next(self, state: State) -> Iterator[State]:
        """Every state that one step leads to."""
        for key, launch in state.flying:
            yield self._landed(state, key, launch)
        for key in state.resets:
            yield replace(
                state,
                resets=state.resets - {key},
                boxes=frozenset(held for held in state.boxes if held[0] != key),
            )
        for index, rank in enumerate(state.ranks):
            if rank.launch < len(self.launches) and rank.blamed is None:
                yield from self._steps(state, index, rank)

    def _landed(self, state: State, key: tuple[int, int, int, int], launch: int) -> State:
        if dict(state.boxes).get(key, EMPTY) != EMPTY:
            raise BrokenError(f"message of launch {launch} lands on another in {key}")
        flying = state.flying - {(key, launch)}
        return replace(state, flying=flying, boxes=state.boxes | {(key, launch)})

    def _steps(self, state: State, index: int, rank: Rank) -> Iterator[State]:
        launch, programs = rank.launch, self.launches[rank.launch]
        if self.stops is not None and index == self.stops[0] and launch >= self.stops[1]:
            return
        boxes = dict(state.boxes)
        for box in range(programs):
            slot = self.count(launch, box) % self.slots
            if box not in rank.sent:
                sent = {((to, slot, index, box), launch) for to in range(self.size)}
                moved = replace(rank, sent=rank.sent | {box})
                yield replace(state, ranks=_with(state, index, moved), flying=state.flying | sent)
            elif box not in rank.received:
                keys = [(index, slot, sender, box) for sender in range(self.size)]
                found = [boxes.get(key, EMPTY) for key in keys]
                if EMPTY in found:
                    continue
                if any(message != launch for message in found):
                    raise BrokenError(f"rank {index} takes {found} for launch {launch}")
                moved = replace(rank, received=rank.received | {box})
                resets = state.resets | set(keys)
                yield replace(state, ranks=_with(state, index, moved), resets=resets)
        pending = self.resets_land and any(key[0] == index for key in state.resets)
        if len(rank.received) == programs and not pending:
            yield replace(state, ranks=_with(state, index, Rank(launch + 1)))

    def given_up(self, state: State) -> State:
        """After all waits have ended where nothing moves any more."""
        ranks = []
        boxes = dict(state.boxes)
        for index, rank in enumerate(state.ranks):
            if rank.launch < len(self.launches):
                box = min(set(range(self.launches[rank.launch])) - rank.received)
                slot = self.count(rank.launch, box) % self.slots
                missing = [
                    sender
                    for sender in range(self.size)
                    if boxes.get((index, slot, sender, box), EMPTY) == EMPTY
                ]
                rank = replace(rank, blamed=missing[0])
            ranks.append(rank)
        return replace(state, ranks=tuple(ranks))


def _with(state: State, index: int, rank: Rank) -> tuple[Rank, ...]:
    return (*state.ranks[:index], rank, *state.ranks[index + 1 :])


def ends(model: Model, limit: int) -> tuple[list[State], int]:
    """The states in which nothing moves any more, over every order of steps; and how many states
    there were. At most `limit`.
    """
    start = model.start()
    seen, open_, found = {start}, [start], []
    while open_:
        state = open_.pop()
        following = list(model.next(state))
        if not following:
            found.append(state)
        for other in following:
            if other not in seen:
                seen.add(other)
                assert len(seen) <= limit, "a smaller model is needed"
                open_.append(other)
    return found, len(seen)


def walk(model: Model, choose: Sequence[float]) -> State:
    """One order of steps, chosen by numbers from 0 to 1; the last state."""
    state = model.start()
    for number in choose:
        following = sorted(model.next(state), key=repr)
        if not following:
            return state
        state = following[int(number * len(following))]
    raise AssertionError("more numbers are needed")
