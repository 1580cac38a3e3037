"""Drafters that propose one token at a time, each step fed with the last one's token and state."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from hydraspec.speculators.draft_model import DraftModelSpeculator, NewestRow
from hydraspec.speculators.rows import single_rows, target_rows
from hydraspec.types import Batch, Draft, RequestState, TargetStep, Verdict


class AutoRegressiveSpeculator(DraftModelSpeculator):
    """One prefill pass over the step's rows, then K-1 decode steps at advancing positions.

    Draft row t holds the token at t+1 and the target's state at t; its KV stands in slot t. After a
    step the draft's cache therefore covers exactly the target's computed tokens.
    """

    owns_kv_cache: ClassVar[bool] = True

    def propose(
        self, target_step: TargetStep, verdict: Verdict, batch: Batch, state: RequestState
    ) -> Draft | None:
        nobody_samples = target_step.logits.shape[0] == 0
        if nobody_samples and not self.owns_kv_cache:
            return None
        row = self.newest_row(verdict, batch, state)
        hidden, feedback = self.first_step(row, target_step, batch, state)
        if nobody_samples:  # the draft's cache is filled, and nobody drafts
            return None
        drafts: list[Tensor] = []
        probs: list[Tensor] = []
        for index in range(self.num_speculative_tokens):
            if index:
                hidden, feedback = self.next_step(row, drafts[-1], feedback, batch, index)
            # The sampled token stands at p + 1, so draft `index` predicts position p + 2 + index.
            tokens, drawn_from = self.sample_draft(
                hidden, batch, state, row.seq_lens + (1 + index), index
            )
            drafts.append(tokens)
            if drawn_from is not None:
                probs.append(drawn_from)
        return Draft(tokens=torch.stack(drafts, 1), probs=torch.stack(probs, 1) if probs else None)

    def first_step(
        self, row: NewestRow, target_step: TargetStep, batch: Batch, state: RequestState
    ) -> tuple[Tensor, Tensor]:
        """States of the newest rows, for logits [B, H_draft] and for feedback [B, H]."""
        hidden, feedback = self.head.forward(
            target_rows(batch, state, self.draft_specs),
            self.head.combine_target_hidden(target_step),
            self.draft_caches,
            step=0,
        )
        return hidden.index_select(0, row.rows), feedback.index_select(0, row.rows)

    def next_step(
        self, row: NewestRow, tokens: Tensor, feedback: Tensor, batch: Batch, index: int
    ) -> tuple[Tensor, Tensor]:
        """The same for draft `index`, behind draft `index` - 1, `tokens` [B], at p + `index`."""
        rows = single_rows(batch, self.draft_specs, tokens, row.positions + index, index)
        states: tuple[Tensor, Tensor] = self.head.forward(
            rows, feedback, self.draft_caches, step=index
        )
        return states
