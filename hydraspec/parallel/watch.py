"""A rank's view of the others: signs of life, what failed, and waits that end when a rank is lost.

A thread posts this rank's signs and looks for faults; the main thread calls `check` wherever it
waits. If the main thread does not react (a device spins, a call never returns), the thread ends the
process.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Protocol

from hydraspec.errors import UserError
from hydraspec.parallel.board import Board
from hydraspec.parallel.faults import Fault, Kind, LostRankError, culprit
from hydraspec.parallel.progress import Progress

LOOK_EVERY_S = 0.25
SLICE = timedelta(seconds=1)  # part of a wait, after which interrupts and faults are looked at
NAMING_S = 3.0  # for a lost rank's own record, or its parent's, to arrive
TO_LEAVE_S = 5.0  # for a rank that has nothing to save, once the run is lost
TO_SAVE_S = 15.0  # for the first rank
CONNECTION_ERRORS = {"DistNetworkError", "DistStoreError", "DistBackendError"}  # torch's
STILL_WAITING = "Operation timed out!"  # torch's Work.wait, of a slice; the work goes on


class Work(Protocol):
    """The method of torch.distributed.Work that is used here."""

    def wait(self, timeout: timedelta) -> bool:
        """Return once the work is done; raise RuntimeError after `timeout`."""
        ...


class DeviceEvent(Protocol):
    """The methods of torch.cuda.Event that are used here."""

    def query(self) -> bool:
        """Returns whether the device has passed the event."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has passed the event."""
        ...


