"""From the rows that were chosen to a `StepPlan`: plain arrays that share nothing with the
scheduler, so that a plan stays true while the next step is scheduled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hydraspec.engine.native.kv_cache import KVCache
from hydraspec.engine.native.sequence import Scheduled
from hydraspec.types import RowSegment, SamplingFlags, StepPlan


class PlanBuilder:
    """Builds plans; the arrays of steady decoding, which depend on the batch size alone, are kept
    and shared by plans, so nobody may write to them."""

    def __init__(self, kv: KVCache, num_speculative_tokens: int, num_lookahead_tokens: int) -> None:
        self._kv = kv
        self._num_speculative_tokens = num_speculative_tokens
        self._num_lookahead_tokens = num_lookahead_tokens
        self._steady: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        self._flags: dict[tuple[bool, ...], SamplingFlags] = {}

    def build(self, scheduled: Sequence[Scheduled]) -> StepPlan:
        """The plan of these rows; decodes with equally many rows stand together in `scheduled`."""
        slots = np.array([item.sequence.slot for item in scheduled], dtype=np.int64)
        seq_lens = [item.num_computed + item.num_rows for item in scheduled]
        longest = max(seq_lens)
        full = self._num_speculative_tokens + 1
        if all(item.num_rows == full and not item.is_prefill for item in scheduled):
            num_rows, num_drafts, samples = self._steady_arrays(len(scheduled))
            segments: tuple[RowSegment, ...] = (RowSegment(0, 0, len(scheduled), full, longest),)
        else:
            num_rows = np.array([item.num_rows for item in scheduled], dtype=np.int64)
            num_drafts = np.array([item.num_drafts for item in scheduled], dtype=np.int64)
            samples = np.array([item.samples for item in scheduled])
            segments = _segments(scheduled, seq_lens)
        all_greedy, flags = self._sampling(scheduled)
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
        )

    def _steady_arrays(self, num_requests: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows, drafts and samples of `num_requests` requests that verify K drafts each."""
        arrays = self._steady.get(num_requests)
        if arrays is None:
            drafts = np.full(num_requests, self._num_speculative_tokens, dtype=np.int64)
            arrays = drafts + 1, drafts, np.ones(num_requests, dtype=bool)
            self._steady[num_requests] = arrays
        return arrays

    def _sampling(self, scheduled: Sequence[Scheduled]) -> tuple[bool, SamplingFlags]:
        """Whether all that sample are greedy, and what the step's requests ask of the sampler, so
        that it can skip what nobody uses."""
        all_greedy = True
        any_greedy = any_top_k = any_top_p = any_min_p = False
        for item in scheduled:
            sampling = item.sequence.request.sampling
            if sampling.temperature == 0.0:
                any_greedy = True
            elif item.samples:
                all_greedy = False
            any_top_k |= sampling.top_k > 0
            any_top_p |= sampling.top_p < 1.0
            any_min_p |= sampling.min_p > 0.0
        key = (any_greedy, any_top_k, any_top_p, any_min_p)
        flags = self._flags.get(key)
        if flags is None:
            flags = self._flags[key] = SamplingFlags(
                any_greedy=any_greedy,
                any_top_k=any_top_k,
                any_top_p=any_top_p,
                any_min_p=any_min_p,
            )
        return all_greedy, flags


def _segments(scheduled: Sequence[Scheduled], seq_lens: list[int]) -> tuple[RowSegment, ...]:
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
