"""A rank's view of all ranks, through the store of their parent or of torchrun.

A thread of each rank posts its signs of life. If parallel/launch.py started the ranks, that parent
judges the signs; of ranks that torchrun started, on one host or several, the first two judge all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, cast

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from hydraspec.parallel.board import Board
from hydraspec.parallel.faults import Fault, Kind, LostRankError, culprit
from hydraspec.parallel.hosts import Process, this_process
from hydraspec.parallel.launch import JOB, PARENT, PREFIX, RESULT
from hydraspec.parallel.layout import Layout
from hydraspec.parallel.processes import TO_START, joined
from hydraspec.parallel.progress import Judge, Progress, Signs
from hydraspec.parallel.ranks import Ranks
from hydraspec.parallel.watch import Watch

NUM_JUDGES = 2  # one may be the rank that stands still
POLL_S = 0.05
SILENCE = "it was stopped (SIGSTOP), got no processor, or was killed"


class Fleet:
    """A rank's view of all ranks, for as many jobs as the first rank has."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        """Wait until every rank is there.

        Raises:
            LostRankError: a rank did not come in time, or the address cannot be reached.
        """
        store = _found_store(rank, num_ranks)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        # Stubs lack its methods.
        self._store = cast(Any, PrefixStore(f"{PREFIX}/{attempt}", store))
        self.board = Board(self._store.clone(), num_ranks)  # a connection for the thread
        self.parent = int(os.environ.get(PARENT, "0"))  # process id; 0: torchrun started the ranks
        self._number = 0  # of the next job
        self._process, self._rank = this_process(), rank
        self._judge = Judge(num_ranks, 15.0, SILENCE, is_stopped=self._is_stopped)
        self.watch = Watch(
            rank,
            num_ranks,
            board=self.board,
            progress=Progress(self._post),
            each_look=self._look,
            before_exit=self.kill_hung,
        )
        self._watching = self.watch.watching()
        self._watching.__enter__()

    def _post(self, signs: Signs) -> None:
        with suppress(dist.DistError):  # the next look tells that the store is gone
            self.board.post(self._rank, signs, self._process)

    def _look(self) -> None:
        """Find ranks that are gone or stand still, if no parent does that.

        Raises:
            ProcessLookupError: the parent is gone.
        """
        if self.parent:
            if os.getppid() != self.parent:
                raise ProcessLookupError("the process that started the ranks is gone")
        elif self._rank < NUM_JUDGES:
            found = self._post_gone()
            fault = self._judge.look({rank: signs for rank, (signs, _) in found.items()})
            if fault is not None and fault.rank != self._rank:
                self.board.add(fault)

    def _post_gone(self) -> Mapping[int, tuple[Signs, Process]]:
        """Post the fault of ranks of this host whose processes have ended; returns all signs."""
        found = self.board.signs()
        for rank, (signs, process) in found.items():
            if process.is_gone():
                self.board.add(
                    Fault(
                        rank=rank,
                        num_ranks=self.board.num_ranks,
                        kind=Kind.ended,
                        step=signs.steps,
                        what="was killed or has exited",
                        why="torchrun's report says which",
                        time=time.time(),
                    )
                )
        return found

    def _is_stopped(self, rank: int) -> bool:
        return self.board.signs()[rank][1].is_stopped()

    def announce(self, job: str) -> None:
        """Announce, on the first rank, a job (not empty) in which the others take part."""
        self._store.set(f"{JOB}/{self._number}", job)

    def end(self) -> None:
        """Announce, on the first rank, that there is no further job."""
        self.close()  # first, as ranks that have ended are lost ones until then
        with suppress(dist.DistError):  # the store has gone with torchrun
            self.announce("")

    def close(self) -> None:
        """End the thread that posts: Python aborts if it exits while the thread uses the store."""
        self._watching.__exit__(None, None, None)

    def answer(self, result: str) -> None:
        """Tell the parent, on the first rank, how the job ended."""
        with suppress(dist.DistError):  # the store has gone with the parent
            self._store.set(RESULT, result)

    def next_job(self) -> str:
        """The job that the parent or the first rank announces; empty: there is no further one.

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
        """Form the groups of the newest job for the block; yields this rank's view of them."""
        self._judge.timeout_s = self.watch.timeout_s = timeout_s
        store = PrefixStore(str(self._number), self._store)
        self._number += 1
        with joined(layout, self.watch.rank, store, self.watch, on_cuda=on_cuda) as ranks:
            yield ranks

    def fault(self) -> Fault | None:
        """The failure that came first, also if no rank has recorded it yet; None: there is none."""
        self._post_gone()
        return culprit(self.board.faults())

    def leave(self, limit_s: float) -> None:
        """On a rank other than the first, after a fault: waits up to `limit_s` for the first rank
        to save, as torchrun ends all ranks once one has ended, then kills a hung rank of this host.
        """
        until = time.monotonic() + limit_s
        key = f"{JOB}/{self._number}"
        with suppress(dist.DistError):  # the store has gone with the first rank
            while time.monotonic() < until and not self._store.check([key]):
                if self.loss_of_first() is not None:
                    break
                time.sleep(POLL_S)
        self.kill_hung()

    def loss_of_first(self) -> Fault | None:
        """The fault of the first rank, if it can neither save nor report anything more."""
        with suppress(dist.DistError):
            fault = culprit(self.board.faults())
            if fault is not None and fault.rank == 0 and fault.kind in (Kind.ended, Kind.hung):
                return fault
        return None

    def kill_hung(self) -> None:
        """Send SIGKILL to a rank of this host that stands still: torchrun's would come 30 s later,
        and a rank that was stopped ends by no other signal."""
        with suppress(dist.DistError):
            fault = culprit(self.board.faults())
            if fault is not None and fault.kind is Kind.hung and fault.rank != self.watch.rank:
                self.board.signs()[fault.rank][1].kill()


def _found_store(rank: int, num_ranks: int) -> Any:
    """The store at MASTER_ADDR, which the parent, torchrun or the first rank holds."""
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
