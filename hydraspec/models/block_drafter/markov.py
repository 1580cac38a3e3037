"""DSpark's further heads: a Markov head that lets a draft know the one before it, and the estimate
of a draft's acceptance.

Every rank holds them whole, but for the Markov head's output, which is divided as the logits are:
drafting then exchanges no more than without them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hydraspec.models.linear import Linear, Table
from hydraspec.models.parts import Tensors, Weights
from hydraspec.models.place import Place
from hydraspec.parallel.vocabulary import Vocabulary


class MarkovHead(Weights):
    """A bias of the logits from the token before, of rank r.

    vanilla: W2 e with e = W1[token]. gated: W2 (g * e) with g = sigmoid(gate_proj [h; e]). rnn: a
    state s of the block, (g, c, o) = joint_proj [s; e; h], s = sigmoid(g) s + (1 - sigmoid(g))
    tanh(c), and the bias is W2 tanh(o).
    """

    names: Mapping[str, str] = {"gate": "", "joint": ""}

    def __init__(
        self,
        kind: str,
        rank: int,
        hidden_size: int,
        tokens: int,
        vocabulary: Vocabulary,
        place: Place,
    ) -> None:
        """tokens: number of ids that may stand before a draft, the target's vocabulary;
        vocabulary: that of the logits, as ranks divide it."""
        self.kind, self.rank = kind, rank
        self.w1 = place.empty(tokens, rank)
        self.w2 = Table(place, vocabulary, rank)
        self.gate: Linear | None = None
        self.joint: Linear | None = None
        if kind == "gated":
            self.gate = Linear(place, hidden_size + rank, {"gate_proj": rank}, bias=True)
        elif kind == "rnn":
            self.joint = Linear(place, 2 * rank + hidden_size, {"joint_proj": 3 * rank}, bias=True)

    def tensors(self) -> Tensors:
        """Weights by their names in the checkpoint."""
        tables = {"markov_w1.weight": self.w1, "markov_w2.weight": self.w2.tensors()["weight"]}
        return super().tensors() | tables

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings [B, r] of the tokens [B] before drafts."""
        return self.w1.index_select(0, tokens)

    def step(self, e: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """This rank's columns of the bias, from embeddings e [B, r] and rows hidden [B, D]; and the
        state [B, r] for the next draft, None at the first one and where the kind has none."""
        if self.gate is not None:
            gate = torch.sigmoid(self.gate.forward(torch.cat((hidden, e), -1)))
            return self.w2.logits(gate * e), None
        if self.joint is None:
            return self.w2.logits(e), None
        before = torch.zeros_like(e) if state is None else state
        gate, candidate, out = self.joint.forward(torch.cat((before, e, hidden), -1)).chunk(3, -1)
        gate = torch.sigmoid(gate)
        after = gate * before + (1 - gate) * torch.tanh(candidate)
        return self.w2.logits(torch.tanh(out)), after


class ConfidenceHead(Weights):
    """The probability that a draft is accepted, given that those before it are."""

    names: Mapping[str, str] = {"proj": ""}

    def __init__(self, inputs: int, place: Place) -> None:
        self.proj = Linear(place, inputs, {"proj": 1}, bias=True)

    def forward(self, features: Tensor) -> Tensor:
        """Probabilities [B], in float32 or wider, from rows [B, inputs]: a row's state, and where
        the head reads it the Markov embedding of the token before."""
        odds = self.proj.forward(features).squeeze(-1)
        return torch.sigmoid(odds.to(torch.promote_types(odds.dtype, torch.float32)))
