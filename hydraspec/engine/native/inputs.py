"""Input preparation: from the scheduler's plain numbers and the device-resident state to a `Batch`.

Everything that depends on the plan's shape alone is a `Layout`, built once and kept; everything
that depends on what was accepted is computed on the device. Nothing here reads the device from the
host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from hydraspec_kernels.slot_mapping import slot_mapping
from torch import Tensor

from hydraspec.types import Batch, KVGroupSpec, RequestState, StepPlan


@dataclass(slots=True, frozen=True, kw_only=True)
class Layout:
    """Index tensors that follow from (rows, drafts, samples) of each request, whatever the tokens
    are."""

    num_rows: Tensor  # [B]
    num_drafts: Tensor  # [B]
    samples: Tensor  # [B] bool
    query_start_loc: Tensor  # [B+1]
    row_request: Tensor  # [T] batch index of the request a row belongs to
    row_offset: Tensor  # [T] place of the row within its request's rows
    logits_rows: Tensor | None  # [N]; None: every row
    verify_rows: Tensor  # [B, K+1]
    draft_rows: Tensor  # [B, K] rows of T that hold the drafts; a valid row where there is none
    no_draft: Tensor  # [B, K] bool, true where there is none
    every_draft: bool  # host fact: no_draft is all false


class LayoutCache:
    """Layouts by the plan's shape. Steady decoding repeats the same few, so the cache is small and
    cleared when full."""

    def __init__(self, device: torch.device, max_entries: int = 256) -> None:
        self._device = device
        self._max_entries = max_entries
        self._layouts: dict[tuple[bytes, bytes, bytes], Layout] = {}

    def get(self, plan: StepPlan) -> Layout:
        key = (plan.num_rows.tobytes(), plan.num_drafts.tobytes(), plan.samples.tobytes())
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) >= self._max_entries:
                self._layouts.clear()
            layout = self._layouts[key] = _build_layout(plan, self._device)
        return layout


def _build_layout(plan: StepPlan, device: torch.device) -> Layout:
    num_rows, num_drafts, samples = plan.num_rows, plan.num_drafts, plan.samples
    num_requests, width = len(num_rows), plan.num_speculative_tokens
    starts = np.concatenate([[0], np.cumsum(num_rows)]).astype(np.int64)
    row_request = np.repeat(np.arange(num_requests), num_rows)
    row_offset = np.arange(starts[-1]) - starts[row_request]
    # Logits: the newest token's row and the drafts behind it, of every request that samples.
    needs_logits = samples[row_request] & (row_offset >= (num_rows - num_drafts - 1)[row_request])
    logits_rows = np.flatnonzero(needs_logits)
    first_logit = (
        np.cumsum(needs_logits) - needs_logits
    )  # exclusive prefix sum: place among the N rows
    newest = starts[:-1] + num_rows - num_drafts - 1
    step = np.minimum(np.arange(width + 1), num_drafts[:, None])
    verify_rows = np.where(samples[:, None], first_logit[newest][:, None] + step, 0)
    draft_rows = newest[:, None] + np.minimum(np.arange(1, width + 1), num_drafts[:, None])
    no_draft = np.arange(width) >= num_drafts[:, None]

    def to_device(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    return Layout(
        num_rows=to_device(num_rows),
        num_drafts=to_device(num_drafts),
        samples=to_device(samples),
        query_start_loc=to_device(starts),
        row_request=to_device(row_request),
        row_offset=to_device(row_offset),
        logits_rows=None if len(logits_rows) == len(row_request) else to_device(logits_rows),
        verify_rows=to_device(verify_rows),
        draft_rows=to_device(draft_rows),
        no_draft=to_device(no_draft),
        every_draft=not no_draft.any(),
    )


def prepare(
    plan: StepPlan,
    layout: Layout,
    state: RequestState,
    specs: Sequence[KVGroupSpec],
    device: torch.device,
) -> Batch:
    """Inputs of the target's forward. Ids, positions, lengths and cache rows are read off the
    device state."""
    slots = torch.from_numpy(plan.slots).to(device)
    num_computed = state.num_computed.index_select(0, slots)
    positions = num_computed.index_select(0, layout.row_request).add_(layout.row_offset)
    row_start = (slots * state.token_ids.shape[1]).index_select(0, layout.row_request)
    tokens = state.token_ids.view(-1).index_select(0, row_start.add_(positions))
    drafts = tokens.index_select(0, layout.draft_rows.view(-1)).view(layout.draft_rows.shape)
    if not layout.every_draft:
        drafts = drafts.masked_fill(layout.no_draft, -1)
    tables = [torch.from_numpy(table).to(device) for table in plan.block_tables]
    return Batch(
        segments=plan.segments,
        slots=slots,
        row_request=layout.row_request,
        input_ids=tokens.clamp_min(0),  # a padding draft (-1) still needs a row of the embedding
        positions=positions,
        query_start_loc=layout.query_start_loc,
        seq_lens=num_computed + layout.num_rows,
        slot_mapping=[
            slot_mapping(table, layout.row_request, positions, spec.block_size)
            for table, spec in zip(tables, specs, strict=True)
        ],
        block_tables=tables,
        logits_rows=layout.logits_rows,
        verify_rows=layout.verify_rows,
        draft_tokens=drafts,
        num_drafts=layout.num_drafts,
        samples=layout.samples,
        all_greedy=plan.all_greedy,
        flags=plan.flags,
    )
