"""Drafters that propose all K tokens in one pass, through mask rows behind the newest row."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from hydraspec_kernels.slot_mapping import slot_mapping
from torch import Tensor

from hydraspec.speculators.draft_model import DraftModelSpeculator
from hydraspec.types import Batch, Draft, RequestState, Rows, RowSegment, TargetStep, Verdict


@dataclass(slots=True, frozen=True, kw_only=True)
class MaskRow:
    """What every mask row reads."""

    token_id: int
    hidden: Tensor  # [H]


@dataclass(slots=True, kw_only=True)
class ParallelRows:
    """The rows of the one pass: K-1 more per request than the target's step had.

    A request with R rows in the step, the first at position s and r of them rejected, has R + K - 1
    rows at positions s, s + 1, ...: its R - r valid rows, K - 1 mask rows, then r rows of padding,
    which no row that counts can see. How many rows a request has is known on the host; which of
    them are masks only on the device.
    """

    rows: Rows  # T' = T + B * (K - 1)
    source: Tensor  # [T'] the step's row a row takes its hidden state from; any for masks
    is_valid: Tensor  # [T'] bool: one of the target's rows that was not rejected
    newest: Tensor  # [B] the row of each request that yields its first draft


class ParallelSpeculator(DraftModelSpeculator):
    """One pass over the step's rows and K-1 mask rows a request; each of the last K yields a draft.

    The drafts do not see each other. A mask row writes KV in the slot of its position; the next
    step's rows cover those positions again before any of them is seen.
    """

    owns_kv_cache: ClassVar[bool] = True

    @abstractmethod
    def mask_row(self) -> MaskRow:
        """What a mask row reads."""

    def propose(
        self, target_step: TargetStep, verdict: Verdict, batch: Batch, state: RequestState
    ) -> Draft | None:
        laid = self.lay_out(verdict, batch, state)
        hidden = self.head.combine_target_hidden(target_step).index_select(0, laid.source)
        hidden = torch.where(laid.is_valid.unsqueeze(1), hidden, self.mask_row().hidden)
        states, _ = self.head.forward(laid.rows, hidden, self.draft_caches, step=0)
        if target_step.logits.shape[0] == 0:  # nobody samples in this step, so nobody drafts
            return None
        k = self.num_speculative_tokens
        # [B, K]: the newest row, then the masks. They predict positions p + 2, p + 3, ...
        places = laid.newest.unsqueeze(1) + torch.arange(k, device=laid.newest.device)
        seq_lens = state.num_computed.index_select(0, batch.slots)
        drafts, probs = [], []
        for index, column in enumerate(places.unbind(1)):
            tokens, drawn_from = self.sample_draft(
                states.index_select(0, column), batch, state, seq_lens + (1 + index), index
            )
            drafts.append(tokens)
            if drawn_from is not None:
                probs.append(drawn_from)
        return Draft(tokens=torch.stack(drafts, 1), probs=torch.stack(probs, 1) if probs else None)

    def lay_out(self, verdict: Verdict, batch: Batch, state: RequestState) -> ParallelRows:
        """The rows of the pass, from host-known counts and the verdict on the device."""
        more = self.num_speculative_tokens - 1
        b, device = batch.num_requests, batch.slots.device
        num_rows = batch.query_start_loc[1:] - batch.query_start_loc[:-1]
        starts = batch.query_start_loc[:-1] + torch.arange(b, device=device) * more
        total = batch.positions.shape[0] + b * more
        request = torch.repeat_interleave(
            torch.arange(b, device=device), num_rows + more, output_size=total
        )
        offset = torch.arange(total, device=device) - starts.index_select(0, request)
        num_valid = num_rows - verdict.num_rejected
        is_valid = offset < num_valid.index_select(0, request)
        positions = (batch.seq_lens - num_rows).index_select(0, request) + offset
        inside = torch.minimum(offset, (num_rows - 1).index_select(0, request))
        return ParallelRows(
            rows=self._rows(batch, state, request, positions, is_valid),
            source=batch.query_start_loc.index_select(0, request) + inside,
            is_valid=is_valid,
            newest=starts + num_valid - 1,
        )

    def _rows(
        self,
        batch: Batch,
        state: RequestState,
        request: Tensor,
        positions: Tensor,
        is_valid: Tensor,
    ) -> Rows:
        more = self.num_speculative_tokens - 1
        columns = state.token_ids.shape[1]
        place = (batch.slots * columns + 1).index_select(0, request).add_(positions)
        behind = state.token_ids.view(-1).index_select(0, place)
        tables = batch.block_tables[len(batch.block_tables) - len(self.draft_specs) :]
        return Rows(
            segments=tuple(
                RowSegment(
                    first_row=segment.first_row + segment.first_request * more,
                    first_request=segment.first_request,
                    num_requests=segment.num_requests,
                    rows_per_request=segment.rows_per_request + more,
                    max_seq_len=segment.max_seq_len + more,
                )
                for segment in batch.segments
            ),
            input_ids=torch.where(is_valid, behind, self.mask_row().token_id).clamp_min_(0),
            positions=positions,
            seq_lens=batch.seq_lens + more,
            slot_mapping=[
                slot_mapping(table, request, positions, spec.block_size)
                for table, spec in zip(tables, self.draft_specs, strict=True)
            ],
            block_tables=tables,
            query_start_loc=batch.query_start_loc
            + torch.arange(batch.num_requests + 1, device=positions.device) * more,
            has_padding=batch.has_padding,
        )
