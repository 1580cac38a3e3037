"""Step plans as plain arrays: of the rows that were scheduled, of a part of a plan, and of dummy
requests for compiling kernels ahead of time.

A plan shares no memory with the scheduler: it stays valid while the next step is scheduled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from hydraspec.engine.cache.kv_cache import KVCache
from hydraspec.engine.schedule.draft_lengths import DraftLengths
from hydraspec.engine.schedule.sequence import Scheduled, note_late_rows
from hydraspec.sampling.flags import GREEDY, flags_from
from hydraspec.types import (
    Continuations,
    ImageRows,
    RowSegment,
    ScoredRows,
    StepPlan,
    TokenMasks,
    image_rows,
)

DUMMY_PROMPT_ROWS = 512  # kernels are the same for longer prompts


class PlanBuilder:
    """Builds plans. The arrays of steady decoding, which depend on the number of requests and of
    drafts alone, are kept and shared by plans, and never written to again."""

    def __init__(
        self,
        kv: KVCache,
        num_speculative_tokens: int,
        num_lookahead_tokens: int,
        draft_lengths: DraftLengths | None = None,
    ) -> None:
        """draft_lengths: the chooser of drafts, if any, which says how long a drafter may rest."""
        self._kv = kv
        self._most_late = 0 if draft_lengths is None else draft_lengths.most_late
        self._num_speculative_tokens = num_speculative_tokens
        self._num_lookahead_tokens = num_lookahead_tokens
        self._steady: dict[tuple[int, int], tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def build(self, scheduled: Sequence[Scheduled], draft_length: int | None = None) -> StepPlan:
        """The plan of these rows; decodes with equally many rows are adjacent in `scheduled`.
        draft_length: see StepPlan.
        """
        slots = np.array([item.sequence.slot for item in scheduled], dtype=np.int64)
        seq_lens = [item.num_computed + item.num_rows for item in scheduled]
        longest = max(seq_lens)
        drafts = self._num_speculative_tokens if draft_length is None else draft_length
        full = drafts + 1
        proposes: np.ndarray | None = None  # who verifies drafts wants some after the step too
        if all(item.num_rows == full and not item.is_prefill for item in scheduled):
            num_rows, num_drafts, samples = self._steady_arrays(len(scheduled), drafts)
            segments: tuple[RowSegment, ...] = (RowSegment(0, 0, len(scheduled), full, longest),)
        else:
            num_rows = np.array([item.num_rows for item in scheduled], dtype=np.int64)
            num_drafts = np.array([item.num_drafts for item in scheduled], dtype=np.int64)
            samples = np.array([item.samples for item in scheduled])
            segments = _segments(scheduled, seq_lens)
            proposes = _proposes(scheduled) if draft_length else None
        num_late, rests = None, False
        if self._most_late:
            num_late, rests = note_late_rows(scheduled, drafts > 0, self._most_late)
        all_greedy, flags = flags_from(item.sequence.needs[item.samples] for item in scheduled)
        return StepPlan(
            slots=slots,
            num_rows=num_rows,
            num_drafts=num_drafts,
            samples=samples,
            segments=segments,
            block_tables=self._kv.block_tables(slots, longest + self._num_lookahead_tokens),
            all_greedy=all_greedy,
            num_speculative_tokens=self._num_speculative_tokens,
            flags=flags,
            draft_length=draft_length,
            proposes=proposes,
            continuations=_continuations(scheduled, self._num_speculative_tokens),
            images=_image_rows(scheduled, 0),
            next_images=_image_rows(scheduled, 1),
            masks=_masks(scheduled, self._num_speculative_tokens),
            scored=_scored(scheduled),
            num_late=num_late,
            drafter_rests=rests,
        )

    def _steady_arrays(
        self, num_requests: int, num_drafts: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows, drafts and samples of requests that verify `num_drafts` drafts each."""
        arrays = self._steady.get((num_requests, num_drafts))
        if arrays is None:
            drafts = np.full(num_requests, num_drafts, dtype=np.int64)
            arrays = drafts + 1, drafts, np.ones(num_requests, dtype=bool)
            self._steady[num_requests, num_drafts] = arrays
        return arrays


