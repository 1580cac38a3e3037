"""Plain data between the ranks of a run: what is announced, gathered and counted beside tensors.

Everything travels as JSON through torch.distributed's store, on one host and across hosts. Waits
poll, so that interrupts and lost ranks end them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import count
from typing import Any, Protocol, TypeAlias

import torch.distributed as dist

from hydraspec.parallel.faults import LostRankError
from hydraspec.parallel.layout import Layout

Plain: TypeAlias = Any  # JSON values: numbers, strings, None, lists, dicts with string keys

GATHERED = "gathered"  # the topic of gathered messages
GATHER_LIMIT_S = 1800.0  # for the slowest rank to load, or to end a call
GRACE_S = 5.0  # for messages of other ranks once one has failed
SPIN_S = 1e-3  # a wait polls without a pause for so long
LONGEST_PAUSE_S = 2e-3
WATCH_EVERY_S = 0.2


class Store(Protocol):
    """The methods of torch.distributed's stores that are used here."""

    def queue_push(self, key: str, value: str, /) -> None: ...

    def queue_pop(self, key: str, block: bool) -> bytes: ...

    def add(self, key: str, amount: int, /) -> int: ...


class RankError(LostRankError):
    """A rank failed, or did not answer in time; the text names it."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(f"rank {rank}: {text}")
        self.rank = rank


class Control:
    """Control messages of one rank. Those of a topic from one rank to another arrive in order."""

    def __init__(
        self,
        store: Store | None,
        layout: Layout,
        rank: int,
        *,
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        """store: shared by all ranks; None for a run of one rank. watch: called during waits,
        raises if a rank is lost."""
        self._store, self.layout, self.rank, self.watch = store, layout, rank, watch
        self._unread: dict[int, Plain] = {}  # gathered messages by rank
        self.runs = count()  # numbers of the runs of engines, equal on the ranks of a replica
        self.all_ranks = list(range(layout.num_ranks))
        size = layout.tensor * layout.pipeline
        first = rank // size * size
        self.replica = self.all_ranks[first : first + size]  # the ranks that run equal steps

    @property
    def leads(self) -> bool:
        """Returns whether this is the first rank of its replica."""
        return self.rank == self.replica[0]

    @property
    def store(self) -> Store:
        """The ranks' store."""
        assert self._store is not None, "one rank alone has nothing to say"
        return self._store

    def tell(self, ranks: Iterable[int], topic: str, message: Plain) -> None:
        """Send a message to each of `ranks` but this one; does not wait for them."""
        data = None
        for rank in ranks:
            if rank != self.rank:
                data = data or json.dumps(message, separators=(",", ":"))
                self.store.queue_push(f"{topic}/{self.rank}/{rank}", data)

    def heard(self, rank: int, topic: str) -> list[Plain]:
        """The next message of `rank`, in a list; an empty one if there is none yet."""
        try:
            data = self.store.queue_pop(f"{topic}/{rank}/{self.rank}", False)
        except dist.QueueEmptyError:
            return []
        return [json.loads(data)]

    def hear(self, rank: int, topic: str, limit_s: float | None = None) -> Plain:
        """Wait for the next message of `rank`, at most `limit_s` (None: until a rank is lost).

        Raises:
            RankError: the limit has passed.
        """
        wait = Wait(limit_s, self.watch)
        while not (found := self.heard(rank, topic)):
            if not wait.goes_on():
                raise RankError(rank, f"sent no {topic!r} message for {limit_s:.0f} s")
        return found[0]

    def gather(self, message: Plain, ranks: list[int], topic: str) -> list[Plain]:
        """The messages of all `ranks`, in their order; each of them calls this.

        Raises:
            RankError: a rank did not call it within GATHER_LIMIT_S, or gathers another topic.
        """
        self.tell(ranks, GATHERED, [topic, message])
        return [message if rank == self.rank else self._gathered(rank, topic) for rank in ranks]

    def _gathered(self, rank: int, topic: str) -> Plain:
        found = self._next_gathered(rank, GATHER_LIMIT_S)
        if found[0] != topic:
            self._unread[rank] = found
            raise RankError(rank, f"gathers {found[0]!r} where this rank gathers {topic!r}")
        return found[1]

    def last_gathered(self, rank: int, topic: str, limit_s: float) -> Plain | None:
        """The message that `rank` gathers under `topic`, past those of other topics; None if the
        next one does not come within `limit_s`."""
        with suppress(RankError):
            while True:
                found = self._next_gathered(rank, limit_s)
                if found[0] == topic:
                    return found[1]
        return None

    def gathered_early(self, topic: str) -> list[Plain]:
        """The messages that other ranks have gathered under `topic` and this rank has not read;
        does not wait."""
        for rank in self.all_ranks:
            if rank not in (self.rank, *self._unread) and (found := self.heard(rank, GATHERED)):
                self._unread[rank] = found[0]
        return [message for heard_topic, message in self._unread.values() if heard_topic == topic]

    def _next_gathered(self, rank: int, limit_s: float) -> Plain:
        if rank in self._unread:
            return self._unread.pop(rank)
        return self.hear(rank, GATHERED, limit_s)

    def add(self, counter: str, amount: int) -> int:
        """Add to a counter that starts at 0 and that all ranks share; returns its new value."""
        return self.store.add(counter, amount)

    def agree_least(self, values: list[int]) -> list[int]:
        """The least of each value over all ranks."""
        found = self.gather(values, self.all_ranks, "least")
        return [min(of_ranks) for of_ranks in zip(*found, strict=True)]

    def agree_all(self, value: bool) -> bool:
        """Returns whether `value` is true on every rank of this replica."""
        return all(self.gather(value, self.replica, "all"))


class Wait:
    """Paces a loop that polls."""

    def __init__(self, limit_s: float | None, watch: Callable[[], None]) -> None:
        self._started = time.monotonic()
        self._limit_s, self.watch = limit_s, watch
        self._next_watch = self._started + WATCH_EVERY_S

    def goes_on(self) -> bool:
        """Pause, at first not at all, and return True; False once the limit has passed."""
        now = time.monotonic()
        waited = now - self._started
        if now >= self._next_watch:
            self.watch()
            self._next_watch = now + WATCH_EVERY_S
        if self._limit_s is not None and waited >= self._limit_s:
            return False
        time.sleep(0 if waited < SPIN_S else min(waited / 10, LONGEST_PAUSE_S))
        return True


ALONE = Control(None, Layout(), 0)
