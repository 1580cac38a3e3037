"""Drafts by request as `method.num_speculative_tokens=auto` gives them, by the functions with which
the engine chooses (engine/slots.py). Each request's survivals are taken as known, where the engine
estimates them while it runs: what is predicted is what it can reach.

Letters: R requests, K drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from hydraspec.analysis.predict.model import Step, Steps, equal_steps
from hydraspec.engine.costs import CostTable, Grid
from hydraspec.engine.slots import LengthCosts, accepted_by_length, best_allocation


def auto_steps(costs: CostTable, survivals: np.ndarray, offered: Sequence[int]) -> Steps:
    """Steps whose drafts are chosen by request among the `offered` numbers. survivals [R, K]: see
    engine/slots.py."""
    accepted, is_by_context = accepted_by_length(survivals, offered), len(costs.contexts) > 1

    @cache
    def of(batch: int, context: int | None) -> LengthCosts:
        return LengthCosts.of(costs, offered, batch, context)

    @cache
    def step(requests: tuple[int, ...], context: int | None) -> Step:
        known = of(len(requests), context)
        counts = best_allocation(accepted[list(requests)], known).counts
        return Step(counts, known.of_step(counts))

    return lambda requests, context: step(tuple(requests), context if is_by_context else None)


def in_batches(steps: Steps, num_requests: int, batch: int, context: int) -> list[Step]:
    """Steps of `batch` requests each in which every request is once; the last of them has some of
    the first again where they do not divide."""
    return [
        steps([i % num_requests for i in range(first, first + batch)], context)
        for first in range(0, num_requests, batch)
    ]


def gain(costs: CostTable, survivals: np.ndarray, batch: int, context: int) -> float:
    """Tokens per millisecond of `auto`, over those of the best number of drafts for all requests,
    while all of a batch decode; 1 at least."""
    num_requests = len(survivals)

    def speed(steps: Steps) -> float:
        tokens = milliseconds = 0.0
        for number, step in enumerate(in_batches(steps, num_requests, batch, context)):
            for place, count in enumerate(step.counts):
                request = (number * batch + place) % num_requests
                tokens += 1 + survivals[request, :count].sum()
            milliseconds += step.milliseconds
        return tokens / milliseconds

    fixed = max(speed(equal_steps(costs, k)) for k in costs.drafts)
    return speed(auto_steps(costs, survivals, costs.drafts)) / fixed


def with_plain(method: CostTable, plain: CostTable, beside: Mapping[int, CostTable]) -> CostTable:
    """The table of a drafter's steps, with steps without drafts as the baseline's are. Times of
    each K are those relative to the baseline `beside` it: the machine's speed may have changed."""
    places = [(c, b) for c in method.contexts or (None,) for b in method.batches]

    def joined(own: Grid, *, has_plain: bool) -> Grid:
        rows = list[tuple[float, ...]]()
        for (context, batch), row in zip(places, own, strict=True):
            plain_ms = plain.at(batch, 0, context).step_ms
            scales = [plain_ms / beside[k].at(batch, 0, context).step_ms for k in method.drafts]
            scaled = [ms * scale for ms, scale in zip(row, scales, strict=False)]
            rows.append((plain_ms * has_plain, *scaled) if row else ())
        return tuple(rows)

    return replace(
        method,
        drafts=(0, *method.drafts),
        step_ms=joined(method.step_ms, has_plain=True),
        draft_ms=method.draft_ms and joined(method.draft_ms, has_plain=False),
    )
