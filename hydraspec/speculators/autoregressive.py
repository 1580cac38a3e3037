"""Drafters that propose one token at a time, each step fed with the last one's token and hidden
state."""

from __future__ import annotations

import torch

from hydraspec.speculators.draft_model import DraftModelSpeculator
from hydraspec.types import Batch, Draft, RequestState, TargetStep, Verdict


class AutoRegressiveSpeculator(DraftModelSpeculator):
    """K draft steps per proposal, from the newest row of each request."""

    def propose(
        self, target_step: TargetStep, verdict: Verdict, batch: Batch, state: RequestState
    ) -> Draft:
        row = self.newest_row(target_step, verdict, batch, state)
        max_seq_len = max(segment.max_seq_len for segment in batch.segments)
        context = self.head.begin(
            row.positions, row.seq_lens, batch.block_tables, max_seq_len, self.kv_caches
        )
        tokens, feedback = row.token_ids, row.hidden
        drafts, probs = [], []
        for index in range(self.num_speculative_tokens):
            hidden, feedback = self.head.step(context, tokens, feedback)
            # The sampled token stands at p + 1, so draft `index` predicts position p + 2 + index.
            tokens, drawn_from = self.sample_draft(
                hidden, batch, state, row.seq_lens + (1 + index), index
            )
            drafts.append(tokens)
            if drawn_from is not None:
                probs.append(drawn_from)
        return Draft(tokens=torch.stack(drafts, 1), probs=torch.stack(probs, 1) if probs else None)
