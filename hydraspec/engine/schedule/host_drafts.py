"""Drafts of a step that the host proposes before it is launched (docs/adr/0047)."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from hydraspec.engine.run.timing import HOST_DRAFTS, Clock, no_clock
from hydraspec.engine.schedule.draft_lengths import lengths_up_to
from hydraspec.engine.schedule.sequence import Scheduled, Sequence
from hydraspec.speculators.base import BaseSpeculator
from hydraspec.speculators.host import HostDrafts

PRIOR = 0.5  # share of drafts accepted in a run, before any was verified
WEIGHT_IN_RUN = 0.05  # of the newest step of a request, in the share of the run, once many count
MOST_STEPS = 4  # steps of a request that count, beside NUM_PRIOR steps of the run's share
NUM_PRIOR = 4
KEPT = 0.99  # part of these that still counts after another step
RETURN = 0.001  # of the way back to PRIOR, in a step without drafts of any request
MOST_UNREAD = 64  # finished outputs
READS = 64  # of texts in vain, after which a step more passes before texts are read again,
MOST_WAIT = 3  # and most steps
EPSILON = 1e-9  # for sums of equal shares


class StepDrafts:
    """Proposes continuations of requests, and chooses the number of drafts of each step.

    A step has rows for all requests at each position that any draft takes. A position is left out
    where fewer than `min_acceptance` of the requests are expected to accept their draft there, by
    the shares that recent steps of each request, and of the run, accepted. Without drafts these
    shares grow slowly, so that drafts are tried again. Texts that are read in vain for long are not
    read in every step.

    Attributes:
        clock: times this part of scheduling.
    """

    def __init__(self, drafts: HostDrafts, most: int) -> None:
        """most: drafts of a request, K."""
        self.clock: Clock = no_clock
        self._unread: list[Seq[int]] = []  # finished outputs that the drafts do not have yet
        self._drafts, self._most = drafts, most
        self._acceptance = PRIOR  # share of drafts accepted recently, of all requests
        self._num_judged = 0  # steps of requests with drafts, in the run
        self._num_in_vain = 0  # texts read since any step had drafts
        self._wait = 0  # steps until texts are read again
        self._fewest_ahead = 0 if drafts.lookup is None else min(drafts.lookup.fewest, most)
        lengths = lengths_up_to(most)
        self._length_for = [min(n for n in lengths if n >= count) for count in range(most + 1)]

    def start_over(self) -> None:
        """Begin a run, without outputs of earlier ones."""
        self._acceptance, self._num_judged = PRIOR, 0
        self._num_in_vain = self._wait = 0
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
        """Set the continuations of the sequences that decode next, if any is worth a row; returns
        the draft length of the step: as many drafts as are, rounded up to a length that has
        graphs."""
        with self.clock(HOST_DRAFTS):
            return self._propose(sequences)

    def _propose(self, sequences: Iterable[Sequence]) -> int:
        if self._wait:
            self._wait -= 1
            return self._without_drafts()
        decoding = [sequence for sequence in sequences if sequence.decodes_next]
        for sequence in decoding:
            sequence.num_judged *= KEPT
        shares = [self._share(sequence) for sequence in decoding]
        least = max(self._drafts.min_acceptance * len(decoding) - EPSILON, EPSILON)
        if sum(shares) < least:  # no text is read until drafts are tried again
            return self._without_drafts()
        self._read()
        expected = [0.0] * self._most
        for sequence, share in zip(decoding, shares, strict=True):
            sequence.num_proposed = self._continue(sequence)
            reached = 1.0  # where each draft before is accepted too
            for position in range(sequence.num_proposed):
                reached *= share
                expected[position] += reached
        length = self._most
        while length and expected[length - 1] < least:
            length -= 1
        if length:
            self._num_in_vain = 0
            return self._length_for[length]
        self._num_in_vain += len(decoding)
        self._wait = min(MOST_WAIT, self._num_in_vain // READS)
        return self._without_drafts()

    def _without_drafts(self) -> int:
        self._acceptance += RETURN * (PRIOR - self._acceptance)
        return 0

    def _continue(self, sequence: Sequence) -> int:
        """Set the continuation of a sequence; returns the drafts that its next step may have."""
        if sequence.drafted is None:
            sequence.drafted = self._drafts.new_text()
        num_pending = 0 if sequence.in_flight is None else sequence.num_undecided + 1
        found = sequence.drafted.continuation(sequence.token_ids, num_pending)
        sequence.continuation = found
        num_drafts = len(found) - num_pending
        if num_pending:
            num_drafts = max(num_drafts, self._fewest_ahead)
        return max(0, min(num_drafts, self._most))

    def observe(self, item: Scheduled, num_accepted: int) -> None:
        """Note how many drafts of a request's share of a step, which has some, were accepted."""
        sequence = item.sequence
        share = min(1.0, num_accepted / item.num_proposed)
        sequence.num_judged = min(MOST_STEPS, sequence.num_judged + 1)
        sequence.acceptance += (share - sequence.acceptance) / max(1.0, sequence.num_judged)
        self._num_judged += 1
        weight = max(WEIGHT_IN_RUN, 1 / (NUM_PRIOR + self._num_judged))
        self._acceptance += weight * (share - self._acceptance)

    def _share(self, sequence: Sequence) -> float:
        """Share of drafts that a request is expected to accept in the next step."""
        of_run, of_request = self._acceptance * NUM_PRIOR, sequence.acceptance * sequence.num_judged
        return (of_run + of_request) / (NUM_PRIOR + sequence.num_judged)


def build_step_drafts(speculator: BaseSpeculator) -> StepDrafts | None:
    """The host's part of drafting; None where the drafter needs none."""
    drafts = speculator.host_drafts
    return None if drafts is None else StepDrafts(drafts, speculator.num_speculative_tokens)
