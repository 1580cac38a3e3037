"""DFlash2: a block drafter whose drafts are chosen one after another among the best tokens of each
row of the block.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from hydraspec.speculators.block import BlockSpeculator
from hydraspec.speculators.parallel import together
from hydraspec.types import Batch, Draft, RequestState, TargetStep, Verdict


class DFlash2Speculator(BlockSpeculator):
    """The drafter of `method=dflash2`. The pass is DFlash's; the selector then goes from draft to
    draft, which takes no further pass. Sampled drafts come from the candidates alone, and carry
    these probabilities."""

    def propose(
        self, target_step: TargetStep, verdict: Verdict, batch: Batch, state: RequestState
    ) -> Draft | None:
        states = self.draft_states(target_step, verdict, batch, state)
        return None if states is None else together(self._chosen(states, verdict, batch, state))

    def _chosen(
        self, rows: Tensor, verdict: Verdict, batch: Batch, state: RequestState
    ) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Tokens [B] of each draft from rows [B, K, D], and the probabilities that they were drawn
        from; see `sample_draft`."""
        head, selector = self.head, self.head.selector
        assert selector is not None, "DFlash2 has a selector"
        newest, found = self.newest_row(verdict, batch, state), head.candidates(rows)
        is_drawn = self.draws(batch)
        token, probs = newest.token_ids, None
        for index in range(rows.shape[1]):
            if is_drawn:
                logits = head.candidate_logits(found, index, token)
                token, probs = self.draw_draft(logits, batch, state, newest.seq_lens, index)
            else:
                best = selector.scores(found, index, token).argmax(1, keepdim=True)
                token = found.tokens[:, index].gather(1, best).squeeze(1)
            yield token, probs
