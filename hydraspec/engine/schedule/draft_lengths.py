"""Choice of the number of drafts that each step verifies and proposes, while requests run
(docs/adr/0035).

The choice follows from plain numbers on the host: counts of steps whose results have arrived, and
measured costs. The same costs and results give the same choices, on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from operator import mul
from pathlib import Path

from hydraspec.config.messages import refusal
from hydraspec.config.schema import MethodConfig, PerStep, RunConfig
from hydraspec.engine import costs
from hydraspec.engine.costs import CostTable
from hydraspec.types import RequestStep

# Share of its weight that a count keeps with every further step: the last 100 steps decide.
KEPT_PER_STEP = 0.99
# Rate that is assumed of a draft that was never verified, and its weight in verifications. After
# the first position the rate of the position before is assumed.
ASSUMED_RATE, ASSUMED_WEIGHT = 0.8, 1.0
# A run begins as if it had seen so many verifications of each draft, with the rates of the steps
# whose costs were measured, or with ASSUMED_RATE where these are not known.
MEASURED_WEIGHT, UNKNOWN_WEIGHT = 16.0, 4.0
# Speeds are means over so many steps of a length, or over a share of the steps that the present
# length has lasted. In the first of them a request has no more drafts to verify than the step
# before proposed, so a longer length has to make up for that in the others.
STEPS_OF_LENGTH, SHARE_OF_LAST = 7.0, 0.25
# Weight of the newest step in the costs that choices follow, which are means over recent steps:
# where a request ends and the next one joins, one step has fewer requests.
COSTS_OF_STEP = 0.25
# Share of the time that may be spent on trying a longer draft than the best, if such a draft was
# not verified for so many steps: drafts that were rejected before may be accepted now.
TRIAL_SHARE = 0.01
STEPS_UNTIL_TRIAL = 100


def offered_lengths(method: MethodConfig) -> tuple[int, ...]:
    """The lengths to choose from by costs, see `lengths_up_to`. Empty where K is fixed."""
    if not isinstance(method.num_speculative_tokens, PerStep):
        return ()
    return lengths_up_to(method.most_drafts)


def lengths_up_to(most: int) -> tuple[int, ...]:
    """Draft lengths that steps may have, rising from 0 to `most`; with more than 8, those above 4
    have gaps, as each has its own graphs."""
    if most <= 8:
        return tuple(range(most + 1))
    return (*(n for n in (0, 1, 2, 3, 4, 6, 8, 12, 16, 24) if n < most), most)


def build_draft_lengths(config: RunConfig, num_micro_batches: int) -> DraftLengths | None:
    """The chooser of K for each step; None where K is fixed.

    Raises:
        ConfigurationError: method.costs names no table, or one that lacks some of the lengths.
    """
    method = config.method
    offered = offered_lengths(method)
    if not offered:
        return None
    most, table = method.most_drafts, None
    if method.costs is not None:
        table = costs.read(Path(method.costs))
        if table.drafts[0] > 0 or table.drafts[-1] < most:
            raise refusal(
                "method.costs",
                method.costs,
                f"has steps of {table.drafts[0]} to {table.drafts[-1]} drafts",
                allowed=f"a table of 0 to {most} (method.max_speculative_tokens)",
                remedy="leave the key out to have costs measured",
            )
    return DraftLengths(offered, table, num_micro_batches)


class AcceptanceCounts:
    """Counts of how often draft i was verified, and accepted, after i accepted ones, over all
    requests."""

    def __init__(self, most: int, rates: Sequence[float] = (), weight: float = 0.0) -> None:
        """Starts as if `weight` verifications of each of `most` drafts had had these rates."""
        self._reached = [weight] * most  # verifications of draft i after i accepted ones
        self._accepted = [weight * rate for rate in rates or [ASSUMED_RATE] * most]
        self.unseen = [0] * most  # steps since draft i was offered

    def add(self, requests: Iterable[RequestStep], kept: float = 1.0) -> None:
        """Count what a step verified; earlier counts keep a share `kept` of their weight. Drafts
        that were not proposed do not count."""
        most = len(self._reached)
        num_reached, num_accepted = [0] * (most + 1), [0] * (most + 1)  # requests, by drafts
        longest = 0
        for step in requests:
            offered = len(step.draft_token_ids)
            accepted = min(step.num_accepted, offered)
            num_reached[min(accepted + 1, offered)] += 1
            num_accepted[accepted] += 1
            longest = max(longest, offered)
        more_reached = more_accepted = 0
        for i in reversed(range(most)):
            more_reached += num_reached[i + 1]
            more_accepted += num_accepted[i + 1]
            self._reached[i] = self._reached[i] * kept + more_reached
            self._accepted[i] = self._accepted[i] * kept + more_accepted
            self.unseen[i] = 0 if i < longest else self.unseen[i] + 1

    def rates(self) -> list[float]:
        """Estimated probabilities that draft i is accepted after i accepted ones, for each i."""
        rates, before = [], ASSUMED_RATE
        for accepted, reached in zip(self._accepted, self._reached, strict=True):
            before = (accepted + ASSUMED_WEIGHT * before) / (reached + ASSUMED_WEIGHT)
            rates.append(before)
        return rates


class DraftLengths:
    """Chooses the draft length with the most expected tokens per millisecond.

    Attributes:
        costs: of decode steps by requests and length; None: unknown, steps have the most drafts.
    """

    def __init__(
        self, offered: Sequence[int], costs: CostTable | None = None, num_micro_batches: int = 1
    ) -> None:
        """offered: the lengths to choose from, rising from 0. num_micro_batches: see Scheduler."""
        self.offered = offered
        # Drafts are verified in the next step of the same requests.
        self._steps_of_trial = 1 + num_micro_batches
        self.costs = costs
        self._script: Iterator[int] | None = None
        self.start_over()

    def start_over(self) -> None:
        """Begin a run: counts start from rates seen while costs were measured, or assumed ones."""
        most = self.offered[-1]
        measured = self.costs.rates if self.costs is not None else ()
        weight = MEASURED_WEIGHT if measured else UNKNOWN_WEIGHT
        self._counts = AcceptanceCounts(most, measured[:most], weight)
        self._last: int | None = None  # index of the last choice that was no trial
        self._num_same = 0  # choices of it in a row
        self._known_ms: dict[int, list[float]] = {}  # by requests in the step, then by length
        self._recent_ms: list[float] = []  # mean costs of recent steps, by length
        self._saved_ms = 0.0  # saved up for a trial
        self._trial: list[int] = []  # lengths of the further steps of a trial

    def follow(self, script: Iterable[int] | None) -> None:
        """Take lengths from `script` instead of choosing, to measure costs; None: choose again."""
        self._script = None if script is None else iter(script)

    def choose(self, num_requests: int) -> int:
        """Drafts per request of the next step, which has about `num_requests` requests."""
        if self._script is not None:
            return next(self._script)
        if self.costs is None:
            return self.offered[-1]
        if self._trial:
            return self._trial.pop()
        costs = self._known_ms.get(num_requests)
        if costs is None:
            costs = [self.costs.at(num_requests, length).step_ms for length in self.offered]
            self._known_ms[num_requests] = costs
        self._recent_ms = [
            before + COSTS_OF_STEP * (now - before)
            for before, now in zip(self._recent_ms or costs, costs, strict=True)
        ]
        best = self._best(self._recent_ms)
        self._num_same = self._num_same + 1 if best == self._last else 1
        self._last = best
        return self.offered[best + self._tries_more(self._recent_ms, best)]

    def observe(self, requests: Iterable[RequestStep]) -> None:
        """Count what a step verified."""
        self._counts.add(requests, KEPT_PER_STEP)

    def _best(self, costs: Sequence[float]) -> int:
        """The index of the length with the most tokens per millisecond."""
        tokens = list(accumulate(accumulate(self._counts.rates(), mul), initial=1.0))  # by length
        proposed = self.offered[-1 if self._last is None else self._last]
        further = max(STEPS_OF_LENGTH, SHARE_OF_LAST * self._num_same) - 1
        speeds = [
            (further * tokens[n] + tokens[min(n, proposed)]) / (1 + further) / ms
            for n, ms in zip(self.offered, costs, strict=True)
        ]
        return max(range(len(speeds)), key=speeds.__getitem__)

    def _tries_more(self, costs: Sequence[float], best: int) -> bool:
        """Returns whether this step and a few after it try the length after the best, where that
        was not verified for long. Every step saves TRIAL_SHARE of its time; the savings pay for the
        longer steps of a trial."""
        self._saved_ms += TRIAL_SHARE * costs[best]
        if best + 1 == len(costs):
            self._saved_ms = 0.0
            return False
        longer = self._steps_of_trial * (costs[best + 1] - costs[best])
        length = self.offered[best + 1]
        if self._counts.unseen[length - 1] < STEPS_UNTIL_TRIAL or self._saved_ms < longer:
            return False
        self._saved_ms = 0.0
        self._trial = [length] * (self._steps_of_trial - 1)
        return True
