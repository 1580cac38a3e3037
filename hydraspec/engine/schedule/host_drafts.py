"""Drafts of a step that the host proposes before it is launched (docs/adr/0047)."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from hydraspec.engine.schedule.draft_lengths import lengths_up_to
from hydraspec.engine.schedule.sequence import Sequence
from hydraspec.speculators.base import BaseSpeculator
from hydraspec.speculators.host import HostDrafts


class StepDrafts:
    """Proposes continuations of requests, and chooses the number of drafts of each step."""

    def __init__(self, drafts: HostDrafts, most: int) -> None:
        """most: drafts of a request, K."""
        self._drafts, self._most = drafts, most
        lengths = lengths_up_to(most)
        self._length_for = [min(n for n in lengths if n >= count) for count in range(most + 1)]

    def start_over(self) -> None:
        """Begin a run, without outputs of earlier ones."""
        self._drafts.start_over()

    def finished(self, output_token_ids: Seq[int]) -> None:
        """Draft from this output too, from now on."""
        self._drafts.finished(output_token_ids)

    def propose(self, sequences: Iterable[Sequence]) -> int:
        """Set the continuation of each sequence that decodes next; returns the draft length of the
        step: the most drafts that any of them has, rounded up to a length that has graphs."""
        longest = 0
        for sequence in sequences:
            if not sequence.decodes_next:
                continue
            if sequence.drafted is None:
                sequence.drafted = self._drafts.new_text()
            num_pending = 0 if sequence.in_flight is None else sequence.num_undecided + 1
            found = sequence.drafted.continuation(sequence.token_ids, num_pending)
            sequence.continuation = found
            # A step in flight samples one token at least.
            longest = max(longest, len(found) - (num_pending > 0))
        return self._length_for[min(longest, self._most)]


def build_step_drafts(speculator: BaseSpeculator) -> StepDrafts | None:
    """The host's part of drafting; None where the drafter needs none."""
    drafts = speculator.host_drafts
    return None if drafts is None else StepDrafts(drafts, speculator.num_speculative_tokens)
