"""Choice of the drafts that each request verifies in a step, and of those that the step proposes,
while requests run (docs/adr/0035, docs/adr/0052).

The choice follows from plain numbers on the host: counts of steps whose results have arrived,
estimates of the drafter where they are in, and measured costs. The same costs and results give the
same choices, on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hydraspec.config.messages import refusal
from hydraspec.config.schema import MethodConfig, PerStep, RunConfig
from hydraspec.engine import costs
from hydraspec.engine.costs import CostTable
from hydraspec.engine.schedule.acceptance import RequestAcceptance
from hydraspec.engine.schedule.sequence import Sequence as Offered
from hydraspec.engine.slots import (
    Allocation,
    LengthCosts,
    accepted_by_length,
    best_allocation,
    in_two_lengths,
    leading,
    least_survivals,
)
from hydraspec.types import RequestStep

# Speeds are means over so many steps of a length, or over as many as the present length has lasted.
# In the first of them a request has no more drafts to verify than the step before proposed, so a
# longer length has to make up for that in the others.
STEPS_OF_LENGTH = 12
# Weight of the newest step in the costs that choices follow, which are means over recent steps:
# where a request ends and the next one joins, one step has fewer requests.
COSTS_OF_STEP = 0.25
# Costs are looked up once for so many tokens of context.
CONTEXT_STEP = 256
# Share of the time that may be spent on trying a longer draft than the best, if such a draft was
# not verified for so many steps: drafts that were rejected before may be accepted now.
TRIAL_SHARE = 0.01
STEPS_UNTIL_TRIAL = 100
# A split that was chosen again is kept for this share of the steps that it has lasted, so many at
# most, until a request joins: choosing takes the host as long as it saves in a small step. The most
# drafts for all are kept until one is rejected. Beside estimates a price is kept for MOST_KEPT
# steps of as many requests but for this share.
SHARE_OF_SAME, MOST_KEPT, PRICED_SHARE = 0.5, 8, 0.25


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


def build_draft_lengths(
    config: RunConfig, num_micro_batches: int, *, reads_estimates: bool, most_late: int = 0
) -> DraftLengths | None:
    """The chooser of drafts for each step; None where K is fixed. reads_estimates: drafts come with
    estimates that are in before the next step is scheduled. most_late: see DraftLengths.

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
    return DraftLengths(
        offered,
        table,
        config.engine.max_num_seqs,
        num_micro_batches,
        reads_estimates=reads_estimates,
        most_late=most_late,
    )


@dataclass(slots=True, frozen=True)
class ChosenDrafts:
    """The drafts of a step."""

    counts: list[int]  # drafts that each request verifies, if so many were proposed
    draft_length: int  # drafts that are proposed after the step, for each request that wants any
    for_all: bool = False  # that is every request; else those that verify drafts in this step


@dataclass(slots=True)
class _Choice:
    """A split of the drafts of a step and what it was chosen by."""

    of: tuple[Sequence[int], int, int]  # slots, requests and context
    best: Allocation
    counts: list[int]  # of `best`: of the slots, then of new requests
    costs: LengthCosts
    step_ms: list[float]  # [N] whole steps by these costs
    least: tuple[float, float]  # see least_survivals
    most_taken: int  # further steps that take it without choosing
    lengths: dict[tuple[int, ...], tuple[int, int]]  # by numbers of drafts wanted, rising
    was_missed: bool = False  # some draft was rejected since, or a request joined
    num_taken: int = 0  # further steps that took it

    def may_change(self, most: int) -> bool:
        """Returns whether results since then may make another split better. Where every request
        has the `most` drafts, accepted ones never do: they raise later survivals most."""
        return self.num_taken >= self.most_taken and (self.was_missed or min(self.counts) < most)

    def serves(self, of: tuple[Sequence[int], int, int]) -> bool:
        """Returns whether the split is one of a step of these slots, requests and context: if it
        gives each of them the same, slots may be others."""
        is_same = self.of[1:] == of[1:]
        return is_same and (self.of[0] == of[0] or min(self.counts) == max(self.counts))

    def prices(self, of: tuple[Sequence[int], int, int]) -> bool:
        """Returns whether its price of a draft is one for a step of about so many requests and this
        context, where estimates choose what is verified, whoever the requests are."""
        is_near = abs(of[1] - self.of[1]) <= PRICED_SHARE * self.of[1]
        return is_near and of[2] == self.of[2] and self.num_taken < MOST_KEPT

    def stays(self, of: tuple[Sequence[int], int, int], most: int, are_estimated: bool) -> bool:
        """Returns whether a step of these slots, requests and context takes it."""
        if are_estimated:
            return self.prices(of)
        return self.serves(of) and not self.may_change(most)

    def raised(self, wanted: Sequence[int]) -> list[int]:
        """The numbers of drafts wanted [B], each raised to one of two lengths."""
        rising = tuple(sorted(wanted))
        found = self.lengths.get(rising)
        if found is None:
            found = self.lengths[rising] = in_two_lengths(rising, self.costs)
        shorter, longer = found
        return [shorter if count <= shorter else longer for count in wanted]


