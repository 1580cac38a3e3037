"""Rows whose hidden states are needed after the last layer that writes KV.

A prefill chunk needs the hidden states of the rows that are sampled from, and all rows' keys and
values. The last layer that writes them, and those after it that share KV (Gemma 4's E models),
can run on the few rows alone.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hydraspec.types import NeededRows, Rows, RowSegment, StepPlan


def needed_rows(plan: StepPlan) -> NeededRows:
    """The row of the newest token and the rows of the drafts of every request that samples; all
    tensors are in host memory."""
    requests = np.flatnonzero(plan.samples)
    counts = plan.num_drafts[requests] + 1
    first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    ends = np.cumsum(plan.num_rows)[requests]
    row_request = np.repeat(np.arange(len(requests)), counts)
    rows = (ends - counts)[row_request] + np.arange(first[-1]) - first[row_request]

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.astype(np.int64))

    return NeededRows(
        rows=tensor(rows),
        requests=tensor(requests),
        query_start_loc=tensor(first),
        segments=_segments(plan, requests, counts),
    )


def padded_needed_rows(
    plan: StepPlan | None, num_requests: int, num_rows: int, k: int, max_seq_len: int
) -> NeededRows:
    """The needed rows of a step that a graph of B requests and T rows runs: B * (K+1) rows, padding
    after those that the plan needs, and all requests, those that do not sample without rows.
    plan None: all rows are padding.
    """
    counts = np.zeros(num_requests, dtype=np.int64)
    if plan is not None:
        counts[: len(plan.samples)] = np.where(plan.samples, plan.num_drafts + 1, 0)
    first = np.concatenate([[0], np.cumsum(counts)])
    rows = np.zeros(num_requests * (k + 1), dtype=np.int64)
    targets = np.full_like(rows, num_rows)
    if plan is not None:
        found = np.asarray(needed_rows(plan).rows)
        rows[: len(found)] = targets[: len(found)] = found
    return NeededRows(
        rows=torch.from_numpy(rows),
        targets=torch.from_numpy(targets),
        requests=torch.arange(num_requests),
        query_start_loc=torch.from_numpy(first),
        segments=(RowSegment(0, 0, num_requests, k + 1, max_seq_len),),
    )


def _segments(plan: StepPlan, requests: np.ndarray, counts: np.ndarray) -> tuple[RowSegment, ...]:
    """Segments of neighbouring requests with equally many needed rows."""
    bounds = np.zeros(len(plan.samples), dtype=np.int64)
    for segment in plan.segments:
        last = segment.first_request + segment.num_requests
        bounds[segment.first_request : last] = segment.max_seq_len
    found = []
    cuts = np.flatnonzero(np.diff(counts)) + 1
    first_row = 0
    for run in np.split(np.arange(len(requests)), cuts):
        if not len(run):
            break
        first, count = int(run[0]), int(counts[run[0]])
        longest = int(bounds[requests[run]].max())
        found.append(RowSegment(first_row, first, len(run), count, longest))
        first_row += count * len(run)
    return tuple(found)


def reduced(batch: Rows, needed: NeededRows) -> Rows:
    """The batch reduced to the needed rows. A layer that writes KV writes theirs again."""
    seq_lens = batch.seq_lens.index_select(0, needed.requests)
    slot_mapping = [slots.index_select(0, needed.rows) for slots in batch.slot_mapping]
    if needed.targets is not None:  # padding writes nothing, and requests without rows are padding
        seq_lens = seq_lens.masked_fill(needed.query_start_loc.diff() == 0, 0)
        is_padding = needed.targets == batch.input_ids.shape[0]
        slot_mapping = [slots.masked_fill(is_padding, -1) for slots in slot_mapping]
    return Rows(
        segments=needed.segments,
        input_ids=batch.input_ids.index_select(0, needed.rows),
        positions=batch.positions.index_select(0, needed.rows),
        seq_lens=seq_lens,
        slot_mapping=slot_mapping,
        block_tables=[table.index_select(0, needed.requests) for table in batch.block_tables],
        query_start_loc=needed.query_start_loc,
        has_padding=needed.targets is not None,
    )
