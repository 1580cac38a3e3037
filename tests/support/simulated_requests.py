"""Simulated requests for choosers of draft lengths, and the milliseconds that their steps take."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean

from records import part

from hydraspec.engine.costs import CostTable
from hydraspec.engine.schedule.draft_lengths import ChosenDrafts, DraftLengths
from hydraspec.engine.slots import RAGGED_SHARE
from hydraspec.types import RequestStep

MOST = 6
LINEAR = [1 + 0.3 * k for k in range(MOST + 1)]
Rates = Callable[[int, int], Sequence[float]]  # by step and request


def table(step_ms: Sequence[float]) -> CostTable:
    return CostTable(batches=(1,), drafts=tuple(range(len(step_ms))), step_ms=(tuple(step_ms),))


class Traffic:
    """Requests whose draft i is accepted at a rate, once those before it were. A step verifies what
    the one before proposed for the request, and no more than it has rows for."""

    def __init__(self, rates: Rates) -> None:
        self.rates, self.draw = rates, random.Random(1)
        self.num_steps, self.proposed = 0, list[int]()  # of each request

    def step(self, chosen: ChosenDrafts) -> list[RequestStep]:
        steps = []
        for index, count in enumerate(chosen.counts):
            rates = self.rates(self.num_steps, index)
            offered, accepted = min(count, *self.proposed[index : index + 1] or [0]), 0
            while accepted < offered and self.draw.random() < rates[accepted]:
                accepted += 1
            steps.append(part(index, offered, accepted))
        self.num_steps += 1
        self.proposed = [
            chosen.draft_length if chosen.for_all or count else 0 for count in chosen.counts
        ]
        return steps


def decode(
    lengths: DraftLengths, rates: Rates, num_steps: int, num_requests: int, fixed: int | None = None
) -> tuple[float, list[int]]:
    """Tokens per millisecond, and the longest length of each step."""
    tokens, ms, chosen = 0, 0.0, []
    for drafts, steps, step_ms in decoded(lengths, rates, num_steps, num_requests, fixed):
        tokens += sum(len(step.output_token_ids) for step in steps)
        ms += step_ms
        chosen.append(drafts.draft_length)
    return tokens / ms, chosen


def decoded(
    lengths: DraftLengths, rates: Rates, num_steps: int, num_requests: int, fixed: int | None = None
) -> Iterator[tuple[ChosenDrafts, list[RequestStep], float]]:
    """What each step was to verify, what came of it, and the milliseconds that it takes."""
    assert lengths.costs is not None
    lengths.start_over()
    traffic, slots = Traffic(rates), range(num_requests)
    for _ in range(num_steps):
        chosen = lengths.choose(slots, num_requests)
        if fixed is not None:
            chosen = ChosenDrafts([fixed] * num_requests, fixed)
        steps = traffic.step(chosen)
        lengths.observe(slots, steps)
        is_ragged = len(set(chosen.counts)) > 1
        cost = lengths.costs.at(num_requests, fmean(chosen.counts))
        drafting = lengths.costs.at(num_requests, chosen.draft_length).draft_ms or 0.0
        verify_ms = cost.step_ms - (cost.draft_ms or 0.0)
        yield chosen, steps, verify_ms * (1 + RAGGED_SHARE * is_ragged) + drafting


def always(*rates: float) -> Rates:
    return lambda step, request: rates


def chooser(costs: CostTable) -> DraftLengths:
    return DraftLengths(range(MOST + 1), costs, num_slots=16)
