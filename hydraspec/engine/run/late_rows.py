"""A drafter with a cache of its own does not run while no request wants drafts: the states that it
would have read are kept, and it runs over all of them once drafts are wanted (docs/adr/0052)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from hydraspec_kernels.step_inputs.reference import slot_mapping_reference
from torch import Tensor

from hydraspec.engine.run.inputs import LateRows, row_places
from hydraspec.speculators.draft_model import DraftModelSpeculator
from hydraspec.types import Batch, RequestState, RowSegment, TargetStep

MOST_LATE_ROWS = 16  # of a request


class LateStates:
    """The target's states of late rows, by slot, on a CPU."""

    def __init__(self, drafter: DraftModelSpeculator, state: RequestState) -> None:
        self._drafter, self._state = drafter, state
        self._kept: Tensor | None = None  # [S, MOST_LATE_ROWS, W]

    def hold_or_fill(self, late: LateRows | None, batch: Batch, target_step: TargetStep) -> bool:
        """Keep the states of this step's rows and return True, or let the drafter run over those
        that it lacks before this step's rows, if any, and return False."""
        if late is None:
            return False
        if late.rests:
            states = self._drafter.states_read(target_step)
            if self._kept is None:
                num_slots = self._state.num_computed.shape[0]
                self._kept = states.new_zeros(num_slots, MOST_LATE_ROWS, states.shape[1])
            self._kept[batch.slots, torch.from_numpy(late.counts)] = states
            return True
        assert self._kept is not None
        requests = np.flatnonzero(late.counts)
        counts = late.counts[requests]
        rows = self._rows(batch, torch.from_numpy(requests), counts)
        offset = torch.from_numpy(row_places(counts)[2])
        states = self._kept[rows.slots.index_select(0, rows.row_request), offset]
        self._drafter.fill_late(states, rows, self._state)
        return False

    def _rows(self, batch: Batch, requests: Tensor, counts: np.ndarray) -> Batch:
        """A batch of the late rows: the last `counts` ones of `requests` before this step's."""
        starts, row_request, row_offset = map(torch.from_numpy, row_places(counts))
        first = batch.positions.index_select(0, batch.query_start_loc.index_select(0, requests))
        positions = (first - torch.from_numpy(counts)).index_select(0, row_request) + row_offset
        specs = self._drafter.draft_specs
        of_drafter = batch.block_tables[len(batch.block_tables) - len(specs) :]
        tables = [table.index_select(0, requests) for table in of_drafter]
        longest = max(segment.max_seq_len for segment in batch.segments)
        return replace(
            batch,
            segments=tuple(
                RowSegment(start, index, 1, count, longest)
                for index, (start, count) in enumerate(
                    zip(starts[:-1].tolist(), counts.tolist(), strict=True)
                )
            ),
            slots=batch.slots.index_select(0, requests),
            row_request=row_request,
            input_ids=positions,  # unused: a drafter reads the following tokens, or none
            positions=positions,
            query_start_loc=starts,
            seq_lens=first,
            slot_mapping=[
                slot_mapping_reference(table, row_request, positions, spec.block_size)
                for table, spec in zip(tables, specs, strict=True)
            ],
            block_tables=tables,
            next_encoded=None,
        )
