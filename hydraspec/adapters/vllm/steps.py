"""Step records of vLLM, from the tokens it returns and the counts it reports.

vLLM counts drafts over all requests of a step and returns only tokens per request. Each request's
part is worked out from these two.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

UNKNOWN_TOKEN = 0  # stands for a rejected draft, whose id vLLM does not report


@dataclass(slots=True)
class StepStats:
    """Statistics that vLLM reports of one step; vLLM gets `attach` as factory of a stat logger."""

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
        """Resets all counts before a step."""
        self.drafted_per_position, self.accepted_per_position = [], []
        self.num_running = self.num_waiting = self.num_preempted = 0
        self.kv_usage = 0.0

    def add(self, scheduler: Any, iteration: Any) -> None:
        """Takes over the counts that vLLM reports; both arguments may be None."""
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
    """Stat logger with the methods of vLLM's StatLoggerBase, which fills a StepStats."""

    def __init__(self, stats: StepStats) -> None:
        self._stats = stats

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Keeps the numbers that vLLM reports after a step."""
        self._stats.add(scheduler_stats, iteration_stats)

    def log_engine_initialized(self) -> None:
        """Does nothing."""

    def log(self) -> None:
        """Does nothing."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """Does nothing: the engine never sleeps."""


@dataclass(slots=True, kw_only=True)
class Part:
    """Numbers of tokens of a decoding request in one step."""

    num_emitted: int
    finished: bool  # a stop or a limit may have cut what was accepted
    num_accepted: int = 0
    num_drafted: int = 0


def share_out(parts: Sequence[Part], stats: StepStats) -> None:
    """Fills in how many drafts each request was offered and accepted; vLLM reports their sums per
    position.

    A request that goes on accepted all tokens that it emitted but one. The remaining counts belong
    to finished requests, larger ones to those that emitted more, which is exact up to the order of
    requests that finished in the same step.
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
    """The draft tokens of a request: those that were accepted and kept, then UNKNOWN_TOKEN."""
    known = list(emitted[: part.num_accepted])
    return known + [UNKNOWN_TOKEN] * (part.num_drafted - len(known))


def _sums(ours: Iterable[int], theirs: Iterable[int]) -> list[int]:
    return [a + b for a, b in zip_longest(ours, theirs, fillvalue=0)]


def _descending(per_position: Sequence[int], total: int | None = None) -> list[int]:
    """Lengths, largest first, of which per_position[i] are above i.

    `total` appends zeros until there are so many lengths.
    """
    counts: list[int] = []
    for reached, number in reversed(list(enumerate(per_position, start=1))):
        counts += [reached] * (number - len(counts))
    return counts + [0] * ((total or 0) - len(counts))
