"""DSpark: a block drafter whose drafts are chosen one after another, each with a bias from the one
before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from hydraspec_kernels.step_inputs import NewestRows
from torch import Tensor

from hydraspec.config.messages import refusal
from hydraspec.config.options import KEY, DSparkOptions
from hydraspec.config.schema import RunConfig, Verification
from hydraspec.models.base import TargetModel
from hydraspec.models.block_drafter.head import BlockHead, Choose
from hydraspec.speculators.block import BlockSpeculator
from hydraspec.speculators.parallel import together
from hydraspec.types import Batch, Draft, RequestState, TargetStep, Verdict


class DSparkSpeculator(BlockSpeculator):
    """The drafter of `method=dspark`. The pass is DFlash's; the Markov head then goes from draft to
    draft, which takes no further pass. The confidence head's estimates multiply to each draft's
    survival; drafts from the first one below `min_survival` on are left out."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        least = (config.method.options or DSparkOptions()).min_survival
        # As float32, so that host and device compare alike.
        self._least = None if least is None else float(np.float32(least))

    def load_draft_model(self, target: TargetModel, checkpoint: str) -> BlockHead:
        head = super().load_draft_model(target, checkpoint)
        if self._least is not None and head.confidence is None:
            raise refusal(
                f"{KEY}.min_survival",
                (self.config.method.options or DSparkOptions()).min_survival,
                f"needs a confidence head, which drafter {checkpoint!r} does not have",
                allowed="null with this drafter",
                remedy="leave the key out, or choose another drafter",
            )
        return head

    @property
    def estimates_survival(self) -> bool:
        """Returns whether the head estimates acceptance, and acceptance is the verifier's own."""
        is_synthetic = self.config.method.verification is Verification.synthetic
        return self.head.confidence is not None and not is_synthetic

    @property
    def min_survival(self) -> float | None:
        return self._least

    def propose(
        self, target_step: TargetStep, verdict: Verdict, batch: Batch, state: RequestState
    ) -> Draft | None:
        states = self.block_states(target_step, verdict, batch, state)
        if states is None:
            return None
        newest = self.newest_row(verdict, batch, state)
        rows = states[:, -self.draft_length(batch) :]
        if self.head.markov is None:
            draft = self.sample_drafts(rows, batch, state, newest.seq_lens)
        else:
            draft = together(self._chosen(states, newest, batch, state))
        if not self.estimates_survival:
            return draft
        survivals = self.head.survivals(rows, newest.token_ids, draft.tokens)
        return trimmed(draft, survivals, self._least)

    def _chosen(
        self, states: Tensor, newest: NewestRows, batch: Batch, state: RequestState
    ) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Tokens [B] of each draft in view of the one before, and the probabilities that they were
        drawn from; see `sample_draft`."""
        head, k = self.head, self.draft_length(batch)

        def draw(columns: Tensor, index: int) -> tuple[Tensor, Tensor]:
            logits = head.vocabulary.whole(columns)
            return self.draw_draft(logits, batch, state, newest.seq_lens, index)

        choose: Choose = draw if self.draws(batch) else head.greedy_choice
        yield from head.in_turn(states, newest.token_ids, k, choose)


def trimmed(drafts: Draft, survivals: Tensor, least: float | None) -> Draft:
    """Drafts with their estimates [B, K], which never rise along a block, and -1 in place of tokens
    whose estimate is below `least`. An estimate knows only the tokens before its draft, so that
    leaving drafts out changes no distribution."""
    if least is None:
        return replace(drafts, survivals=survivals)
    tokens = drafts.tokens.masked_fill(survivals < least, -1)
    return replace(drafts, tokens=tokens, survivals=survivals)
