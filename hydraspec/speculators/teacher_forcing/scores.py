"""The ranks and probabilities of tokens in a drafter's logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hydraspec.speculators.teacher_forcing.texts import Texts
from hydraspec.speculators.teacher_forcing.trial import Trial, draft_states


@dataclass(slots=True, frozen=True)
class TokenScores:
    """Rank and probability of one token per row in that row's logits. A token that the drafter
    cannot propose has the rank after all others and probability 0."""

    ranks: Tensor  # [n] int64 from 1
    probs: Tensor  # [n] float32, of the distribution at temperature 1


@dataclass(slots=True, frozen=True)
class DraftVocabulary:
    """Places of the target's tokens in a draft head's logits."""

    draft_ids: Tensor | None  # [V] the draft id of each target id, or -1; None: they are the same

    @classmethod
    def of(cls, head: Any, vocab_size: int) -> DraftVocabulary:
        """Places for a draft head and a target of `vocab_size` tokens."""
        ids = getattr(head, "vocab_map", None)
        if ids is None:
            return cls(None)
        found = torch.full((vocab_size,), -1, dtype=torch.int64, device=ids.device)
        found[ids] = torch.arange(ids.shape[0], device=ids.device)
        return cls(found)

    def places_of(self, ids: Tensor) -> Tensor:
        """Columns of the draft logits for target ids of any shape; -1 for ids that have none."""
        return ids if self.draft_ids is None else self.draft_ids[ids]

    def logits_of(self, logits: Tensor, ids: Tensor) -> Tensor:
        """Logits [n, V_draft] of target ids [n, m]; minus infinity outside the draft vocabulary."""
        places = self.places_of(ids)
        return logits.gather(1, places.clamp(min=0)).masked_fill(places < 0, -torch.inf)

    def scores(self, logits: Tensor, ids: Tensor) -> TokenScores:
        """Ranks and probabilities of target ids [n] in float32 logits [n, V_draft]."""
        own = self.logits_of(logits, ids[:, None])
        probs = (own - logits.logsumexp(-1, keepdim=True)).exp()[:, 0]
        return TokenScores(ranks=(logits > own).sum(-1) + 1, probs=probs)


@dataclass(slots=True, frozen=True)
class ChainScores:
    """The drafts of N chains of K, teacher-forced, and the target's tokens in their logits."""

    draft_tokens: Tensor  # [N, K] int64: the best draft of each step
    draft_probs: Tensor  # [N, K] float32
    ranks: Tensor  # [N, K] int64, of the target's token
    probs: Tensor  # [N, K] float32, of the target's token


def chain_scores(trial: Trial, texts: Texts, k: int) -> ChainScores:
    """Scores of chains of `k` drafts from every place of the texts."""
    truth = texts.chains.truth
    vocabulary = DraftVocabulary.of(trial.head, texts.vocab_size)
    found = ChainScores(
        draft_tokens=torch.zeros_like(truth),
        draft_probs=torch.zeros_like(truth, dtype=torch.float32),
        ranks=torch.zeros_like(truth),
        probs=torch.zeros_like(truth, dtype=torch.float32),
    )
    for part in draft_states(trial, texts, k):
        at = part.chains, part.step
        tokens = part.tokens(trial.head)
        logits = part.logits(trial.head).float()
        theirs = vocabulary.scores(logits, truth[at])
        found.draft_tokens[at] = tokens
        found.draft_probs[at] = vocabulary.scores(logits, tokens).probs
        found.ranks[at], found.probs[at] = theirs.ranks, theirs.probs
    return found
