"""Drafts of a step that the host proposes before it is launched (docs/adr/0047)."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from hydraspec.engine.run.timing import HOST_DRAFTS, Clock, no_clock
from hydraspec.engine.schedule.draft_lengths import lengths_up_to
from hydraspec.engine.schedule.sequence import Scheduled, Sequence
from hydraspec.speculators.base import BaseSpeculator
from hydraspec.speculators.host import HostDrafts

PRIOR = 0.5  # rate at which drafts are accepted, before any was verified
WEIGHT = 0.05  # of the newest step of a request in a rate, once many count
STEPS_UNTIL_TRIAL = 256  # after one of drafts that had been left out as likely to be rejected
IDLE_PER_STEP = 8  # steps without an accepted draft until texts are left unread for one step more,
MOST_STEPS_UNREAD = 16  # and most such steps
MOST_UNREAD = 64  # finished outputs
EPSILON = 1e-9  # for sums of equal rates


@dataclass(slots=True)
class _Rate:
    """Rate at which a draft is accepted after accepted ones, over recent steps."""

    rate: float = PRIOR
    num_steps: int = 0  # of requests

    def add(self, share: float) -> None:
        self.num_steps += 1
        self.rate += max(WEIGHT, 1 / self.num_steps) * (share - self.rate)


class StepDrafts:
    """Proposes continuations of requests, and chooses the number of drafts of each step.

    A step has rows for all requests at each position that any draft takes. A position is left out
    where fewer than `min_acceptance` of the requests are expected to accept their draft there. The
    expectation is by the length of a draft's match, in powers of two, from the steps of the run:
    long matches are tried however often short ones were rejected. Drafts that are left out are
    tried in one of STEPS_UNTIL_TRIAL steps. Texts are read the more seldom, the longer no draft has
    been accepted. min_acceptance=0: all texts are read, and all drafts have rows.

    Attributes:
        clock: times this part of scheduling.
    """

    def __init__(self, drafts: HostDrafts, most: int) -> None:
        """most: drafts of a request, K."""
        self.clock: Clock = no_clock
        self._unread: list[Seq[int]] = []  # finished outputs that the drafts do not have yet
        self._drafts, self._most = drafts, most
        self._rates: dict[int, _Rate] = {}  # by bits of the length of a match
        self._num_steps = self._accepted_at = 0  # of the run; when a draft was accepted last
        self._read_at, self._trial_at = 0, STEPS_UNTIL_TRIAL  # the next such steps
        self._fewest_ahead = 0 if drafts.lookup is None else min(drafts.lookup.fewest, most)
        lengths = lengths_up_to(most)
        self._length_for = [min(n for n in lengths if n >= count) for count in range(most + 1)]

    def start_over(self) -> None:
        """Begin a run, without outputs of earlier ones."""
        self._rates.clear()
        self._num_steps = self._accepted_at = 0
        self._read_at, self._trial_at = 0, STEPS_UNTIL_TRIAL
        self._unread.clear()
        self._drafts.start_over()

    def finished(self, output_token_ids: Seq[int]) -> None:
        """Draft from this output too, from now on. It is read once drafts are asked for, or with
        MOST_UNREAD others."""
        self._unread.append(output_token_ids)
        if len(self._unread) == MOST_UNREAD:
            self._read()

    def _read(self) -> None:
        for output in self._unread:
            self._drafts.finished(output)
        self._unread.clear()

    def propose(self, sequences: Iterable[Sequence]) -> int:
        """Set the continuations of the sequences that decode next, unless it is too early to read
        them again; returns the draft length of the step: as many drafts as are worth a row, rounded
        up to a length that has graphs."""
        self._num_steps += 1
        if self._num_steps < self._read_at:
            return 0
        with self.clock(HOST_DRAFTS):
            return self._propose([each for each in sequences if each.decodes_next])

    def _propose(self, decoding: Seq[Sequence]) -> int:
        self._read()
        least = max(self._drafts.min_acceptance * len(decoding) - EPSILON, EPSILON)
        drafted = [sequence for sequence in decoding if self._continue(sequence)]
        length = self._num_worthwhile(drafted, least) if drafted else 0
        if drafted and not length and self._num_steps >= self._trial_at:
            length = self._try_again(drafted, least)
        if self._drafts.min_acceptance:
            unread = (self._num_steps - self._accepted_at) // IDLE_PER_STEP
            self._read_at = self._num_steps + 1 + min(MOST_STEPS_UNREAD, unread)
        return self._length_for[length]

    def _try_again(self, drafted: Seq[Sequence], least: float) -> int:
        """The draft length of a trial, in which all rates are at least PRIOR. Lower ones begin
        anew."""
        length = self._num_worthwhile(drafted, least, PRIOR)
        if length:
            self._trial_at = self._num_steps + STEPS_UNTIL_TRIAL
            self._rates = {bits: r for bits, r in self._rates.items() if r.rate >= PRIOR}
        return length

    def _num_worthwhile(self, drafted: Seq[Sequence], least: float, least_rate: float = 0.0) -> int:
        """Number of positions at which at least `least` of the requests are expected to accept a
        draft, if each rate is at least `least_rate`."""
        expected = [0.0] * self._most
        for sequence in drafted:
            rate = max(least_rate, self._rate(sequence.match_length).rate)
            reached = 1.0  # where each draft before is accepted too
            for position in range(sequence.num_proposed):
                reached *= rate
                expected[position] += reached
        return sum(each >= least for each in expected)

    def _rate(self, match_length: int) -> _Rate:
        """The rate of drafts after matches of this length. The longer they are, the more steps it
        takes to show that they are rejected."""
        bits = match_length.bit_length()
        return self._rates.setdefault(bits, _Rate(num_steps=bits + 1))

    def _continue(self, sequence: Sequence) -> int:
        """Set the continuation of a sequence; returns the number of drafts that its next step may
        have."""
        if sequence.drafted is None:
            sequence.drafted = self._drafts.new_text()
        num_pending = 0 if sequence.in_flight is None else sequence.num_undecided + 1
        found = sequence.drafted.continuation(sequence.token_ids, num_pending)
        sequence.continuation, sequence.match_length = found, sequence.drafted.match_length
        num_drafts = len(found) - num_pending
        if num_pending:
            num_drafts = max(num_drafts, self._fewest_ahead)
        sequence.num_proposed = max(0, min(num_drafts, self._most))
        return sequence.num_proposed

    def observe(self, item: Scheduled, num_accepted: int) -> None:
        """Note how many drafts of a request's share of a step, which has some, were accepted."""
        num_reached = min(item.num_proposed, num_accepted + 1)
        self._rate(item.match_length).add(min(1.0, num_accepted / num_reached))
        if num_accepted:
            self._accepted_at, self._read_at = self._num_steps, 0


def build_step_drafts(speculator: BaseSpeculator) -> StepDrafts | None:
    """The host's part of drafting; None where the drafter needs none."""
    drafts = speculator.host_drafts
    return None if drafts is None else StepDrafts(drafts, speculator.num_speculative_tokens)
