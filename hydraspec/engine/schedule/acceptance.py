"""Estimates of how likely drafts are accepted, in all requests and in each, from
steps whose results have arrived (docs/adr/0035, docs/adr/0052)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from hydraspec.types import RequestStep

# Share of its weight that a count keeps with every further step: the last 100 steps decide.
KEPT_PER_STEP = 0.99
# Rate that is assumed of a draft that was never verified, and its weight in verifications. After
# the first position the rate of the position before is assumed.
ASSUMED_RATE, ASSUMED_WEIGHT = 0.8, 1.0
# A run begins as if it had seen so many verifications of each draft, with the rates of the steps
# whose costs were measured, or with ASSUMED_RATE where these are not known.
MEASURED_WEIGHT, UNKNOWN_WEIGHT = 16.0, 4.0
# A request's own counts lose weight with each of its steps that verified drafts, and slowly with
# the others: a request whose drafts were rejected is tried again once its counts have faded.
KEPT_BY_REQUEST, KEPT_AT_REST = 0.95, 0.998
# Weight of the rates of all requests beside a request's own counts, in verifications.
WEIGHT_OF_ALL = 4.0
MOST_LIKELY = 0.97  # rate that is expected of a draft that the request has not shown
# A new request's first draft is expected to be accepted as often as it was at most with this share
# of the last NUM_KNOWN requests: the mean of all would never try one that is better than most.
HOPED_SHARE, NUM_KNOWN = 0.75, 32
NUM_ASSUMED = 2  # requests that are assumed beside them, of at most ASSUMED_RATE


def outcomes(requests: Sequence[RequestStep], most: int) -> np.ndarray:
    """What a step says of each draft [B, 2, K]: 1 where it was verified after accepted ones, and 1
    where it was accepted. Drafts that were not proposed say nothing."""
    ends = []
    for step in requests:
        offered, accepted = len(step.draft_token_ids), step.num_accepted
        ends.append((min(accepted + 1, offered), min(accepted, offered)))
    found: np.ndarray = np.arange(most) < np.array(ends).reshape(-1, 2, 1)
    return found


class AcceptanceCounts:
    """Counts of how often draft i was verified, and accepted, after i accepted ones, over all
    requests."""

    def __init__(self, most: int, rates: Sequence[float] = (), weight: float = 0.0) -> None:
        """Starts as if `weight` verifications of each of `most` drafts had had these rates."""
        accepted = [weight * rate for rate in rates or [ASSUMED_RATE] * most]
        self._counts = np.array([[weight] * most, accepted])  # [2, K], see outcomes
        self.unseen = np.zeros(most, dtype=np.int64)  # steps since draft i was offered

    def add(self, found: np.ndarray, longest: int, kept: float = 1.0) -> None:
        """Count the `outcomes` of a step in which some request was offered `longest` drafts;
        earlier counts keep a share `kept` of their weight."""
        self._counts *= kept
        self._counts += found.sum(0)
        self.unseen += 1
        self.unseen[:longest] = 0

    def rates(self) -> list[float]:
        """Estimated probabilities that draft i is accepted after i accepted ones, for each i."""
        rates, before = [], ASSUMED_RATE
        for reached, accepted in self._counts.T.tolist():
            before = (accepted + ASSUMED_WEIGHT * before) / (reached + ASSUMED_WEIGHT)
            rates.append(before)
        return rates

    def standard_errors(self, rates: np.ndarray) -> np.ndarray:
        """Standard errors [K] of the estimates `rates`, by the number of verifications."""
        found: np.ndarray = np.sqrt(rates * (1 - rates) / (self._counts[0] + ASSUMED_WEIGHT))
        return found


class RequestAcceptance:
    """Counts of all requests, and of each by its slot.

    Attributes:
        of_all: over all requests.
    """

    def __init__(self, most: int, rates: Sequence[float], num_slots: int) -> None:
        """most: K. rates: measured ones of all requests to start from; empty: unknown."""
        weight = MEASURED_WEIGHT if rates else UNKNOWN_WEIGHT
        self.of_all = AcceptanceCounts(most, rates[:most], weight)
        # See outcomes. The last two rows are of no request: one without counts, and one that takes
        # results of requests that have lost their slot.
        self._by_slot = np.zeros((num_slots + 2, 2, most))
        self._known = deque[np.ndarray](maxlen=NUM_KNOWN)  # [2] first drafts of earlier requests
        self._hoped: float | None = None  # see _hope; None: some request is new

    def begin(self, slot: int) -> None:
        """Give `slot` to another request, of which nothing is known."""
        self._known.append(self._by_slot[slot, :, 0].copy())
        self._by_slot[slot] = 0
        self._hoped = None

    def _hope(self) -> float:
        """The rate that is expected of a new request's first draft."""
        if self._hoped is None:
            reached, accepted = np.array([*self._known, *self._by_slot[:, :, 0]]).T
            seen = reached >= 1
            weight = WEIGHT_OF_ALL
            rates = (accepted[seen] + weight * self.of_all.rates()[0]) / (reached[seen] + weight)
            known = sorted([*rates, *[self._assumed()] * NUM_ASSUMED])
            place = HOPED_SHARE * (len(known) - 1)
            self._hoped = float(np.interp(place, range(len(known)), known))
        return self._hoped

    def _assumed(self) -> float:
        """The rate of first drafts in the better requests, if the others accept none."""
        return min(ASSUMED_RATE, self.of_all.rates()[0] / (1 - HOPED_SHARE))

    def add(self, slots: Sequence[int], steps: Sequence[Sequence[RequestStep]]) -> None:
        """Count what steps of the same requests verified, in order; slot -1: it has lost its
        slot."""
        rows, most = np.asarray(slots), self._by_slot.shape[2]
        counts = self._by_slot[rows]
        for step in steps:
            found, offered = outcomes(step, most), [len(each.draft_token_ids) for each in step]
            self.of_all.add(found, max(offered), KEPT_PER_STEP)
            kept = [KEPT_BY_REQUEST if count else KEPT_AT_REST for count in offered]
            counts = counts * np.array(kept)[:, None, None] + found
        self._by_slot[rows] = counts

    def survivals(self, slots: Sequence[int], num_new: int) -> np.ndarray:
        """Estimated survivals [B, K] of the drafts of the requests in `slots`, and then of
        `num_new` without a slot.

        A rate is that of all requests, with the request's own counts beside it. A request whose
        drafts are rejected more often than others' is not expected to accept those that it was not
        seen to reach as often as they do.
        """
        counts: np.ndarray = self._by_slot[[*slots, *[-2] * num_new]]
        reached, accepted = counts[:, 0], counts[:, 1]
        rates = np.array(self.of_all.rates())
        rates[0] = max(rates[0], self._hope())
        quality = (accepted.sum(1) + WEIGHT_OF_ALL) / (reached @ rates + WEIGHT_OF_ALL)
        # Drafts that few steps had are expected to do well: shorter steps would never show them.
        rates[1:] += self.of_all.standard_errors(rates)[1:]
        expected = np.minimum(rates * quality[:, None], MOST_LIKELY)
        of_each = (accepted + WEIGHT_OF_ALL * expected) / (reached + WEIGHT_OF_ALL)
        return np.cumprod(of_each, axis=1)