def _proposes(scheduled: Sequence[Scheduled]) -> np.ndarray | None:
    """The requests [B] that want drafts after the step: a prompt, and decodes that are not expected
    to verify any next; None: all do."""
    want = [item.is_prefill or item.sequence.wants_drafts for item in scheduled]
    return _unless_all(np.array(want))


def _unless_all(flags: np.ndarray) -> np.ndarray | None:
    return None if flags.all() else flags


def _continuations(scheduled: Sequence[Scheduled], k: int) -> Continuations | None:
    """Continuations of the decodes that verify the host's drafts; None: there are none."""
    verifying = [each.sequence for each in scheduled if each.num_drafts and each.sequence.drafted]
    if not verifying:
        return None
    missing, rows = [-1] * (2 * k + 1), []
    for sequence in verifying:
        found = sequence.continuation
        rows.append([sequence.slot, sequence.num_tokens, *found, *missing[len(found) :]])
    is_ahead = any(sequence.in_flight is not None for sequence in verifying)
    return Continuations(numbers=np.array(rows, dtype=np.int64), is_ahead=is_ahead)


def _image_rows(scheduled: Sequence[Scheduled], ahead: int) -> tuple[ImageRows, ...]:
    """The rows of prompts whose token, or the one `ahead` of it, is an image's."""
    found: list[ImageRows] = []
    row = 0
    for item in scheduled:
        if item.is_prefill and item.sequence.spans:
            start = item.num_computed + ahead
            found += image_rows(item.sequence.spans, start, item.num_rows, row)
        row += item.num_rows
    return tuple(found)


def _masks(scheduled: Sequence[Scheduled], k: int) -> TokenMasks | None:
    """Tokens that the grammars of requests allow after each of their drafts, and the drafts that
    they decide; None: no grammar."""
    rows, words, decided = list[int](), list[np.ndarray](), list[tuple[int, int, int, int]]()
    for item in scheduled:
        if (follows := item.follow_grammar()) is not None:
            slot, end = item.sequence.slot, item.sequence.num_tokens
            words.append(follows.masks)
            rows += range(slot * (k + 1), slot * (k + 1) + len(follows.masks))
            decided += [(slot, end + i, i, follows.drafts[i]) for i in follows.decided]
    if not rows:
        return None
    return TokenMasks(
        rows=np.array(rows),
        words=np.concatenate(words),
        decided=np.array(decided, dtype=np.int64).reshape(-1, 4).T.copy(),
    )


def _scored(scheduled: Sequence[Scheduled]) -> ScoredRows | None:
    """The rows whose next tokens are of a prompt that gets log probabilities; None: no row."""
    rows, tokens, first_row = list[int](), list[int](), 0
    for item in scheduled:
        positions = item.score()
        start = first_row - 1 - item.num_computed
        rows += range(positions.start + start, positions.stop + start)
        tokens += item.sequence.token_ids[positions.start : positions.stop]
        first_row += item.num_rows
    if not rows:
        return None
    return ScoredRows(rows=np.array(rows), token_ids=np.array(tokens))


def _segments(scheduled: Sequence[Scheduled], seq_lens: list[int]) -> tuple[RowSegment, ...]:
    """Segments of a step: decoding requests with equally many rows form one, every prefill chunk
    its own."""
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


def full_decodes(plan: StepPlan) -> np.ndarray:
    """Mask [B] of the requests that sample and verify all drafts of the step."""
    rows = plan.decode_rows
    found: np.ndarray = (plan.num_rows == rows) & (plan.num_drafts == rows - 1) & plan.samples
    return found


def is_uniform(plan: StepPlan) -> bool:
    """Returns whether every request verifies all drafts of the step."""
    return bool(full_decodes(plan).all())


def is_decode(plan: StepPlan) -> bool:
    """Returns whether every request has its newest token and drafts as rows, and no others."""
    return bool((plan.samples & (plan.num_rows == plan.num_drafts + 1)).all())


