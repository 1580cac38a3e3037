"""DFlash2's candidate selector: the best tokens of each row of a block, of which each draft is
chosen in view of the one before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from hydraspec.models.linear import Linear
from hydraspec.models.parts import Weights
from hydraspec.models.place import Place


@dataclass(slots=True, frozen=True)
class Candidates:
    """The tokens that each draft of a block may be: C for each of K drafts."""

    tokens: Tensor  # [B, K, C]
    logits: Tensor  # [B, K, C] in float32 or wider, whatever the token before
    successors: Tensor  # [B, K, C, r]
    hidden: Tensor  # [B, K, r]


class CandidateSelector(Weights):
    """Score of a candidate c after token p at a row h: logit(c) + <A[p] * (W h), B[c]>, of rank r.

    Every rank holds it whole.
    """

    names: Mapping[str, str] = {
        "predecessors": "predecessor_codebook",
        "successors": "successor_codebook",
        "projection": "",
    }

    def __init__(self, rank: int, most: int, hidden_size: int, tokens: int, place: Place) -> None:
        """most: candidates of a draft; tokens: size of the vocabulary."""
        self.most = most
        self.predecessors = place.empty(tokens, rank)
        self.successors = place.empty(tokens, rank)
        self.projection = Linear(place, hidden_size, {"hidden_projection": rank})

    def candidates(self, rows: Tensor, tokens: Tensor, logits: Tensor) -> Candidates:
        """The candidates tokens [B, K, C] with logits [B, K, C] of rows [B, K, D]."""
        hidden = self.projection.forward(rows.flatten(0, 1)).unflatten(0, rows.shape[:2])
        after = self.successors.index_select(0, tokens.flatten()).unflatten(0, tokens.shape)
        return Candidates(tokens, logits, after.to(logits.dtype), hidden)

    def scores(self, found: Candidates, index: int, before: Tensor) -> Tensor:
        """Scores [B, C] of the candidates of draft `index` after tokens `before` [B]."""
        latent = self.predecessors.index_select(0, before) * found.hidden[:, index]
        added = found.successors[:, index] @ latent.to(found.logits.dtype).unsqueeze(2)
        return found.logits[:, index] + added.squeeze(2)
