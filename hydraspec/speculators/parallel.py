"""Drafters that propose all K tokens in one pass."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from hydraspec_kernels.step_inputs import GroupTables, ParallelLayout, parallel_rows
from torch import Tensor

from hydraspec.speculators.autoregressive import fill_rows
from hydraspec.speculators.draft_model import DraftModelSpeculator
from hydraspec.types import Batch, Draft, RequestState, Rows, RowSegment, TargetStep, Verdict


class ParallelSpeculator(DraftModelSpeculator):
    """Drafts by a single pass, whose drafts do not see each other."""

    owns_kv_cache: ClassVar[bool] = True

    @abstractmethod
    def draft_states(
        self, target_step: TargetStep, verdict: Verdict, batch: Batch, state: RequestState
    ) -> Tensor | None:
        """Runs the pass, which keeps the drafter's cache current in every step. Returns the states
        [B, K, H] that the drafts come from; None where no request needs drafts."""

    def propose(
        self, target_step: TargetStep, verdict: Verdict, batch: Batch, state: RequestState
    ) -> Draft | None:
        states = self.draft_states(target_step, verdict, batch, state)
        if states is None:
            return None
        seq_lens = state.num_computed.index_select(0, batch.slots)
        return self.sample_drafts(states, batch, state, seq_lens)

    def sample_drafts(
        self, states: Tensor, batch: Batch, state: RequestState, seq_lens: Tensor
    ) -> Draft:
        """Drafts of states [B, K, D]; see `sample_draft`. All logits come from one product: each
        reads the whole head, which for a large vocabulary takes as long as layers do."""
        rows, shape = states.flatten(0, 1), states.shape[:2]
        if not self.draws(batch):
            return Draft(tokens=self.head.greedy_tokens(rows).view(shape))
        logits = self.head.compute_logits(rows).unflatten(0, shape)
        return together(
            self.draw_draft(each, batch, state, seq_lens, index)
            for index, each in enumerate(logits.unbind(1))
        )

    def needs_drafts(self, target_step: TargetStep, batch: Batch) -> bool:
        """Returns whether any request needs drafts after this step."""
        return self.draft_length(batch) > 0 and target_step.logits.shape[0] > 0


def together(drafts: Iterable[tuple[Tensor, Tensor | None]]) -> Draft:
    """Drafts of positions in order, tokens [B] and probabilities [B, V_draft] or None, as one."""
    tokens, probs = zip(*drafts, strict=True)
    drawn_from = [each for each in probs if each is not None]
    return Draft(
        tokens=torch.stack(tokens, 1), probs=torch.stack(drawn_from, 1) if drawn_from else None
    )


@dataclass(slots=True, frozen=True, kw_only=True)
class MaskRow:
    """The token and the hidden state that every mask row reads."""

    token_id: int
    hidden: Tensor  # [H]


class MaskRowSpeculator(ParallelSpeculator):
    """Drafts by a pass over the step's rows and K-1 mask rows a request; each of the last K
    yields a draft. With K=0 it is a pass over the step's rows alone.

    A mask row writes KV to the cache row of its position; the next step's rows cover these
    positions again before any of them is seen.
    """

    @abstractmethod
    def mask_row(self) -> MaskRow:
        """The inputs of mask rows."""

    def draft_states(
        self, target_step: TargetStep, verdict: Verdict, batch: Batch, state: RequestState
    ) -> Tensor | None:
        rows, laid = self.lay_out(verdict, batch, state)
        hidden = self.head.combine_target_hidden(target_step).index_select(0, laid.source)
        hidden = torch.where(laid.is_valid.unsqueeze(1), hidden, self.mask_row().hidden)
        states, _ = self.head.forward(rows, hidden, self.draft_caches, step=0)
        if not self.needs_drafts(target_step, batch):
            return None
        # [B, K]: the newest row, then the masks. They predict positions p + 2, p + 3, ...
        k = self.draft_length(batch)
        places = laid.newest.unsqueeze(1) + torch.arange(k, device=laid.newest.device)
        found: Tensor = states.index_select(0, places.view(-1))
        return found.view(*places.shape, -1)

    def fill(self, target_step: TargetStep, batch: Batch, state: RequestState) -> None:
        fill_rows(self, target_step, batch, state)

    def lay_out(
        self, verdict: Verdict, batch: Batch, state: RequestState
    ) -> tuple[Rows, ParallelLayout]:
        """The rows of the pass, T' = T + B * (K - 1), from host-known counts and the verdict on
        the device. Only the device knows which of a request's rows are masks.
        """
        more = max(0, self.draft_length(batch) - 1)
        tables = batch.block_tables[len(batch.block_tables) - len(self.draft_specs) :]
        laid = parallel_rows(
            state.token_ids,
            batch,
            verdict.num_rejected,
            GroupTables(tables, [spec.block_size for spec in self.draft_specs]),
            num_masks=more,
            mask_token_id=self.mask_row().token_id,
            num_rows=batch.positions.shape[0],
            padded=batch.has_padding,
        )
        device = batch.slots.device
        rows = Rows(
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
            input_ids=laid.input_ids,
            positions=laid.positions,
            seq_lens=laid.seq_lens,
            slot_mapping=laid.slot_mapping,
            block_tables=tables,
            query_start_loc=batch.query_start_loc
            + torch.arange(batch.num_requests + 1, device=device) * more,
            has_padding=batch.has_padding,
        )
        if batch.next_encoded is not None:  # a request's own rows come before its mask rows
            moved = batch.row_request.index_select(0, batch.next_encoded.rows) * more
            moved += batch.next_encoded.rows
            rows.encoded = replace(batch.next_encoded, rows=moved)
        return rows, laid
