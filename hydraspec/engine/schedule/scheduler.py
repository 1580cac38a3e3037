"""Continuous batching on the host, in plain numbers: which requests run in the next step, and with
how many rows.

The scheduler may run one step ahead of the results (docs/adr/0010): what a step in flight will have
accepted is then known within bounds only, and every decision here holds at both ends of them.

Pipeline stages have several steps in flight, of disjoint requests: a request waits there for its
results before it is scheduled again, and is not preempted meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice

from hydraspec.engine.cache.kv_cache import KVCache
from hydraspec.engine.schedule.draft_lengths import DraftLengths
from hydraspec.engine.schedule.host_drafts import StepDrafts
from hydraspec.engine.schedule.plans import PlanBuilder
from hydraspec.engine.schedule.prompt_rows import PromptRows, cut_span, whole_spans
from hydraspec.engine.schedule.sequence import MicroBatches, Scheduled, Sequence, most_worthwhile
from hydraspec.types import StepPlan

CANCELLED = "cancelled"  # the error of a request that the caller has cancelled


class Scheduler:
    """First come, first served; in a full cache the youngest running request is preempted."""

    def __init__(
        self,
        kv: KVCache,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        num_speculative_tokens: int,
        num_lookahead_tokens: int = 0,
        num_micro_batches: int = 1,
        runs_ahead: bool = False,
        prompt_rows: PromptRows | None = None,
        draft_lengths: DraftLengths | None = None,
        step_drafts: StepDrafts | None = None,
    ) -> None:
        """num_micro_batches, runs_ahead: see MicroBatches; one: one step in flight, or two as in
        docs/adr/0010. prompt_rows: the policy of an engine with graphs; None: that of one without.
        draft_lengths or step_drafts: chooses the drafts of each step, at most
        num_speculative_tokens."""
        self.kv = kv
        self.micro_batches = MicroBatches(num_micro_batches, runs_ahead=runs_ahead)
        self.num_lookahead_tokens = num_lookahead_tokens
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.num_speculative_tokens = num_speculative_tokens
        self.draft_lengths, self.step_drafts = draft_lengths, step_drafts
        self.draft_length: int | None = None  # of the step scheduled last, where it is chosen
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.admitted: list[Sequence] = []  # in the last schedule(); their state must be written
        self.failed: list[Sequence] = []
        self._cancelled: set[int] = set()  # indices, also of requests that have not been added yet
        self._ending: list[Sequence] = []  # cancelled, and not out yet
        self.num_preempted = 0  # since take_num_preempted()
        self._most_drafts = num_speculative_tokens  # of a request in the step being scheduled
        self._budget = 0  # rows left of the step being scheduled
        self._withheld = 0  # rows of the step beside the budget, for spans that must stay whole
        self._is_short = False  # no blocks or rows for newcomers in this round
        # The last request that found no blocks, and the cached tokens it would have begun with.
        self._refused: tuple[Sequence | None, int] = None, 0
        self._is_limited = False  # the budget is that of prompts
        # Prompts of the step being scheduled, by the key of the next tokens that they can share.
        self._reading: dict[bytes | None, Scheduled] = {}
        self._prompt_rows = prompt_rows or PromptRows(
            max_rows=max_num_batched_tokens, num_micro_batches=num_micro_batches
        )
        self._plans = PlanBuilder(kv, num_speculative_tokens, num_lookahead_tokens, draft_lengths)
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))

    def add(self, sequence: Sequence) -> None:
        """Queue a request; one that can never be served fails at once."""
        if sequence.request.index in self._cancelled:
            sequence.fail(CANCELLED)
        sequence.fail_if_too_long(self.max_model_len)
        if not sequence.finish_reason and not self.kv.can_ever_hold(
            sequence.num_tokens + 1, self.num_lookahead_tokens
        ):
            sequence.fail(
                f"the prompt has {sequence.num_tokens} tokens, more than the KV cache can hold "
                f"({self.kv.longest_prompt(self.max_model_len, self.num_lookahead_tokens)}): "
                "raise engine.kv_cache.memory_gib"
            )
        sequence.fail_if_span_too_long(self.max_num_batched_tokens)
        if sequence.finish_reason:
            self.failed.append(sequence)
        else:
            sequence.keys = self.kv.keys_of(
                sequence.token_ids, sequence.spans, sequence.request.num_filled
            )
            self.waiting.append(sequence)

    def schedule(self) -> list[Scheduled]:
        """Choose the next step's rows: decodes first, then running prefills, then new requests."""
        self.admitted.clear()
        self._end_cancelled()
        self._budget = self.max_num_batched_tokens
        self._withheld, self._is_short, self._is_limited = 0, False, False
        chosen: dict[Sequence, Scheduled] = {}
        wanted = min(len(self.running) + len(self.waiting), self.max_num_seqs)
        most = self.micro_batches.share(wanted)
        if self.draft_lengths is not None:
            share, likely = self.micro_batches.share(len(self.running) or wanted), self._in_turn()
            likely = likely[:most]  # where the cache is full more than a share may be free at once
            self.draft_length = self.draft_lengths.choose_for(likely, max(share, len(likely)))
        elif self.step_drafts is not None:
            self.draft_length = self.step_drafts.propose(self.micro_batches.free(self.running))
        drafts = self.num_speculative_tokens if self.draft_length is None else self.draft_length
        self._most_drafts = most_worthwhile(self.running, drafts)
        for sequence in self._in_turn():
            if len(chosen) == most:
                break
            if sequence.slot < 0:  # preempted by an earlier one of this round
                continue
            # Rows in flight that are certain to stay count: steps that read them come later.
            certain = sequence.fewest_computed - sequence.num_late
            self.kv.publish(sequence.slot, sequence.keys, certain)
            self.kv.slide(sequence.slot, certain)
            if not sequence.decodes_next:
                self._limit_prompts()
            item = self._rows_for(sequence)
            if item is not None and self._make_room(item, chosen):
                chosen[sequence] = item
                self._budget -= item.num_rows
        self._reading.clear()
        if self.waiting:
            for item in chosen.values():  # no request is preempted any more
                self._let_share(item, item.num_computed)
        while self.waiting and self._free_slots and not self._is_short and len(chosen) < most:
            self._limit_prompts()
            if not self._admit(self.waiting[0], chosen):
                break
            self.waiting.popleft()
        # Decodes with equally many rows are adjacent, the widest first; prefills after them in
        # order of arrival.
        return sorted(chosen.values(), key=lambda item: 0 if item.is_prefill else -item.num_rows)

    def cancel(self, indices: Iterable[int]) -> None:
        """End these requests when the next step is scheduled, or when they are added."""
        self._cancelled.update(indices)
        self._ending += [
            sequence
            for sequence in (*self.running, *self.waiting)
            if sequence.request.index in self._cancelled and sequence not in self._ending
        ]

    def _end_cancelled(self) -> None:
        """End cancelled sequences; with pipeline stages they end once their results are in."""
        for sequence in self._ending:
            if sequence.finish_reason is None and not self.micro_batches.hold(sequence):
                sequence.fail(CANCELLED)
                self.release(sequence)
                self.failed.append(sequence)
        self._ending = [s for s in self._ending if s.finish_reason is None]

    def take_num_preempted(self) -> int:
        """Preemptions since the last call."""
        count, self.num_preempted = self.num_preempted, 0
        return count

    def _in_turn(self) -> list[Sequence]:
        free = self.micro_batches.free(self.running)
        return sorted(free, key=lambda sequence: not sequence.decodes_next)

    def _limit_prompts(self) -> None:
        """Lower the budget, once decodes are chosen, to what prompts get (docs/adr/0028)."""
        if self._is_limited:
            return
        self._is_limited = True
        readable = (s for s in self._in_turn() if not s.decodes_next)
        unread = [sequence.num_tokens - sequence.fewest_computed for sequence in readable]
        unread += [s.num_tokens for s in islice(self.waiting, len(self._free_slots))]
        num_decode_rows = self.max_num_batched_tokens - self._budget
        longest = max((s.fewest_tokens for s in self.running if s.decodes_next), default=0)
        left = self._budget
        self._budget = min(left, self._prompt_rows.most(num_decode_rows, unread, longest))
        self._withheld = left - self._budget

    def _rows_for(self, sequence: Sequence) -> Scheduled | None:
        """Rows this sequence wants: the newest token and its drafts, or the next chunk of its
        prompt. None: it has to wait."""
        if not sequence.decodes_next:
            start = sequence.fewest_computed  # nothing is undecided while a prompt is read
            remaining = sequence.num_tokens - start
            rows = self._chunk(sequence, start)
            if rows < 1:
                return None
            return Scheduled(sequence, start, rows, 0, True, rows == remaining)
        fewest, undecided = sequence.fewest_tokens, sequence.num_undecided
        if sequence.in_flight is not None and self._is_at_its_end(sequence, fewest):
            return None
        # Emitting every draft and one more token must not pass max_model_len.
        room = self.max_model_len - fewest - undecided - 1
        most = self._most_drafts if self.draft_lengths is None else sequence.num_chosen
        num_drafts = min(most, room)
        if undecided and num_drafts < most:
            return None  # the results in flight decide how many drafts fit
        rows = 1 + num_drafts
        if rows > self._budget:
            return None
        return Scheduled(sequence, fewest + undecided - 1, rows, num_drafts, False, True)

    def _chunk(self, sequence: Sequence, start: int) -> int:
        """Rows of the next chunk of a prompt. While a span that must stay whole finds too few rows,
        no request joins: decodes come to their ends, and leave more."""
        rows = min(sequence.num_tokens - start, self._budget)
        whole = whole_spans(sequence.spans, start, rows, self._budget + self._withheld)
        self._is_short |= rows > 0 and not whole
        return whole

    def _is_at_its_end(self, sequence: Sequence, num_tokens: int) -> bool:
        limit = sequence.num_prompt + sequence.request.sampling.max_tokens
        return num_tokens >= min(limit, self.max_model_len)

    def _make_room(self, item: Scheduled, chosen: dict[Sequence, Scheduled]) -> bool:
        """Allocate blocks for the item's rows, preempting younger requests as needed; False if it
        has to wait."""
        sequence = item.sequence
        while not self._allocate(item):
            victim, has_stages = self.running[-1], self.micro_batches.count > 1
            if sequence.in_flight is not None or (has_stages and victim.in_flight is not None):
                # No request is preempted, cut short or failed for numbers that are not in yet.
                self._is_short = True
                return False
            if victim is not sequence:
                self._preempt(victim)
                dropped = chosen.pop(victim, None)
                self._budget += dropped.num_rows if dropped else 0
            elif len(self.running) > 1:
                self._preempt(sequence)
                return False
            else:
                return self._shrink(item)
        return True

    def _shrink(self, item: Scheduled) -> bool:
        """Cut the rows of a request alone in a full cache; False: none fit, and it has failed."""
        sequence = item.sequence
        rows = self._tokens_that_fit(sequence.slot) - item.num_computed
        rows = whole_spans(sequence.spans, item.num_computed, min(rows, item.num_rows), rows)
        if rows < 1:
            self._fail_in_full_cache(sequence)
            return False
        if rows < item.num_rows:
            item.num_rows = rows
            if item.is_prefill:
                item.samples = False
            else:
                item.num_drafts = rows - 1
        return self._allocate(item)

    def _fail_in_full_cache(self, sequence: Sequence) -> None:
        """Fail a request whose next rows find too few blocks though no other one holds any."""
        sequence.fail(
            f"the KV cache is full at {sequence.num_tokens} tokens: "
            "raise engine.kv_cache.memory_gib"
        )
        self.release(sequence)
        self.failed.append(sequence)

    def _allocate(self, item: Scheduled) -> bool:
        """Allocate blocks for the item's rows and for what a drafter writes after them."""
        return self.kv.allocate(item.sequence.slot, item.seq_len + self.num_lookahead_tokens)

    def _tokens_that_fit(self, slot: int) -> int:
        return self.kv.tokens_that_fit(slot) - self.num_lookahead_tokens

    def _admit(self, sequence: Sequence, chosen: dict[Sequence, Scheduled]) -> bool:
        if sequence.in_flight is not None:
            return False  # preempted: the tokens on their way are recomputed with the others
        slot = self._free_slots[-1]
        if not self._may_fit(sequence, slot):
            return False
        cached = self._find_prefix(sequence)
        self.kv.take_prefix(slot, sequence.keys, cached)
        wanted, free = self._chunk(sequence, cached), self._tokens_that_fit(slot) - cached
        rows = whole_spans(sequence.spans, cached, min(wanted, free), free)
        # A short first chunk is worth it only when the cache is small; never beside
        # running requests.
        if (
            rows < 1
            or (rows < wanted and self.running)
            or not self.kv.allocate(slot, cached + rows + self.num_lookahead_tokens)
        ):
            self.kv.release(slot)
            self._refused = sequence, cached
            if not self.running and rows < 1 <= min(wanted, free):
                self._fail_in_full_cache(sequence)
            return False
        sequence.slot = self._free_slots.pop()
        sequence.num_computed = cached
        if not sequence.was_admitted:
            sequence.was_admitted, sequence.num_cached = True, cached
        if self.draft_lengths is not None:
            self.draft_lengths.begin(sequence.slot)
        self.running.append(sequence)
        self.admitted.append(sequence)
        is_whole = cached + rows == sequence.num_tokens
        item = chosen[sequence] = Scheduled(sequence, cached, rows, 0, True, is_whole)
        self._budget -= rows
        self._let_share(item, cached)
        return True

    def _find_prefix(self, sequence: Sequence) -> int:
        """Cached tokens of a waiting request. Blocks that the step being scheduled fills are made
        findable on the way, each time at most twice as far, so that few searches suffice."""
        keys, most = sequence.keys, sequence.num_tokens - 1
        most = 0 if sequence.lacks_prompt_logprobs else most  # every row is computed
        cached = self.kv.find_prefix(keys, most)
        while item := self._reading.pop(self.kv.next_key(keys, cached, most), None):
            end = min(item.num_shared, 2 * cached + self.kv.alignment)
            self.kv.publish(item.sequence.slot, item.sequence.keys, end)
            self._let_share(item, end)
            cached = self.kv.find_prefix(keys, most)
        while span := cut_span(sequence.spans, cached):
            cached = self.kv.find_prefix(keys, span.start)
        return cached

    def _let_share(self, item: Scheduled, num_published: int) -> None:
        """Let requests that are admitted to the same step take the blocks that `item` fills."""
        if key := self.kv.next_key(item.sequence.keys, num_published, item.num_shared):
            self._reading.setdefault(key, item)

    def _may_fit(self, sequence: Sequence, slot: int) -> bool:
        """Returns whether to look for the request's prefix: not if it was refused last, and the
        rows that it lacked beside the prefix still find no blocks."""
        if self._budget < 1:
            return False
        refused, cached = self._refused
        if not self.running or refused is not sequence:
            return True
        wanted = min(sequence.num_tokens - cached, self._budget)
        return self._tokens_that_fit(slot) >= wanted

    def _preempt(self, sequence: Sequence) -> None:
        """Give back a request's blocks; it is recomputed later, and its drafts are dropped."""
        self.release(sequence)
        if sequence.in_flight is None:
            sequence.start_over()
        self.waiting.appendleft(sequence)
        self.num_preempted += 1
        self._is_short = True

    def release(self, sequence: Sequence) -> None:
        """Free slot and blocks of a sequence that finished, failed or was preempted.

        They are free at once, even if a launched step still uses them: the device works in order,
        so steps launched later for their next owner run after that step.
        """
        if sequence.slot < 0:  # it ended by the step that was in flight when it was preempted
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        if sequence.finish_reason != "error":
            self.kv.publish(sequence.slot, sequence.keys, sequence.num_complete)
        self.kv.release(sequence.slot)
        self._free_slots.append(sequence.slot)
        sequence.slot = -1

    def clear(self) -> None:
        """Drop every request, also one that an interrupt left half admitted."""
        self.running.clear()
        self.waiting.clear()
        self.failed.clear()
        self._cancelled.clear()
        self._ending.clear()
        self.kv.clear()
        self._free_slots = list(range(self.max_num_seqs - 1, -1, -1))
        self._refused = None, 0
        self.num_preempted = 0

    def launched(self, scheduled: list[Scheduled]) -> None:
        """Record that a step was launched: the next one is scheduled on bounds of its results."""
        self.micro_batches.launched(scheduled)
        for item in scheduled:
            item.sequence.in_flight = item

    def arrived(self, item: Scheduled) -> None:
        """Record that the results of `item` were applied to its sequence."""
        sequence = item.sequence
        if sequence.in_flight is item:
            sequence.in_flight = None
            if sequence.slot < 0:  # preempted meanwhile
                sequence.start_over()

    def plan(self, scheduled: list[Scheduled]) -> StepPlan:
        """The chosen rows as plain arrays."""
        return self._plans.build(scheduled, self.draft_length)
