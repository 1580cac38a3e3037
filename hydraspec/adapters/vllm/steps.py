"""Step records of vLLM, from the tokens it returns and the counts it reports.

vLLM counts drafts over all requests of a step and returns only tokens per request. From both
together each request's part is worked out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

UNKNOWN_TOKEN = 0  # stands for a rejected draft, whose id vLLM does not report


@dataclass(slots=True)
class StepStats:
    """Collects vLLM's statistics of one step. `attach` is what vLLM takes as a stat logger."""

    drafted_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    num_running: int = 0
    num_waiting: int = 0
    num_preempted: int = 0
    kv_usage: float = 0.0

    def attach(self, vllm_config: Any, engine_index: int = 0) -> StatLogger:
        """A stat logger that fills this object."""
        return StatLogger(self)

    def clear(self) -> None:
        """Forget the step before."""
        self.drafted_per_position, self.accepted_per_position = [], []
        self.num_running = self.num_waiting = self.num_preempted = 0
        self.kv_usage = 0.0

    def add(self, scheduler: Any, iteration: Any) -> None:
        """Take over the counts that vLLM reports; either may be None."""
        if iteration is not None:
            self.num_preempted += iteration.num_preempted_reqs
        if scheduler is None:
            return
        self.num_running = scheduler.num_running_reqs
        self.num_waiting = scheduler.num_waiting_reqs
        self.kv_usage = scheduler.kv_cache_usage
        drafts = scheduler.spec_decoding_stats
        if drafts is not None:
            self.drafted_per_position = _sums(
                self.drafted_per_position, drafts.num_draft_tokens_per_pos
            )
            self.accepted_per_position = _sums(
                self.accepted_per_position, drafts.num_accepted_tokens_per_pos
            )


class StatLogger:
    """vLLM's interface of a stat logger: the methods of its StatLoggerBase."""

    def __init__(self, stats: StepStats) -> None:
        self._stats = stats

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Keep the numbers that vLLM reports after a step."""
        self._stats.add(scheduler_stats, iteration_stats)

    def log_engine_initialized(self) -> None:
        """Do nothing."""

    def log(self) -> None:
        """Do nothing."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """It never sleeps."""


@dataclass(slots=True, kw_only=True)
class Part:
    """A decoding request's part in a step."""

    num_emitted: int
    finished: bool  # a stop or a limit may have cut what was accepted
    num_accepted: int = 0
    num_drafted: int = 0


def share_out(parts: Sequence[Part], stats: StepStats) -> None:
    """Fill in what each request was offered and accepted; the sums are vLLM's own, per position.

    A request that goes on accepted all it emitted but one. The counts left over belong to those
    that finished; among several of them the larger goes to the one that emitted more, which is
    exact up to the order of requests that finished in the same step.
    """
    accepted = _descending(stats.accepted_per_position, sum(stats.drafted_per_position[:1]))
    for part in parts:
        part.num_accepted = part.num_emitted - 1
        if not part.finished and part.num_accepted in accepted:
            accepted.remove(part.num_accepted)
    ended = sorted((p for p in parts if p.finished), key=lambda p: -p.num_emitted)
    for part, count in zip(ended, accepted, strict=False):
        part.num_accepted = max(count, part.num_emitted - 1)
    drafted = _descending(stats.drafted_per_position)
    by_accepted = sorted(parts, key=lambda p: -p.num_accepted)
    for part, width in zip(by_accepted, drafted + [0] * len(parts), strict=False):
        part.num_drafted = max(width, part.num_accepted)


def drafts_of(part: Part, emitted: Sequence[int]) -> list[int]:
    """The draft tokens of a request as far as they are known: those that were accepted and kept."""
    known = list(emitted[: part.num_accepted])
    return known + [UNKNOWN_TOKEN] * (part.num_drafted - len(known))


def _sums(ours: Iterable[int], theirs: Iterable[int]) -> list[int]:
    return [a + b for a, b in zip_longest(ours, theirs, fillvalue=0)]


def _descending(per_position: Sequence[int], total: int | None = None) -> list[int]:
    """The counts, largest first, that a histogram "how many reached position i" is made of.

    `total` adds those that reached none, up to so many counts in all.
    """
    counts: list[int] = []
    for reached, number in reversed(list(enumerate(per_position, start=1))):
        counts += [reached] * (number - len(counts))
    return counts + [0] * ((total or 0) - len(counts))
