"""Faults of ranks, and the choice of the one that caused the others.

Each rank records its first exception before it takes anything down; the process that notices that a
rank was killed or stands still records that for it. The module imports no torch, so that the parent
starts the ranks before that import.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from hydraspec.errors import UserError


class Kind(Enum):
    """Kinds of failures of a rank."""

    error = "error"  # it raised
    mistake = "mistake"  # it raised a UserError, which every rank may do
    ended = "ended"  # it was killed, or exited, without a record
    hung = "hung"  # it stands still
    symptom = "symptom"  # it lost contact to another rank


class LostRankError(UserError):
    """A rank failed, and the run with it (exit status 1)."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Fault:
    """A rank's first failure."""

    rank: int
    num_ranks: int
    kind: Kind
    step: int  # steps that it had begun
    what: str  # one sentence without its subject, as "failed", "was killed by SIGKILL"
    why: str = ""  # the error, or a guess
    time: float = 0.0  # time.time()
    exit_code: int = 1

    def __str__(self) -> str:
        where = f"in step {self.step}" if self.step else "before its first step"
        why = f": {self.why}" if self.why else ""
        return f"rank {self.rank} of {self.num_ranks} {self.what} {where}{why}"


def culprit(faults: Sequence[Fault]) -> Fault | None:
    """The fault that caused the others: the first that is no lost contact, else the first of all;
    None without faults."""
    return min(faults, key=lambda f: (f.kind is Kind.symptom, f.time), default=None)


def of_exit(rank: int, num_ranks: int, step: int, code: int) -> Fault:
    """The fault of a process that ended without a record; `code` is negative for a signal."""
    what, why = f"ended with exit status {code}", ""
    if code < 0:
        what = f"was killed by {signal.Signals(-code).name}"
        if -code == signal.SIGKILL:
            why = "the system does that where memory runs out"
    return Fault(
        rank=rank,
        num_ranks=num_ranks,
        kind=Kind.ended,
        step=step,
        what=what,
        why=why,
        time=time.time(),
    )
