"""Drafts of each request of a step that are worth their rows (docs/adr/0052): pure functions of
survivals and step costs, in host numbers.

The survival of draft i of a request is the probability that it and those before it are accepted, so
the sum of a request's survivals is its expected number of accepted drafts. A step has at most two
numbers of drafts: the same tokens cost more time in a step with many different row counts.

Letters: B requests, K most drafts, N offered lengths, P pairs of them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from operator import itemgetter

import numpy as np

from hydraspec.engine.costs import CostTable

# Share that a step with two numbers of drafts takes longer than one of equally many rows, by tables
# in which it was not measured.
RAGGED_SHARE = 0.08
# A length is kept while no split gains more than this share of what the length gains over none.
KEPT_SHARE = 0.06


@dataclass(slots=True, frozen=True)
class LengthCosts:
    """Milliseconds of a step by the drafts that its requests verify, and that they propose."""

    offered: tuple[int, ...]  # N lengths, rising from 0
    verify_ms: np.ndarray  # [N] with as many drafts for every request, without drafting
    draft_ms: np.ndarray  # [N] of drafting so many; 0 where it is a part of verify_ms
    ragged_ms: np.ndarray  # [N] what a step with two numbers of drafts takes longer, by their mean

    @classmethod
    def of(
        cls, table: CostTable, offered: Sequence[int], batch: int, context: float | None
    ) -> LengthCosts:
        """Costs of steps of `batch` requests with `context` tokens each, see CostTable.at."""
        each = [table.at(batch, length, context) for length in offered]
        draft_ms = np.array([cost.draft_ms or 0.0 for cost in each])
        verify_ms = np.array([cost.step_ms for cost in each]) - draft_ms
        ragged_ms = RAGGED_SHARE * verify_ms
        if table.ragged_ms is not None:
            ragged_ms = np.array([cost.ragged_ms for cost in each])
        return cls(tuple(offered), verify_ms, draft_ms, ragged_ms)

    @property
    def draft_row_ms(self) -> float:
        """Milliseconds of verifying one more draft of every request, on average."""
        return float(self.verify_ms[-1] - self.verify_ms[0]) / self.offered[-1]

    def step_ms(self, mean: np.ndarray, most: np.ndarray, is_ragged: np.ndarray) -> np.ndarray:
        """Times [...] of steps that verify `mean` drafts a request and propose offered[most]."""
        found: np.ndarray = np.interp(mean, self.offered, self.ragged_ms)
        found *= is_ragged
        found += np.interp(mean, self.offered, self.verify_ms)
        found += self.draft_ms[most]
        return found

    def of_step(self, counts: np.ndarray) -> float:
        """Milliseconds of the step whose requests verify `counts` [B] drafts."""
        most, is_ragged = self.offered.index(int(counts.max())), counts.min() < counts.max()
        return float(self.step_ms(counts.mean(), np.array(most), is_ragged))


@dataclass(slots=True, frozen=True)
class Allocation:
    """Drafts of each request, of a step."""

    counts: np.ndarray  # [B] int64
    most: int  # index of the largest count in the offered lengths
    tokens_per_ms: float  # expected of such steps


@dataclass(slots=True, frozen=True)
class _Splits:
    """Every way to give m of B requests the longer, the others the shorter length of a pair."""

    shorter: np.ndarray  # [P] index of a length
    longer: np.ndarray  # [P]
    mean: np.ndarray  # [P, B+1] drafts per request, by m
    most: np.ndarray  # [P, B+1] index of the longest length that any request has
    is_ragged: np.ndarray  # [P, B+1]


@cache
def _splits(offered: tuple[int, ...], num_requests: int) -> _Splits:
    shorter, longer = np.triu_indices(len(offered), 1)
    lengths, m = np.array(offered), np.arange(num_requests + 1)
    less, more = lengths[shorter, None], lengths[longer, None]
    return _Splits(
        shorter=shorter,
        longer=longer,
        mean=less + (more - less) * m / num_requests,
        most=np.where(m > 0, longer[:, None], shorter[:, None]),
        is_ragged=np.broadcast_to((m > 0) & (m < num_requests), (len(shorter), len(m))),
    )


def accepted_by_length(survivals: np.ndarray, offered: Sequence[int]) -> np.ndarray:
    """Expected accepted drafts [B, N] of survivals [B, K], by the offered lengths."""
    sums = np.zeros((len(survivals), survivals.shape[1] + 1))
    np.cumsum(survivals, axis=1, out=sums[:, 1:])
    return sums[:, list(offered)]


def best_allocation(
    accepted: np.ndarray, costs: LengthCosts, last: int | None = None
) -> Allocation:
    """The drafts of each request with the most expected tokens per millisecond, of all steps with
    at most two lengths. accepted [B, N]: see `accepted_by_length`. last: index of the length that
    every request has unless others are better by KEPT_SHARE; None or 0: no such length."""
    num_requests = len(accepted)
    if num_requests == 1:
        return _best_of_one(accepted[0], costs, last)
    splits = _splits(costs.offered, num_requests)
    gains = accepted[:, splits.longer] - accepted[:, splits.shorter]  # [B, P]
    tokens = np.empty_like(splits.mean)
    tokens[:, 0] = num_requests + accepted.sum(0)[splits.shorter]
    tokens[:, 1:] = -np.sort(-gains, axis=0).T
    speeds = np.cumsum(tokens, axis=1) / costs.step_ms(splits.mean, splits.most, splits.is_ragged)
    pair, m = divmod(int(speeds.argmax()), num_requests + 1)
    if last:  # the first pairs are those of no drafts and each other length
        none, kept = float(speeds[0, 0]), float(speeds[last - 1, -1])
        if float(speeds[pair, m]) - kept < KEPT_SHARE * (kept - none):
            pair, m = last - 1, num_requests
    counts = np.full(num_requests, costs.offered[splits.shorter[pair]])
    first = np.argsort(-gains[:, pair], kind="stable")[:m]
    counts[first] = costs.offered[splits.longer[pair]]
    return Allocation(counts, int(splits.most[pair, m]), float(speeds[pair, m]))


def _best_of_one(accepted: np.ndarray, costs: LengthCosts, last: int | None) -> Allocation:
    """`best_allocation` of one request, which takes a small step's host less time."""
    speeds: list[float] = ((1 + accepted) / (costs.verify_ms + costs.draft_ms)).tolist()
    most = speeds.index(max(speeds))
    if last and speeds[most] - speeds[last] < KEPT_SHARE * (speeds[last] - speeds[0]):
        most = last
    return Allocation(np.array([costs.offered[most]]), most, speeds[most])


