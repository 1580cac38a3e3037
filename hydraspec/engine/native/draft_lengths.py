"""How many drafts each step verifies and proposes, where that is chosen while requests run
(docs/adr/0035).

Plain numbers on the host: counts of steps whose results have arrived, and measured costs. The same
costs and results give the same choices, on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from operator import mul
from pathlib import Path

from hydraspec import costs
from hydraspec.config.messages import refusal
from hydraspec.config.schema import MethodConfig, PerStep, RunConfig
from hydraspec.costs import CostTable
from hydraspec.types import RequestStep

# A count loses so much of its weight with every further step, so that the last 100 steps decide.
KEPT_PER_STEP = 0.99
# What is assumed of a draft that was never verified, and the weight of that in verifications. After
# the first position the rate of the one before is assumed.
ASSUMED_RATE, ASSUMED_WEIGHT = 0.8, 1.0
# Another length has to promise so much more: the step in which it changes pays for rows or drafts
# that are of no use.
LEAST_GAIN = 1.01
# Of the time goes to steps that try a longer draft than the best: what was rejected before may be
# accepted now.
TRIAL_SHARE = 0.01
FEWEST_STEPS_BETWEEN = 20


def offered_lengths(method: MethodConfig) -> tuple[int, ...]:
    """The lengths to choose from, 0 to the most, above 4 with gaps where those would be many:
    each is measured, and has its own graphs. Empty where K is fixed."""
    if not isinstance(method.num_speculative_tokens, PerStep):
        return ()
    most = method.most_drafts
    if most <= 8:
        return tuple(range(most + 1))
    return (*(n for n in (0, 1, 2, 3, 4, 6, 8, 12, 16, 24) if n < most), most)


def build_draft_lengths(config: RunConfig, num_micro_batches: int) -> DraftLengths | None:
    """What chooses K, where that is not fixed.

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


class DraftLengths:
    """Chooses the length that promises the most tokens per millisecond.

    Attributes:
        costs: of decode steps by requests and length; None: not known, every step has `most`.
    """

    def __init__(
        self, offered: Sequence[int], costs: CostTable | None = None, num_micro_batches: int = 1
    ) -> None:
        """offered: rising from 0. num_micro_batches: see Scheduler."""
        self.offered = offered
        # Drafts are verified in the next step of the same requests.
        self._steps_of_trial = 1 + num_micro_batches
        self.costs = costs
        self._script: Iterator[int] | None = None
        self.start_over()

    def start_over(self) -> None:
        """A run begins: nothing is known of its requests."""
        most = self.offered[-1]
        self._reached = [0.0] * most  # verifications of draft i after i accepted ones
        self._accepted = [0.0] * most
        self._last: int | None = None  # index of the last choice that was no trial
        self._saved_ms = 0.0  # for trials
        self._trial: list[int] = []  # its further steps

    def follow(self, script: Iterable[int] | None) -> None:
        """Take lengths from `script` until it is None again: how costs are measured."""
        self._script = None if script is None else iter(script)

    def choose(self, num_requests: int) -> int:
        """Drafts per request of the next step, of about so many requests."""
        if self._script is not None:
            return next(self._script)
        if self.costs is None:
            return self.offered[-1]
        if self._trial:
            return self._trial.pop()
        costs = [self.costs.at(num_requests, length).step_ms for length in self.offered]
        best = self._best(costs)
        self._last = best
        return self.offered[best + self._tries_more(costs, best)]

    def observe(self, requests: Iterable[RequestStep]) -> None:
        """Count what a step verified. Drafts that were not proposed are not in it."""
        reached, accepted = self._reached, self._accepted
        for counts in (reached, accepted):
            counts[:] = [count * KEPT_PER_STEP for count in counts]
        for step in requests:
            num_accepted = step.num_accepted
            for i in range(min(num_accepted + 1, len(step.draft_token_ids))):
                reached[i] += 1
                accepted[i] += num_accepted > i

    def _rates(self) -> Sequence[float]:
        """Of draft i after i accepted ones, that it is accepted."""
        rates, before = [], ASSUMED_RATE
        for accepted, reached in zip(self._accepted, self._reached, strict=True):
            before = (accepted + ASSUMED_WEIGHT * before) / (reached + ASSUMED_WEIGHT)
            rates.append(before)
        return rates

    def _best(self, costs: Sequence[float]) -> int:
        """The index of the best length, or of the last one where none is clearly better."""
        tokens = list(accumulate(accumulate(self._rates(), mul), initial=1.0))  # by length
        speeds = [tokens[n] / ms for n, ms in zip(self.offered, costs, strict=True)]
        best = max(range(len(speeds)), key=speeds.__getitem__)
        last = self._last
        return best if last is None or speeds[best] > LEAST_GAIN * speeds[last] else last

    def _tries_more(self, costs: Sequence[float], best: int) -> bool:
        """Whether this step and a few after it try the length after the best. Every step saves a
        share of its time, which pays for what a trial takes longer."""
        self._saved_ms += TRIAL_SHARE * costs[best]
        if best + 1 == len(costs):
            self._saved_ms = 0.0
            return False
        longer = self._steps_of_trial * (costs[best + 1] - costs[best])
        if self._saved_ms < max(longer, FEWEST_STEPS_BETWEEN * TRIAL_SHARE * costs[best]):
            return False
        self._saved_ms = 0.0
        self._trial = [self.offered[best + 1]] * (self._steps_of_trial - 1)
        return True
