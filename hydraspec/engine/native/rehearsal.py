"""Plans that nobody asked for: steps like those that will run eagerly, to compile their kernels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from hydraspec.types import RowSegment, StepPlan

PROMPT_ROWS = 512  # more are nothing else to a kernel


def rehearsals(
    batch_sizes: Iterable[int],
    num_speculative_tokens: int,
    *,
    max_rows: int,
    max_seq_len: int,
    decodes: bool,
) -> Iterator[StepPlan]:
    """By batch size: greedy requests whose prompts are read in this step, and where `decodes` is
    true, such that verify all K drafts. Their slots hold nothing, nor do their block tables.
    """
    for count in sorted(batch_sizes, reverse=True):
        rows = min(PROMPT_ROWS, max_rows // count, max_seq_len)
        if rows:
            yield _plan(count, rows, 0, num_speculative_tokens, max_seq_len)
        if decodes and count * (num_speculative_tokens + 1) <= max_rows:
            drafts = num_speculative_tokens
            yield _plan(count, drafts + 1, drafts, num_speculative_tokens, max_seq_len)


def _plan(count: int, rows: int, drafts: int, k: int, longest: int) -> StepPlan:
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
        num_speculative_tokens=k,
    )