class DraftLengths:
    """Chooses the drafts of each request with the most expected tokens per millisecond.

    Attributes:
        costs: of decode steps by requests and length; None: unknown, steps have the most drafts.
        most_late: rows of a request that the drafter may leave for later while no drafts are
            wanted; 0: it runs over the rows of every step.
    """

    def __init__(
        self,
        offered: Sequence[int],
        costs: CostTable | None = None,
        num_slots: int = 1,
        num_micro_batches: int = 1,
        *,
        reads_estimates: bool = False,
        most_late: int = 0,
    ) -> None:
        """offered: the lengths to choose from, rising from 0. num_micro_batches: see Scheduler.
        reads_estimates: see `build_draft_lengths`."""
        self.offered = tuple(offered)
        # Drafts are verified in the next step of the same requests.
        self._steps_of_trial = 1 + num_micro_batches
        self._num_slots, self._reads_estimates = num_slots, reads_estimates
        self.costs, self.most_late = costs, most_late
        # [3, N] by requests in the step, and tokens of each in the cache; of which table.
        self._known_ms: dict[tuple[int, int], np.ndarray] = {}
        self._known_of = costs
        self._script: Iterator[int | Sequence[int]] | None = None
        self.start_over()

    def start_over(self) -> None:
        """Begin a run: counts start from rates seen while costs were measured, or assumed ones."""
        measured = self.costs.rates if self.costs is not None else ()
        self._acceptance = RequestAcceptance(self.offered[-1], measured, self._num_slots)
        self._choice: _Choice | None = None  # of the last step
        self._last: int | None = None  # index of the last longest length that was no trial
        self._num_same = 0  # steps with it in a row
        self._num_kept = 0  # steps with the same split in a row
        # Steps of the same slots that have not been counted yet.
        self._results: list[Sequence[RequestStep]] = []
        self._slots: Sequence[int] = ()
        self._recent_ms: np.ndarray | None = None  # [3, N] mean costs of recent steps, see _costs
        self._saved_ms = 0.0  # saved up for a trial
        self._trial: list[int] = []  # lengths of the further steps of a trial

    def begin(self, slot: int) -> None:
        """Give `slot` to another request, of which nothing is known."""
        self._count_results()
        self._num_kept //= 2
        if self._choice is not None:
            self._choice.most_taken, self._choice.was_missed = 0, True
        self._acceptance.begin(slot)

    def follow(self, script: Iterable[int | Sequence[int]] | None) -> None:
        """Take lengths from `script` instead of choosing, to measure costs: one for every request,
        or one by place in the step, in turns; None: choose again."""
        self._script = None if script is None else iter(script)

    def choose_for(self, likely: Sequence[Offered], num_requests: int) -> int:
        """Set the drafts that each of the requests verifies which are likely in the next step,
        decodes first; returns how many are proposed after it. num_requests: see `choose`."""
        decoding = [each for each in likely if each.decodes_next]
        are_known = all(each.in_flight is None for each in decoding)
        chosen = self.choose(
            [each.slot for each in likely],
            num_requests,
            [each.survivals for each in decoding] if are_known else (),
            context=sum(each.num_computed for each in likely) // max(1, len(likely)),
        )
        for each, count in zip(likely, chosen.counts, strict=True):
            each.num_chosen, each.wants_drafts = count, chosen.for_all or count > 0
        return chosen.draft_length

    def choose(
        self,
        slots: Sequence[int],
        num_requests: int,
        survivals: Sequence[Sequence[float] | None] = (),
        *,
        context: int = 0,
    ) -> ChosenDrafts:
        """The drafts of the next step, which has about `num_requests` requests: of those in
        `slots` and, as far as these are fewer, of new ones. survivals: estimates of the drafts
        that were proposed for the first of these, see Draft, if the others verify none; None: not
        estimated. context: tokens of a request in the KV cache, on average."""
        if self._script is not None:
            return _by_script(next(self._script), len(slots))
        if self.costs is None:
            return ChosenDrafts([self.offered[-1]] * len(slots), self.offered[-1])
        given = [each for each in survivals if each]
        are_estimated = bool(given) and len(given) == len(survivals)
        of = slots, num_requests, context // CONTEXT_STEP
        choice = self._choice_for(of, self.costs, are_estimated)
        length, verified = self.offered[choice.best.most], choice.counts[: len(slots)]
        if length and are_estimated:
            counts = choice.raised(leading(given, choice.least))
            counts += [0] * (len(slots) - len(counts))
            return ChosenDrafts(counts, self.offered[-1], for_all=True)
        if (trial := self._tried(choice.step_ms, choice.best.most)) is not None:
            verified = [trial if count == length else count for count in verified]
            length = trial
        if self._reads_estimates and length:  # what is worth it is known before the next step
            return ChosenDrafts(verified, self.offered[-1], for_all=True)
        return ChosenDrafts(verified, length)

    def _choice_for(
        self, of: tuple[Sequence[int], int, int], table: CostTable, are_estimated: bool
    ) -> _Choice:
        """The split of a step of these slots, requests and context: that of the step before, or one
        that is chosen by all results so far. are_estimated: its price alone decides."""
        choice = self._choice
        if choice is None or not choice.stays(of, self.offered[-1], are_estimated):
            choice = self._choose(of, table)
        else:
            choice.num_taken += 1
        self._num_same = self._num_same + 1 if choice.best.most == self._last else 1
        self._last = choice.best.most
        self._num_kept += 1
        return choice

    def _choose(self, of: tuple[Sequence[int], int, int], table: CostTable) -> _Choice:
        slots, num_requests, context = of
        self._count_results()
        costs = self._costs(table, num_requests, context)
        survival = self._acceptance.survivals(slots, num_requests - len(slots))
        accepted = accepted_by_length(survival, self.offered)
        best = best_allocation(self._with_rise(accepted), costs, self._last)
        counts: list[int] = best.counts.tolist()
        before = self._choice
        if before is None or before.counts != counts:
            self._num_kept = 0
        most_taken = min(int(SHARE_OF_SAME * self._num_kept), MOST_KEPT)
        step_ms: list[float] = (costs.verify_ms + costs.draft_ms).tolist()
        least = least_survivals(costs, num_requests, best.tokens_per_ms)
        self._choice = _Choice(of, best, counts, costs, step_ms, least, most_taken, {})
        return self._choice

    def observe(self, slots: Sequence[int], requests: Sequence[RequestStep]) -> None:
        """Count what a step verified; slots of the requests, -1: it has lost its slot."""
        if requests:
            if slots != self._slots or len(self._results) > MOST_KEPT:
                self._count_results()
            self._slots = slots
            self._results.append(requests)
            if self._choice is not None and not self._choice.was_missed:
                self._choice.was_missed = any(
                    step.num_accepted < len(step.draft_token_ids) for step in requests
                )

    def _count_results(self) -> None:
        if self._results:
            self._acceptance.add(self._slots, self._results)
            self._results = []

    def _with_rise(self, accepted: np.ndarray) -> np.ndarray:
        """Expected accepted drafts [B, N] per step, over the steps that a length has to last: the
        first of them has no more drafts to verify than were proposed."""
        proposed = len(self.offered) - 1 if self._last is None else self._last
        further = max(STEPS_OF_LENGTH, self._num_same) - 1
        first = np.minimum(accepted, accepted[:, proposed : proposed + 1])
        found: np.ndarray = (further * accepted + first) / (1 + further)
        return found

    def _costs(self, table: CostTable, num_requests: int, context: int) -> LengthCosts:
        """Costs of recent steps; context: in CONTEXT_STEP tokens."""
        if self._known_of is not table:
            self._known_of = table
            self._known_ms.clear()
        found = self._known_ms.get((num_requests, context))
        if found is None:
            tokens = (context + 0.5) * CONTEXT_STEP
            each = LengthCosts.of(table, self.offered, num_requests, tokens)
            found = np.stack((each.verify_ms, each.draft_ms, each.ragged_ms))
            self._known_ms[num_requests, context] = found
        if self._recent_ms is None:
            self._recent_ms = found
        self._recent_ms = self._recent_ms + COSTS_OF_STEP * (found - self._recent_ms)
        return LengthCosts(self.offered, *self._recent_ms)

    def _tried(self, step_ms: Sequence[float], best: int) -> int | None:
        """The length that the requests with the most drafts try in this step: that after the best
        where it was not verified for long. Every step saves TRIAL_SHARE of its time; the savings
        pay for the longer steps of a trial."""
        if self._trial:
            return max(self._trial.pop(), self.offered[best])
        self._saved_ms += TRIAL_SHARE * step_ms[best]
        if best + 1 == len(step_ms):
            self._saved_ms = 0.0
            return None
        longer = self._steps_of_trial * (step_ms[best + 1] - step_ms[best])
        length = self.offered[best + 1]
        num_unseen = self._acceptance.of_all.unseen[length - 1]
        if num_unseen < STEPS_UNTIL_TRIAL or self._saved_ms < longer:
            return None
        self._saved_ms = 0.0
        self._trial = [length] * (self._steps_of_trial - 1)
        return length


def _by_script(lengths: int | Sequence[int], num_requests: int) -> ChosenDrafts:
    each = [lengths] if isinstance(lengths, int) else lengths
    return ChosenDrafts([each[i % len(each)] for i in range(num_requests)], max(each))
