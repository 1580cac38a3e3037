"""Outcomes of a call that every rank makes, and whether the ranks can make further calls."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from hydraspec import errors
from hydraspec.engine.base import Built
from hydraspec.engine.native import NativeEngine
from hydraspec.errors import UserError
from hydraspec.parallel.control import (
    GATHER_LIMIT_S,
    GATHERED,
    GRACE_S,
    Control,
    Plain,
    RankError,
)
from hydraspec.parallel.faults import LostRankError
from hydraspec.parallel.ranks import Ranks
from hydraspec.signals import interrupts_held_back

TOPIC = "outcome"
STOPPED = (GeneratorExit, KeyboardInterrupt)


@dataclass(slots=True, kw_only=True)
class Facts:
    """Facts of the engines of all ranks together, after a call."""

    built: Built = field(default_factory=Built)  # the most of any rank
    memory_bytes: dict[str, int] = field(default_factory=dict)  # the most of any rank, by part
    warnings: list[str] = field(default_factory=list)  # each once
    devices: list[str] = field(default_factory=list)  # in the order of ranks


@dataclass(slots=True)
class Peers:
    """This rank's engine, one of as many as there are ranks, and facts of all these engines."""

    engine: NativeEngine | None = None  # set by the call that builds it
    facts: Facts = field(default_factory=Facts)  # as of the last call


class Together:
    """The calls that all ranks make, one after another."""

    def __init__(self, ranks: Ranks) -> None:
        self.control, self._watch = ranks.control, ranks.watch
        self.is_over = False  # a rank is lost, or the engines of ranks are in different states

    @contextmanager
    def call(self, peers: Peers) -> Iterator[None]:
        """Context of a call of an engine, or of the call that builds it; ends once the call has
        ended on every rank.

        Raises:
            Exception: raised by the call, or the first error of any rank: on rank 0, and if the
                ranks cannot make further calls (`is_over`) on every rank.
        """
        if self.is_over:
            raise RankError(0, "the ranks have failed: this engine can make no further call")
        builds, own = peers.engine is None, None
        try:
            yield
        except BaseException as error:
            own = self._watch.named(error)
            if not isinstance(error, (UserError, *STOPPED)):
                self._watch.record(error)  # the others need not wait for a rank that left a step
        self.is_over = True  # if the next lines raise
        # The watch's own error names the rank that failed first, and its step.
        knows_why = isinstance(own, LostRankError) and not isinstance(own, RankError)
        try:
            with interrupts_held_back():
                outcomes = self._outcomes(peers.engine, own)
        except (Exception, KeyboardInterrupt):  # the store is gone, or torchrun ends all ranks
            if own is not None and knows_why:
                raise own from None
            raise
        failed = [outcome for outcome in outcomes if outcome is not None and outcome["error"]]
        self.is_over = bool(failed) if builds else self._differ(outcomes)
        if not failed:
            peers.facts = _merged(outcomes)
            if own is not None:
                raise own
        elif own is not None and knows_why:
            raise own
        elif self.control.rank == 0 or self.is_over:
            first = min(failed, key=lambda outcome: outcome["error"]["at"])
            raise _error_of(first, self.control.rank, own) from own

    def _outcomes(
        self, engine: NativeEngine | None, own: BaseException | None
    ) -> list[Plain | None]:
        """Sends this rank's outcome to all ranks and collects theirs, by rank; None for a rank
        whose outcome does not come in time."""
        control = self.control
        # An engine is closed or interrupted between two steps: that is no failure.
        stopped = engine is not None and isinstance(own, STOPPED)
        error = None if own is None or stopped else _described(own)
        facts = None if engine is None or error else _facts(engine)
        outcome = {"rank": control.rank, "error": error, "facts": facts}
        control.tell(control.all_ranks, GATHERED, [TOPIC, outcome])
        found: list[Plain | None] = []
        limit_s = GRACE_S if error else GATHER_LIMIT_S
        for rank in control.all_ranks:
            its: Plain | None = outcome
            if rank != control.rank:
                its = control.last_gathered(rank, TOPIC, limit_s)
            if its is None or its["error"]:
                limit_s = GRACE_S
            found.append(its)
        return found

    def _differ(self, outcomes: Sequence[Plain | None]) -> bool:
        """Returns whether a rank sent no outcome, or the ranks of one replica ended differently:
        with different errors, or only some with an error."""
        size = len(self.control.replica)
        for first in range(0, len(outcomes), size):
            replica = outcomes[first : first + size]
            if any(its is None or _cause(its) != _cause(replica[0]) for its in replica):
                return True
        return False


def raise_if_failed(control: Control) -> None:
    """Raise RankError if another rank has left, with an error, the call that this rank is in."""
    for outcome in control.gathered_early(TOPIC):
        if outcome["error"]:
            raise RankError(outcome["rank"], _text(outcome["error"]))


def _facts(engine: NativeEngine) -> Plain:
    info, built = engine.info, engine.num_built()
    return {
        "built": [built.kernels, built.graphs],
        "memory_bytes": info.memory_bytes,
        "warnings": info.warnings,
        "devices": info.devices,
    }


def _merged(outcomes: Sequence[Plain | None]) -> Facts:
    of_ranks = [its["facts"] for its in outcomes if its is not None and its["facts"]]
    built = zip(*(facts["built"] for facts in of_ranks), strict=True)
    memory = [facts["memory_bytes"] for facts in of_ranks]
    parts = dict.fromkeys(part for of_rank in memory for part in of_rank)
    return Facts(
        built=Built(*(max(counts) for counts in built)),
        memory_bytes={part: max(of_rank.get(part, 0) for of_rank in memory) for part in parts},
        warnings=list(dict.fromkeys(text for facts in of_ranks for text in facts["warnings"])),
        devices=[device for facts in of_ranks for device in facts["devices"]],
    )


def _described(error: BaseException) -> Plain:
    fields = vars(error) if isinstance(error, UserError) else {}
    kind = type(error).__name__
    return {"kind": kind, "text": str(error), "fields": fields, "at": time.time()}


def _text(error: Plain) -> str:
    return f"{error['kind']}: {error['text']}"


def _cause(outcome: Plain) -> tuple[str, str] | None:
    error = outcome["error"]
    return (error["kind"], error["text"]) if error else None


def _cause_of(error: BaseException) -> tuple[str, str] | None:
    return _cause({"error": _described(error)})


def _error_of(outcome: Plain, rank: int, own: BaseException | None) -> BaseException:
    """The error of an outcome: a user's mistake as such, any other with its rank's number."""
    error = outcome["error"]
    if own is not None and (outcome["rank"] == rank or _cause_of(own) == _cause(outcome)):
        return own
    kind = getattr(errors, error["kind"], None)
    if not (isinstance(kind, type) and issubclass(kind, UserError)):
        return RankError(outcome["rank"], _text(error))
    found: UserError = kind.__new__(kind, error["text"])
    vars(found).update(error["fields"])
    return found