def least_survivals(
    costs: LengthCosts, num_requests: int, tokens_per_ms: float
) -> tuple[float, float]:
    """Survivals above which a first and a further draft are worth their rows where `tokens_per_ms`
    are reached: the tokens that other steps yield in the time of the row. The first row costs what
    one costs on average; a further one what it adds to a step with drafts, which may be less: a
    step without any has kernels for one row."""
    each = tokens_per_ms / num_requests
    some, most = costs.offered[1], costs.offered[-1]
    first = further = costs.draft_row_ms
    if most > some:
        further = float(costs.verify_ms[-1] - costs.verify_ms[1]) / (most - some)
    return each * first, each * further


def leading(survivals: Iterable[Sequence[float]], least: tuple[float, float]) -> list[int]:
    """Numbers [B] of leading drafts whose survivals [B, K] are all at least those of `least`: of
    the first draft, and of the others."""
    first, further = least
    return [
        1 + sum(1 for _ in takewhile(further.__le__, each[1:])) if each[0] >= first else 0
        for each in survivals
    ]


def in_two_lengths(wanted: Sequence[int], costs: LengthCosts) -> tuple[int, int]:
    """The two offered lengths to which numbers of drafts wanted [B] are raised as costs least: to
    the first where that is enough, else to the second; they are equal where one serves all. Drafts
    that are not wanted are worth half of their rows: between nothing and all. So the second is more
    than the most that is wanted where it costs next to nothing.

    Whether a draft is verified depends on the wanted numbers alone, never on estimates that read
    it."""
    offered, num_requests, rising = costs.offered, len(wanted), sorted(wanted)
    if rising[0] == offered[-1]:
        return offered[-1], offered[-1]
    verify_ms, ragged_ms = costs.verify_ms.tolist(), costs.ragged_ms.tolist()
    worth = costs.draft_row_ms / 2  # of a draft that is not wanted
    most = bisect_left(offered, rising[-1])
    found: list[tuple[float, tuple[int, int]]] = []
    for longer in offered[most:]:  # few pairs, for which numpy takes a step's host longer
        for shorter in (*offered[:most], longer):
            num_short = bisect_right(rising, shorter)
            mean = longer + (shorter - longer) * num_short / num_requests
            ms = _interpolated(mean, offered, verify_ms) - worth * mean
            if 0 < num_short < num_requests:
                ms += _interpolated(mean, offered, ragged_ms)
            found.append((ms, (shorter if num_short else longer, longer)))
    return min(found, key=itemgetter(0))[1]


def _interpolated(x: float, rising: Sequence[int], values: Sequence[float]) -> float:
    """The value at x, which lies within `rising`, linearly between those beside it."""
    at = max(1, bisect_left(rising, x))
    share = (x - rising[at - 1]) / (rising[at] - rising[at - 1])
    return values[at - 1] + share * (values[at] - values[at - 1])