class Watch:
    """Watch of one rank over the others; by default that of a run of one rank, with nothing to
    watch."""

    def __init__(
        self,
        rank: int = 0,
        num_ranks: int = 1,
        *,
        board: Board | None = None,
        progress: Progress | None = None,
        timeout_s: float = 15.0,
        each_look: Callable[[], None] = lambda: None,
        before_exit: Callable[[], None] = lambda: None,
    ) -> None:
        """timeout_s: for a wait of devices for each other, which no host sees. each_look: called by
        the thread every LOOK_EVERY_S; raises if the run cannot go on. before_exit: called by the
        thread before it ends a process whose main thread does not leave."""
        self.timeout_s = timeout_s
        self.look_at_device: Callable[[], None] = lambda: None  # raises if it lost another device
        self.rank, self.num_ranks = rank, num_ranks
        self.progress = progress or Progress()
        self._board, self._each_look, self._before_exit = board, each_look, before_exit
        self._lost: Fault | None = None
        self._recorded = False
        self._ends = threading.Event()

    def step(self) -> AbstractContextManager[None]:
        """Context of each step of an engine, in which the rank has to make progress.

        Raises:
            LostRankError: another rank has failed.
        """
        self.check()
        return self._step() if self.num_ranks > 1 else _NOTHING

    @contextmanager
    def _step(self) -> Iterator[None]:
        with self.progress.step():
            try:
                yield
            except Exception as error:  # now, as the others wait for this rank
                self.record(error)
                raise

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Run the watch's thread during the block."""
        self.progress.tick()
        thread = threading.Thread(target=self._look, name="watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ends.set()
            thread.join(LOOK_EVERY_S * 4)

    @property
    def lost(self) -> bool:
        """Returns whether another rank has failed."""
        return self._lost is not None

    @property
    def failed(self) -> bool:
        """Returns whether any rank, this one included, has failed: the run cannot go on."""
        return self.lost or self._recorded

    def check(self) -> None:
        """Raise LostRankError if another rank has failed."""
        if self._lost is not None:
            raise LostRankError(str(self._lost))

    def finish(self, work: Work) -> None:
        """Let the host wait for a collective.

        Raises:
            LostRankError: naming the rank that failed first.
        """
        with self.progress.waiting(), self.naming_the_lost():
            while True:
                try:
                    work.wait(SLICE)
                    return
                except RuntimeError as error:
                    if STILL_WAITING not in str(error):
                        raise
                self.check()

    def wait_for_device(self, event: DeviceEvent) -> None:
        """Let the host wait for an event of its device, whose kernels may wait for other ranks.

        Raises:
            LostRankError: another rank has failed; the device may be busy for ever.
            LostPeerError: from `look_at_device`.
        """
        if self.num_ranks == 1:
            event.synchronize()
            return
        with self.progress.waiting():
            while not event.query():
                self.check()
                time.sleep(0)
            self.look_at_device()

    @contextmanager
    def naming_the_lost(self) -> Iterator[None]:
        """Raise the failure of another rank in place of an error of the block, which is taken for
        lost contact to it."""
        try:
            yield
        except (KeyboardInterrupt, UserError):
            raise
        except Exception as error:
            if self._board is None:
                raise
            raise LostRankError(str(self._first_fault(error))) from error

    def named(self, error: BaseException) -> BaseException:
        """Returns `error`, or for a lost connection to the store the failure of the lost rank."""
        if type(error).__name__ not in CONNECTION_ERRORS or self._board is None:
            return error
        assert isinstance(error, Exception)
        return LostRankError(str(self._first_fault(error)))

    def _first_fault(self, error: Exception) -> Fault:
        """The fault of another rank, or the loss that the thread has found, or, if neither comes
        within NAMING_S, this rank's own fault, recorded as a symptom: it must not be taken for the
        first one."""
        until = time.monotonic() + NAMING_S
        while time.monotonic() < until:
            fault = None
            with suppress(RuntimeError):  # torch's, where the store is gone
                fault = self._fault_of_another()
            if fault is not None and fault.kind is not Kind.symptom:
                return fault
            if self._lost is not None and self._lost.rank == self.rank:
                return self._lost  # the parent is gone, or the store: others are lost as this one
            time.sleep(LOOK_EVERY_S / 5)
        own = self._own(error, Kind.symptom, "lost contact to another rank")
        self._add(own)
        return own

    def record(self, error: BaseException) -> None:
        """Record this rank's first exception, before anything is taken down. An exception that says
        which rank's device did not answer (`silent_rank`) is recorded for that rank."""
        silent = getattr(error, "silent_rank", None)
        if silent is not None:
            self._add(replace(self._own(error, Kind.hung, "stood still"), rank=silent))
            return
        if isinstance(error, LostRankError) or type(error).__name__ in CONNECTION_ERRORS:
            kind, what = Kind.symptom, "ended as another one was lost"
        elif isinstance(error, UserError):
            kind, what = Kind.mistake, "failed"
        else:
            kind, what = Kind.error, "failed"
        self._add(self._own(error, kind, what))

    def _own(self, error: BaseException, kind: Kind, what: str) -> Fault:
        why = str(error) if kind is Kind.mistake else described(error)
        return Fault(
            rank=self.rank,
            num_ranks=self.num_ranks,
            kind=kind,
            step=self.progress.num_steps,
            what=what,
            why=why,
            time=time.time(),
            exit_code=error.exit_code if isinstance(error, UserError) else 1,
        )

    def _add(self, fault: Fault) -> None:
        self._recorded = True
        if self._board is not None:
            with suppress(RuntimeError):  # torch's, where the store is gone
                self._board.add(fault)

    def _fault_of_another(self) -> Fault | None:
        faults = [] if self._board is None else self._board.faults()
        return culprit([fault for fault in faults if fault.rank != self.rank])

    def _look(self) -> None:
        lost_at = 0.0
        while not self._ends.wait(LOOK_EVERY_S):
            self.progress.tick()
            try:
                self._each_look()
                self._lost = self._lost or self._fault_of_another()
            except Exception as error:  # of each_look, or the store's first rank is gone
                self._lost = self._lost or self._own(error, Kind.symptom, "lost the others")
            if self._lost is None:
                continue
            lost_at = lost_at or time.monotonic()
            if time.monotonic() - lost_at > (TO_SAVE_S if self.rank == 0 else TO_LEAVE_S):
                sys.stderr.write(f"hydraspec: ended: {self._lost}\n")
                sys.stderr.flush()
                self._before_exit()
                os._exit(1)


def described(error: BaseException) -> str:
    """An exception on one line: its type and its message."""
    return " ".join("".join(traceback.format_exception_only(error)).split())


_NOTHING: AbstractContextManager[None] = nullcontext()
ALONE = Watch()
