"""DSpark: a block drafter whose drafts are chosen one after another, each with a bias from the one
before it.
"""

from __future__ import annotations

from torch import Tensor

from hydraspec.speculators.block import BlockSpeculator
from hydraspec.speculators.parallel import together
from hydraspec.types import Batch, Draft, RequestState, TargetStep, Verdict


class DSparkSpeculator(BlockSpeculator):
    """The drafter of `method=dspark`. The pass is DFlash's; the Markov head then goes from draft to
    draft, which takes no further pass."""

    def propose(
        self, target_step: TargetStep, verdict: Verdict, batch: Batch, state: RequestState
    ) -> Draft | None:
        head, k = self.head, self.draft_length(batch)
        if head.markov is None:
            return super().propose(target_step, verdict, batch, state)
        states = self.block_states(target_step, verdict, batch, state)
        if states is None:
            return None
        newest = self.newest_row(verdict, batch, state)
        if not self.is_probabilistic or batch.all_greedy:
            return together(head.in_turn(states, newest.token_ids, k, head.greedy_choice))

        def draw(columns: Tensor, index: int) -> tuple[Tensor, Tensor]:
            logits = head.vocabulary.whole(columns)
            return self.draw_draft(logits, batch, state, newest.seq_lens, index)

        return together(head.in_turn(states, newest.token_ids, k, draw))
