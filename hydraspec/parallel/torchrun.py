"""Ranks that torchrun started, on one host or several: what they tell each other through its store.

No parent of ours watches them: a thread of each rank publishes its signs of life, and the first two
ranks judge those of all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from hydraspec.parallel.faults import Fault, Kind, LostRankError, culprit, from_json, to_json
from hydraspec.parallel.hosts import Process, this_process
from hydraspec.parallel.layout import Layout
from hydraspec.parallel.processes import TO_START, joined
from hydraspec.parallel.progress import Judge, Progress, Signs, read
from hydraspec.parallel.ranks import Ranks
from hydraspec.parallel.watch import Watch

NUM_JUDGES = 2  # one may be the rank that stands still
PUBLISH_EVERY_S = 1.0
POLL_S = 0.05
SILENCE = "it was stopped (SIGSTOP), got no processor, or was killed"
JOB, FAULTS, SIGNS = "job", "faults", "signs"


class Fleet:
    """A rank's view of all ranks, for as many jobs as the first rank has."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        """Wait until every rank is there.

        Raises:
            LostRankError: they are not, or the address cannot be reached.
        """
        store = _found_store(rank, num_ranks)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store: Any = PrefixStore(f"hydraspec/{attempt}", store)  # stubs lack its methods
        self.records = _StoreRecords(_another(self._store))
        self._number = 0  # of the next job
        self._signs = _Signs(_another(self._store), rank, num_ranks, self.records)
        self.watch = Watch(
            *(rank, num_ranks),
            records=self.records,
            progress=self._signs.own,
            each_look=self._signs.publish,
            before_exit=self.kill_hung,
        )
        self._watching = self.watch.watching()
        self._watching.__enter__()

    def announce(self, job: str) -> None:
        """The first rank: have the others take part in a job, which is not empty."""
        self._store.set(f"{JOB}/{self._number}", job)

    def end(self) -> None:
        """The first rank: there is no further job."""
        self.close()  # first, as ranks that have ended are lost ones until then
        with suppress(dist.DistError):  # the store has gone with torchrun
            self.announce("")

    def close(self) -> None:
        """End the thread that publishes: Python aborts if it ends while that is in the store."""
        self._watching.__exit__(None, None, None)

    def next_job(self) -> str:
        """The other ranks: the job that the first one announces; empty: there is no further one.

        Raises:
            LostRankError: a rank has failed.
        """
        key = f"{JOB}/{self._number}"
        while not self._store.check([key]):
            self.watch.check()
            time.sleep(POLL_S)
        found: bytes = self._store.get(key)
        return found.decode()

    @contextmanager
    def joined(self, layout: Layout, timeout_s: float, *, on_cuda: bool) -> Iterator[Ranks]:
        """The groups of the job announced last, for a while."""
        self._signs.judge.timeout_s = self.watch.timeout_s = timeout_s
        store = PrefixStore(str(self._number), self._store)
        self._number += 1
        with joined(layout, self.watch.rank, store, self.watch, on_cuda=on_cuda) as ranks:
            yield ranks

    def fault(self) -> Fault | None:
        """The first failure, also if no rank has recorded it yet."""
        self._signs.record_gone()
        return culprit(self.records.all())

    def leave(self, limit_s: float) -> None:
        """Another rank: after a fault, let the first one save before this one's exit ends it, as
        torchrun ends all ranks once one has."""
        until = time.monotonic() + limit_s
        key = f"{JOB}/{self._number}"
        with suppress(dist.DistError):  # the store has gone with the first rank
            while time.monotonic() < until and not self._store.check([key]):
                if self.loss_of_first() is not None:
                    break
                time.sleep(POLL_S)
        self.kill_hung()

    def loss_of_first(self) -> Fault | None:
        """The fate of the first rank, if it can neither save nor say anything more."""
        with suppress(dist.DistError):
            fault = culprit(self.records.all())
            if fault is not None and fault.rank == 0 and fault.kind in (Kind.ended, Kind.hung):
                return fault
        return None

    def kill_hung(self) -> None:
        """Send SIGKILL to a rank of this host that stands still: torchrun's would come 30 s later,
        and a rank that was stopped ends by no other signal."""
        with suppress(dist.DistError):
            fault = culprit(self.records.all())
            if fault is not None and fault.kind is Kind.hung and fault.rank != self.watch.rank:
                self._signs.process(fault.rank).kill()


def _found_store(rank: int, num_ranks: int) -> Any:
    """The store at MASTER_ADDR, which torchrun or the first rank holds."""
    try:
        store, _, _ = next(rendezvous("env://", rank, num_ranks, timeout=TO_START))
    except (dist.DistError, OSError) as error:
        place = " ".join(f"{key}={os.environ[key]}" for key in ("MASTER_ADDR", "MASTER_PORT"))
        reason = str(error).partition("\n")[0]
        raise LostRankError(
            f"rank {rank} of {num_ranks} did not meet the others at {place} within "
            f"{TO_START.total_seconds():g} s: {reason}\n"
            "  allowed: the address and a free port of rank 0's host, the same for every rank\n"
            f"  to do: start all {num_ranks} ranks at about the same time, best by torchrun"
        ) from None
    return store


def _another(store: Any) -> Any:
    """A further connection to a store, for another thread."""
    return store.clone()


class _StoreRecords:
    """Faults in the store; see faults.Records."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._added: set[int] = set()

    def add(self, fault: Fault) -> None:
        """See Records."""
        if fault.rank not in self._added:
            self._added.add(fault.rank)
            self._store.append(FAULTS, to_json(fault) + "\n")

    def all(self) -> list[Fault]:
        """See Records: of each rank the first."""
        if not self._store.check([FAULTS]):
            return []
        found: dict[int, Fault] = {}
        for line in self._store.get(FAULTS).splitlines():
            fault = from_json(line)
            found.setdefault(fault.rank, fault)
        return list(found.values())


