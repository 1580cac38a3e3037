"""Input preparation: from the scheduler's plain numbers and the device-resident state to a `Batch`.

Everything that depends on what was accepted is computed on the device. Nothing here reads the
device from the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hydraspec_kernels.step_inputs import GroupTables, RowLayout, prepare_rows
from torch import Tensor

from hydraspec.models.needed_rows import needed_rows
from hydraspec.types import (
    Batch,
    EncodedRows,
    KVGroupSpec,
    NeededRows,
    RequestState,
    RowSegment,
    SamplingFlags,
    StepPlan,
)


@dataclass(slots=True, frozen=True)
class LateRows:
    """Rows that a drafter with a cache of its own has not run over yet (docs/adr/0052)."""

    counts: np.ndarray  # [B] rows of each request before those of this step
    rests: bool  # it does not run over this step's rows either, one of each request


@dataclass(slots=True, frozen=True, kw_only=True)
class PlanTensors(RowLayout):
    """A plan on the device. A graph keeps the tensors and has new numbers written into them."""

    samples: Tensor  # [B] bool
    query_start_loc: Tensor  # [B+1]
    logits_rows: Tensor | None  # [N]; None: every row
    verify_rows: Tensor  # [B, K+1]
    slots: Tensor  # [B]
    tables: list[Tensor]  # per KV group [B, P]
    segments: tuple[RowSegment, ...]
    all_greedy: bool
    flags: SamplingFlags
    num_speculative_tokens: int
    has_padding: bool = False
    needed: NeededRows | None = None  # None: all rows, and in graphs
    draft_length: int | None = None  # see StepPlan
    proposes: Tensor | None = None  # [B] bool, see Batch
    encoded: EncodedRows | None = None  # see Batch; in no graph
    next_encoded: EncodedRows | None = None
    late: LateRows | None = None  # in no graph


def row_places(num_rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """First row of each request, then T, [B+1]; request of each row and offset in it, [T] both."""
    starts = np.zeros(len(num_rows) + 1, dtype=np.int64)
    np.cumsum(num_rows, out=starts[1:])
    row_request = np.repeat(np.arange(len(num_rows)), num_rows)
    return starts, row_request, np.arange(starts[-1]) - starts[row_request]


def needed_unless_all(plan: StepPlan) -> NeededRows | None:
    """The rows whose outputs are read after the target's pass, in host memory; None: all rows."""
    num_read = np.where(plan.samples, plan.num_drafts + 1, 0)
    return None if (num_read == plan.num_rows).all() else needed_rows(plan)


def prepare(plan: PlanTensors, state: RequestState, specs: Sequence[KVGroupSpec]) -> Batch:
    """Inputs of the target's forward pass. Ids, positions, lengths and cache rows are computed from
    the device state."""
    rows = prepare_rows(
        state,
        plan,
        plan.slots,
        GroupTables(plan.tables, [spec.block_size for spec in specs]),
        plan.num_speculative_tokens,
        padded=plan.has_padding,
    )
    return Batch(
        segments=plan.segments,
        slots=plan.slots,
        row_request=plan.row_request,
        input_ids=rows.input_ids,
        positions=rows.positions,
        query_start_loc=plan.query_start_loc,
        seq_lens=rows.seq_lens,
        slot_mapping=rows.slot_mapping,
        block_tables=plan.tables,
        has_padding=plan.has_padding,
        logits_rows=plan.logits_rows,
        verify_rows=plan.verify_rows,
        draft_tokens=rows.draft_tokens,
        num_drafts=plan.num_drafts,
        samples=plan.samples,
        all_greedy=plan.all_greedy,
        flags=plan.flags,
        needed=plan.needed,
        draft_length=plan.draft_length,
        proposes=plan.proposes,
        encoded=plan.encoded,
        next_encoded=plan.next_encoded,
    )
