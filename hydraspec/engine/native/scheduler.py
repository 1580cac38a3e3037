"""Continuous batching on the host: which requests run in the next step, and with how many rows.
Plain numbers only."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from hydraspec.engine.finish import OfferedRequest
from hydraspec.engine.native.kv_cache import KVCache
from hydraspec.types import RowSegment, SamplingFlags, StepPlan


@dataclass(slots=True, eq=False)
class Sequence(OfferedRequest):
    """An offered request with its place in the cache."""

    slot: int = -1
    num_computed: int = 0  # tokens with valid target KV
    decoding: bool = False  # it has sampled since it was (re)admitted


@dataclass(slots=True)
class Scheduled:
    """One sequence's share of a step."""

    sequence: Sequence
    num_rows: int
    num_drafts: int
    is_prefill: bool

    @property
    def samples(self) -> bool:
        sequence = self.sequence
        return sequence.num_computed + self.num_rows - self.num_drafts == sequence.num_tokens


class Scheduler:
    """First come, first served. When the cache is full the youngest running request is preempted
    and recomputed."""

    def __init__(
        self,
        kv: KVCache,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        num_speculative_tokens: int,
        num_lookahead_tokens: int = 0,
    ) -> None:
        self.kv = kv
        self.num_lookahead_tokens = num_lookahead_tokens
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.num_speculative_tokens = num_speculative_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.admitted: list[
            Sequence
        ] = []  # got a slot in the last schedule(); their state must be written
        self.failed: list[Sequence] = []
        self.num_preempted = 0
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))

    def add(self, sequence: Sequence) -> None:
        """Queue a request; one that can never be served fails at once."""
        sequence.fail_if_too_long(self.max_model_len)
        if not sequence.finish_reason and not self.kv.can_ever_hold(
            sequence.num_tokens + 1, self.num_lookahead_tokens
        ):
            sequence.fail(
                f"the prompt has {sequence.num_tokens} tokens, more than the KV cache can hold: "
                "raise engine.kv_cache.memory_gib"
            )
        if sequence.finish_reason:
            self.failed.append(sequence)
        else:
            self.waiting.append(sequence)

    def schedule(self) -> list[Scheduled]:
        """Choose the next step's rows: decoding requests first, then running prefills, then new
        requests."""
        self.admitted.clear()
        self.num_preempted = 0
        chosen: dict[Sequence, Scheduled] = {}
        for sequence in sorted(self.running, key=lambda s: not s.decoding):
            if sequence.slot < 0:  # preempted by an earlier one of this round
                continue
            self.kv.slide(sequence.slot, sequence.num_computed)
            item = self._rows_for(sequence, self._budget(chosen))
            if item is not None and self._make_room(item, chosen):
                chosen[sequence] = item
        while self.waiting and self._free_slots and not self.num_preempted:
            if not self._admit(self.waiting[0], self._budget(chosen), chosen):
                break
            self.waiting.popleft()
        # Decodes with equally many rows stand together, prefills behind them in order of arrival.
        return sorted(
            chosen.values(),
            key=lambda item: (item.is_prefill, 0 if item.is_prefill else item.num_rows),
        )

    def _budget(self, chosen: dict[Sequence, Scheduled]) -> int:
        return self.max_num_batched_tokens - sum(item.num_rows for item in chosen.values())

    def _rows_for(self, sequence: Sequence, budget: int) -> Scheduled | None:
        """Rows this sequence wants: the newest token and its drafts, or the next chunk of its
        prompt."""
        remaining = sequence.num_tokens - sequence.num_computed
        if not sequence.decoding:
            rows = min(remaining, budget)
            return Scheduled(sequence, rows, 0, True) if rows > 0 else None
        # Emitting every draft and one more token must not pass max_model_len.
        num_drafts = min(self.num_speculative_tokens, self.max_model_len - sequence.num_tokens - 1)
        rows = remaining + num_drafts
        return Scheduled(sequence, rows, num_drafts, False) if rows <= budget else None

    def _make_room(self, item: Scheduled, chosen: dict[Sequence, Scheduled]) -> bool:
        """Own blocks for the item's rows, preempting younger requests as needed; False if it has to
        wait."""
        sequence = item.sequence
        while not self._allocate(item):
            victim = self.running[-1]
            if victim is not sequence:
                self._preempt(victim)
                chosen.pop(victim, None)
            elif len(self.running) > 1:
                self._preempt(sequence)
                return False
            else:
                return self._shrink(item)
        return True

    def _shrink(self, item: Scheduled) -> bool:
        """A request alone in a full cache: fewer drafts or a shorter chunk, else it fails."""
        sequence = item.sequence
        rows = self._tokens_that_fit(sequence.slot) - sequence.num_computed
        if rows < 1:
            sequence.fail(
                f"the KV cache is full at {sequence.num_tokens} tokens: "
                "raise engine.kv_cache.memory_gib"
            )
            self.release(sequence)
            self.failed.append(sequence)
            return False
        item.num_rows = min(item.num_rows, rows)
        if not item.is_prefill:
            item.num_drafts = item.num_rows - 1
        return self._allocate(item)

    def _allocate(self, item: Scheduled) -> bool:
        """Own blocks for the item's rows and for what a drafter writes behind them."""
        num_tokens = item.sequence.num_computed + item.num_rows + self.num_lookahead_tokens
        return self.kv.allocate(item.sequence.slot, num_tokens)

    def _tokens_that_fit(self, slot: int) -> int:
        return self.kv.tokens_that_fit(slot) - self.num_lookahead_tokens

    def _admit(self, sequence: Sequence, budget: int, chosen: dict[Sequence, Scheduled]) -> bool:
        slot = self._free_slots[-1]
        rows = min(sequence.num_tokens, budget, self._tokens_that_fit(slot))
        # A short first chunk is worth it only when the cache is small; never squeeze in behind
        # running requests.
        if rows < min(sequence.num_tokens, budget) and self.running:
            return False
        if rows < 1 or not self.kv.allocate(slot, rows + self.num_lookahead_tokens):
            return False
        sequence.slot = self._free_slots.pop()
        self.running.append(sequence)
        self.admitted.append(sequence)
        chosen[sequence] = Scheduled(sequence, rows, 0, True)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Give its blocks back; it is recomputed from its tokens later, its drafts are dropped."""
        self.release(sequence)
        sequence.num_computed = 0
        sequence.decoding = False
        self.waiting.appendleft(sequence)
        self.num_preempted += 1

    def release(self, sequence: Sequence) -> None:
        """Free slot and blocks of a sequence that finished, failed or was preempted."""
        self.running.remove(sequence)
        self.kv.release(sequence.slot)
        self._free_slots.append(sequence.slot)
        sequence.slot = -1

    def clear(self) -> None:
        """Drop every request."""
        for sequence in list(self.running):
            self.release(sequence)
        self.waiting.clear()
        self.failed.clear()

    def plan(self, scheduled: list[Scheduled]) -> StepPlan:
        """The chosen rows as plain arrays."""
        slots = np.array([item.sequence.slot for item in scheduled], dtype=np.int64)
        seq_lens = [item.sequence.num_computed + item.num_rows for item in scheduled]
        samples = [item.samples for item in scheduled]
        return StepPlan(
            slots=slots,
            num_rows=np.array([item.num_rows for item in scheduled], dtype=np.int64),
            num_drafts=np.array([item.num_drafts for item in scheduled], dtype=np.int64),
            samples=np.array(samples),
            segments=_segments(scheduled, seq_lens),
            block_tables=self.kv.block_tables(slots, max(seq_lens) + self.num_lookahead_tokens),
            all_greedy=all(
                item.sequence.request.sampling.temperature == 0.0
                for item, sampled in zip(scheduled, samples, strict=True)
                if sampled
            ),
            num_speculative_tokens=self.num_speculative_tokens,
            flags=_sampling_flags(scheduled),
        )


def _sampling_flags(scheduled: list[Scheduled]) -> SamplingFlags:
    """What the step's requests ask of the sampler, so that it can skip what nobody uses."""
    sampling = [item.sequence.request.sampling for item in scheduled]
    return SamplingFlags(
        any_greedy=any(s.temperature == 0.0 for s in sampling),
        any_top_k=any(s.top_k > 0 for s in sampling),
        any_top_p=any(s.top_p < 1.0 for s in sampling),
        any_min_p=any(s.min_p > 0.0 for s in sampling),
    )


def _segments(scheduled: list[Scheduled], seq_lens: list[int]) -> tuple[RowSegment, ...]:
    """Decoding requests with equally many rows form one segment; every prefill chunk is a segment
    of its own."""
    segments: list[RowSegment] = []
    first_row = 0
    for index, item in enumerate(scheduled):
        last = segments[-1] if segments else None
        if last and not item.is_prefill and last.rows_per_request == item.num_rows:
            segments[-1] = RowSegment(
                last.first_row,
                last.first_request,
                last.num_requests + 1,
                last.rows_per_request,
                max(last.max_seq_len, seq_lens[index]),
            )
        else:
            segments.append(RowSegment(first_row, index, 1, item.num_rows, seq_lens[index]))
        first_row += item.num_rows
    return tuple(segments)
