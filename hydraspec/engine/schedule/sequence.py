"""A request in the engine and its share of a step, in plain numbers, for scheduler, plans and
results. What a step in flight will have accepted is known within bounds only (docs/adr/0010).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import filterfalse

import numpy as np
from hydraspec_kernels.attention import MOST_FUSED_ROWS

from hydraspec.engine.cache.prefix import PrefixKeys
from hydraspec.engine.finish import OfferedRequest
from hydraspec.engine.grammars import FollowedDrafts, RequestGrammar
from hydraspec.sampling.flags import needs_of
from hydraspec.speculators.host import DraftedText
from hydraspec.types import Span


@dataclass(slots=True, eq=False)
class Sequence(OfferedRequest):
    """An offered request with its place in the cache. Its numbers are those after the results that
    have arrived."""

    slot: int = -1
    num_computed: int = 0  # tokens with valid target KV
    decoding: bool = False  # the request has sampled since it was (re)admitted
    in_flight: Scheduled | None = None  # the share of a launched step, until its results arrive
    was_admitted: bool = False
    # Of the drafts proposed for its next step, by the results of the step before it.
    survivals: list[float] | None = None  # see Draft; None: not estimated, or no drafts
    num_worthwhile: int | None = None  # drafts to verify, the first ones; None: all
    num_chosen: int = 0  # drafts to verify, where the engine chooses them by their costs
    wants_drafts: bool = True  # after its next step, if drafts are proposed then
    num_late: int = 0  # newest rows, in flight or computed, that the drafter has not run over
    drafted: DraftedText | None = None  # of a drafter on the host
    continuation: list[int] = field(default_factory=list)  # that it proposes; see Continuations
    num_proposed: int = 0  # drafts that this may give the next step
    match_length: int = 0  # of the continuation, see DraftedText
    grammar: RequestGrammar | None = None  # of the output, after the results that have arrived
    next_tokens: list[int] = field(default_factory=list)  # its next drafts, with a grammar
    keys: PrefixKeys = field(init=False)  # of its blocks; set when it is queued
    needs: tuple[int, int] = field(init=False)  # of the sampler, see `needs_of`

    def __post_init__(self) -> None:
        self.needs = needs_of(self.request.sampling)

    @property
    def spans(self) -> tuple[Span, ...]:
        """The spans of the prompt."""
        return self.request.spans

    def fail_if_span_too_long(self, most: int) -> None:
        """Fail a prompt with a span that must stay whole and has more tokens than `most` rows of a
        step, unless it has failed already."""
        for span in self.spans:
            if self.finish_reason is None and span.length > most and not span.may_be_cut:
                self.fail(
                    f"the {span.kind} at position {span.start} has {span.length} tokens, which are "
                    f"read in one step; engine.max_num_batched_tokens is {most}: raise it to "
                    f"{span.length} or more"
                )

    @property
    def decodes_next(self) -> bool:
        """Returns whether the sequence's next rows are its newest token and drafts."""
        return self.decoding or (self.in_flight is not None and self.in_flight.samples)

    @property
    def fewest_tokens(self) -> int:
        """Known tokens once the step in flight has arrived, if it accepts no draft."""
        samples = self.in_flight is not None and self.in_flight.samples
        return len(self.token_ids) + samples

    @property
    def fewest_computed(self) -> int:
        """Computed tokens once the step in flight has arrived, if it accepts no draft."""
        flight = self.in_flight
        return self.num_computed + (flight.num_rows - flight.num_drafts if flight else 0)

    @property
    def num_undecided(self) -> int:
        """Drafts in flight: the most tokens that results may add to the fewest ones."""
        return self.in_flight.num_drafts if self.in_flight is not None else 0

    @property
    def num_complete(self) -> int:
        """Computed tokens that the drafter has run over too."""
        return self.num_computed - self.num_late

    def start_over(self) -> None:
        """Reset after the sequence's blocks are lost: it is read again from its first token."""
        self.num_computed = 0
        self.decoding = False
        self.num_late = 0
        self.next_tokens = []