class _Signs:
    """Signs of life of all ranks, in the store: the row of each, and which process it is."""

    def __init__(self, store: Any, rank: int, num_ranks: int, records: _StoreRecords) -> None:
        self._row, self._process = bytearray(32), this_process()
        self.own = Progress(self._row)
        self.judge = Judge(
            num_ranks,
            timeout_s=15.0,
            silence=SILENCE,
            is_stopped=lambda other: self.process(other).is_stopped(),
        )
        self._store, self._rank, self._records = store, rank, records
        self._keys = [f"{SIGNS}/{other}" for other in range(num_ranks)]
        self._next = 0.0

    def publish(self) -> None:
        """Tell this rank's, and judge all."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + PUBLISH_EVERY_S
        self._store.set(self._keys[self._rank], f"{bytes(self._row).hex()} {self._process}")
        if self._rank < NUM_JUDGES:
            found = self.record_gone()
            fault = self.judge.look({rank: signs for rank, (signs, _) in found.items()})
            if fault is not None and fault.rank != self._rank:
                self._records.add(fault)

    def record_gone(self) -> dict[int, tuple[Signs, Process]]:
        """Record ranks whose processes have ended, of this host; returns what all say."""
        found = self._all()
        for rank, (signs, process) in found.items():
            if process.is_gone():
                self._records.add(
                    Fault(
                        rank=rank,
                        num_ranks=len(self._keys),
                        kind=Kind.ended,
                        step=signs.steps,
                        what="was killed or has exited",
                        why="torchrun's report says which",
                        time=time.time(),
                    )
                )
        return found

    def process(self, rank: int) -> Process:
        """The record of a rank that has given signs of life."""
        return _parsed(self._store.get(self._keys[rank]))[1]

    def _all(self) -> dict[int, tuple[Signs, Process]]:
        there = [rank for rank, key in enumerate(self._keys) if self._store.check([key])]
        values = self._store.multi_get([self._keys[rank] for rank in there])
        return {rank: _parsed(value) for rank, value in zip(there, values, strict=True)}


def _parsed(value: bytes) -> tuple[Signs, Process]:
    row, _, process = value.decode().partition(" ")
    return read(bytearray.fromhex(row)), Process.of_text(process)