def split_plan(plan: StepPlan, count: int) -> tuple[StepPlan, StepPlan]:
    """The first `count` requests, and the others, as two plans."""
    first: list[RowSegment] = []
    rest: list[RowSegment] = []
    num_rows = int(plan.num_rows[:count].sum())
    for segment in plan.segments:
        if segment.first_request < count:
            first.append(segment)
        else:
            rest.append(
                replace(
                    segment,
                    first_row=segment.first_row - num_rows,
                    first_request=segment.first_request - count,
                )
            )
    total = int(plan.num_rows.sum())
    before, after = range(num_rows), range(num_rows, total)
    return (
        _part(plan, slice(count), first, before),
        _part(plan, slice(count, None), rest, after),
    )


def _part(plan: StepPlan, part: slice, segments: list[RowSegment], rows: range) -> StepPlan:
    images, next_images = (
        tuple(replace(each, row=each.row - rows.start) for each in found if each.row in rows)
        for found in (plan.images, plan.next_images)
    )
    return replace(
        plan,
        images=images,
        next_images=next_images,
        slots=plan.slots[part],
        num_rows=plan.num_rows[part],
        num_drafts=plan.num_drafts[part],
        samples=plan.samples[part],
        proposes=None if plan.proposes is None else _unless_all(plan.proposes[part]),
        segments=tuple(segments),
        block_tables=[table.part(part) for table in plan.block_tables],
    )


def dummy_plans(
    batch_sizes: Iterable[int],
    num_speculative_tokens: int,
    *,
    max_rows: int,
    max_seq_len: int,
    decodes: bool,
    mixed: bool,
) -> Iterator[StepPlan]:
    """Plans of each batch size for compiling kernels ahead of time: greedy requests that read a
    prompt and, where `decodes` is true, requests that verify K drafts; where `mixed` is true, also
    those that read or verify fewer rows; and a request that decodes beside one that reads a prompt.
    Slots and block tables are empty.
    """
    k, batch_sizes = num_speculative_tokens, set(batch_sizes)
    for count in sorted(batch_sizes, reverse=True):
        most = min(DUMMY_PROMPT_ROWS, max_rows // count, max_seq_len)
        # Kernels are chosen by the powers of two that hold the requests, and the rows of each.
        every_size = mixed and count == 1 << (count.bit_length() - 1)
        smaller = [1 << n for n in range(1, most.bit_length()) if 1 << n < most]
        for rows in [*(smaller if every_size else []), most]:
            if rows:
                yield _dummy_plan(count, rows, 0, k, max_seq_len)
        for drafts in range(0 if every_size else k, k + 1):
            if (decodes or drafts < k) and count * (drafts + 1) <= max_rows:
                yield _dummy_plan(count, drafts + 1, drafts, k, max_seq_len)
    beside = min(DUMMY_PROMPT_ROWS, max_rows - 1, max_seq_len)
    if max(batch_sizes) > 1 and beside > 1:
        yield replace(
            _dummy_plan(2, beside, 0, k, max_seq_len),
            num_rows=np.array([1, beside]),
            segments=(
                RowSegment(0, 0, 1, 1, max_seq_len),
                RowSegment(1, 1, 1, beside, max_seq_len),
            ),
        )


def _dummy_plan(count: int, rows: int, drafts: int, k: int, longest: int) -> StepPlan:
    if rows == drafts + 1:
        segments: tuple[RowSegment, ...] = (RowSegment(0, 0, count, rows, longest),)
    else:
        segments = tuple(RowSegment(i * rows, i, 1, rows, longest) for i in range(count))
    return StepPlan(
        slots=np.arange(count),
        num_rows=np.full(count, rows),
        num_drafts=np.full(count, drafts),
        samples=np.ones(count, dtype=bool),
        segments=segments,
        block_tables=[],
        all_greedy=True,
        flags=GREEDY,
        num_speculative_tokens=k,
    )