@dataclass(slots=True, eq=False)
class Scheduled:
    """A sequence's share of a step."""

    sequence: Sequence
    num_computed: int  # tokens before its rows; an upper bound while drafts are in flight
    num_rows: int
    num_drafts: int
    is_prefill: bool
    samples: bool  # the rows reach the sequence's newest token
    number: int = 0  # of the step, from 1, once the step is launched
    follows: FollowedDrafts | None = None  # its grammar along its drafts, if it has one
    scored: range = range(0)  # positions of prompt tokens that get log probabilities from its rows
    num_proposed: int = field(init=False)  # drafts of the host's drafter that the step has rows for
    match_length: int = field(init=False)  # of these, see DraftedText

    def __post_init__(self) -> None:
        self.num_proposed = min(self.sequence.num_proposed, self.num_drafts)
        self.match_length = self.sequence.match_length

    @property
    def seq_len(self) -> int:
        """Tokens in the cache with its rows; an upper bound while drafts are in flight."""
        return self.num_computed + self.num_rows

    def follow_grammar(self) -> FollowedDrafts | None:
        """Set and return `follows`, for the step's plan. A request with a grammar has no step in
        flight when it verifies drafts, so that these are known."""
        sequence = self.sequence
        if sequence.grammar is not None and self.samples:
            found = sequence.continuation or sequence.next_tokens
            drafts = [*found, *[-1] * self.num_drafts][: self.num_drafts]
            self.follows = sequence.grammar.follow(drafts)
        return self.follows

    def score(self) -> range:
        """Set and return `scored`, for the step's plan."""
        sequence, first = self.sequence, self.num_computed + 1
        if self.is_prefill and sequence.lacks_prompt_logprobs:
            end = min(first + self.num_rows, sequence.num_prompt)
            self.scored = range(first, max(first, end))
        return self.scored

    @property
    def num_shared(self) -> int:
        """Leading tokens whose KV other requests of the same step may read: those up to the end of
        a prompt's rows, else 0. Few rows may be written and read in one kernel, and the newest row
        may be written twice (see needed_rows.reduced)."""
        if not self.is_prefill or self.num_rows <= MOST_FUSED_ROWS:
            return 0
        return self.seq_len - self.samples


def note_late_rows(
    scheduled: Iterable[Scheduled], wants_drafts: bool, most: int
) -> tuple[np.ndarray | None, bool]:
    """Write the `num_late` that each sequence has after a step. Returns those before it (None: all
    are 0), and whether the drafter leaves out this step's rows too: where no drafts are wanted,
    until some request has `most` late rows."""
    items = list(scheduled)
    counts = np.array([item.sequence.num_late for item in items])
    rests = not wants_drafts and all(not item.is_prefill and item.num_rows == 1 for item in items)
    rests &= bool(counts.max() < most)
    for item in items:
        item.sequence.num_late = item.sequence.num_late + 1 if rests else 0
    return counts if rests or counts.any() else None, rests


def most_worthwhile(sequences: Iterable[Sequence], most: int) -> int:
    """Drafts that any of these is to verify in its next step, at most so many. While a step is in
    flight that is `most`, since its results say how many are worth their rows."""
    found = 0
    for sequence in sequences:
        if sequence.decodes_next:
            if sequence.num_worthwhile is None or sequence.in_flight is not None:
                return most
            found = max(found, sequence.num_worthwhile)
    return min(found, most)


class MicroBatches:
    """Steps in flight of disjoint requests, as many as pipeline stages; with one stage no request
    is held back."""

    def __init__(self, count: int, *, runs_ahead: bool) -> None:
        """count: pipeline stages. runs_ahead: with several, the next step of requests may be
        launched before the results of their last one are in, once that is the oldest of `count`."""
        self.count, self._runs_ahead = count, runs_ahead
        self._num_launched = 0

    def share(self, num_requests: int) -> int:
        """Most requests of a step: `num_requests` divided by the stages, rounded up."""
        return -(-num_requests // self.count)

    def launched(self, scheduled: Iterable[Scheduled]) -> None:
        """Number a step that is in flight from now on."""
        self._num_launched += 1
        for item in scheduled:
            item.number = self._num_launched

    def hold(self, sequence: Sequence) -> bool:
        """Returns whether a sequence is in a step that the next one would overlap in the stages."""
        flight = sequence.in_flight
        if self.count == 1 or flight is None:
            return False
        return not self._runs_ahead or self._num_launched - flight.number < self.count - 1

    def free(self, sequences: Iterable[Sequence]) -> Iterable[Sequence]:
        """The sequences that are not held."""
        return sequences if self.count == 1 else filterfalse(self.hold, sequences)
