"""Input preparation: from the scheduler's plain numbers and the device-resident state to a `Batch`.

Everything that depends on the plan's shape alone is a `Layout`; everything that depends on what was
accepted is computed on the device. Nothing here reads the device from the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from hydraspec_kernels.step_inputs import GroupTables, RowLayout, prepare_rows
from torch import Tensor

from hydraspec.models.needed_rows import needed_rows
from hydraspec.types import (
    Batch,
    KVGroupSpec,
    NeededRows,
    RequestState,
    RowSegment,
    SamplingFlags,
    StepPlan,
)


@dataclass(slots=True, frozen=True, kw_only=True)
class Layout(RowLayout):
    """Index tensors that follow from (rows, drafts, samples) of each request alone."""

    samples: Tensor  # [B] bool
    query_start_loc: Tensor  # [B+1]
    logits_rows: Tensor | None  # [N]; None: every row
    verify_rows: Tensor  # [B, K+1]


@dataclass(slots=True, frozen=True, kw_only=True)
class PlanTensors:
    """A plan on the device. A graph keeps the tensors and has new numbers written into them."""

    layout: Layout
    slots: Tensor  # [B]
    tables: list[Tensor]  # per KV group [B, P]
    segments: tuple[RowSegment, ...]
    all_greedy: bool
    flags: SamplingFlags
    num_speculative_tokens: int
    has_padding: bool = False
    needed: NeededRows | None = None  # None: all rows, and in graphs
    draft_length: int | None = None  # see StepPlan


class PlanPlacer:
    """Puts plans on a CPU: layouts are kept by the plan's shape. Steady decoding repeats the same
    few, so they are few and forgotten when too many."""

    def __init__(self, device: torch.device, max_entries: int = 256) -> None:
        self._device = device
        self._max_entries = max_entries
        self._layouts: dict[tuple[bytes, bytes, bytes], Layout] = {}

    def place(self, plan: StepPlan) -> PlanTensors:
        """The plan's tensors; shapes are the plan's own."""
        return PlanTensors(
            layout=self._layout(plan),
            slots=torch.from_numpy(plan.slots).to(self._device),
            tables=[torch.from_numpy(t.dense()).to(self._device) for t in plan.block_tables],
            segments=plan.segments,
            all_greedy=plan.all_greedy,
            flags=plan.flags,
            num_speculative_tokens=plan.num_speculative_tokens,
            needed=needed_unless_all(plan),
            draft_length=plan.draft_length,
        )

    def _layout(self, plan: StepPlan) -> Layout:
        key = (plan.num_rows.tobytes(), plan.num_drafts.tobytes(), plan.samples.tobytes())
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) >= self._max_entries:
                self._layouts.clear()
            layout = self._layouts[key] = _build_layout(plan, self._device)
        return layout


def row_places(num_rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """First row of each request and the end [B+1]; request and offset of each row, [T] both."""
    starts = np.zeros(len(num_rows) + 1, dtype=np.int64)
    np.cumsum(num_rows, out=starts[1:])
    row_request = np.repeat(np.arange(len(num_rows)), num_rows)
    return starts, row_request, np.arange(starts[-1]) - starts[row_request]


def needed_unless_all(plan: StepPlan) -> NeededRows | None:
    """The rows whose outputs are read after the target, in host memory; None where all are."""
    num_read = np.where(plan.samples, plan.num_drafts + 1, 0)
    return None if (num_read == plan.num_rows).all() else needed_rows(plan)


def _build_layout(plan: StepPlan, device: torch.device) -> Layout:
    num_rows, num_drafts, samples = plan.num_rows, plan.num_drafts, plan.samples
    starts, row_request, row_offset = row_places(num_rows)
    # Logits: the rows of the newest token and the drafts after it, of every request that samples.
    needs_logits = samples[row_request] & (row_offset >= (num_rows - num_drafts - 1)[row_request])
    logits_rows = np.flatnonzero(needs_logits)
    first_logit = (
        np.cumsum(needs_logits) - needs_logits
    )  # exclusive prefix sum: place among the N rows
    newest = starts[:-1] + num_rows - num_drafts - 1
    step = np.minimum(np.arange(plan.num_speculative_tokens + 1), num_drafts[:, None])
    verify_rows = np.where(samples[:, None], first_logit[newest][:, None] + step, 0)

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
    )


def prepare(plan: PlanTensors, state: RequestState, specs: Sequence[KVGroupSpec]) -> Batch:
    """Inputs of the target's forward. Ids, positions, lengths and cache rows are read off the
    device state."""
    layout = plan.layout
    rows = prepare_rows(
        state,
        layout,
        plan.slots,
        GroupTables(plan.tables, [spec.block_size for spec in specs]),
        plan.num_speculative_tokens,
        padded=plan.has_padding,
    )
    return Batch(
        segments=plan.segments,
        slots=plan.slots,
        row_request=layout.row_request,
        input_ids=rows.input_ids,
        positions=rows.positions,
        query_start_loc=layout.query_start_loc,
        seq_lens=rows.seq_lens,
        slot_mapping=rows.slot_mapping,
        block_tables=plan.tables,
        has_padding=plan.has_padding,
        logits_rows=layout.logits_rows,
        verify_rows=layout.verify_rows,
        draft_tokens=rows.draft_tokens,
        num_drafts=layout.num_drafts,
        samples=layout.samples,
        all_greedy=plan.all_greedy,
        flags=plan.flags,
        needed=plan.needed,
        draft_length=plan.draft_length,
    )
