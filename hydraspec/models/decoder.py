"""What every target model has in common: tables, layers, a final norm, and how they are filled."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from hydraspec_kernels.embedding import embed, embed_beside
from hydraspec_kernels.linear import linear
from torch import Tensor

from hydraspec.models.checkpoint import Checkpoint
from hydraspec.models.layers import Norm, Place, Tensors
from hydraspec.models.weights import fill, memory_bytes


class Decoder:
    """The part of TargetModel that does not depend on the kind of layer.

    A subclass sets `layers` (each with `tensors()`), and implements `kv_groups`, `forward` and
    `finish_layers`.
    """

    layers: Sequence[Any]

    def __init__(
        self,
        place: Place,
        *,
        vocab_size: int,
        hidden_size: int,
        num_layers: int,
        max_position_embeddings: int,
        rms_norm_eps: float,
        tied: bool,
    ) -> None:
        self.dtype, self.device, self.folded = place.dtype, place.device, place.folded
        self.vocab_size, self.hidden_size, self.num_layers = vocab_size, hidden_size, num_layers
        self.max_position_embeddings = max_position_embeddings
        self.tied = tied
        self.eos_token_ids: tuple[int, ...] = ()
        self.suppress_token_ids: tuple[int, ...] = ()
        self.table = place.empty(vocab_size, hidden_size)
        self.head = self.table if tied else place.empty(vocab_size, hidden_size)
        self.norm = Norm(hidden_size, rms_norm_eps, place)
        self.embed_scale: float | None = None  # of the embedding, as the first layer reads it
        self.block_size = 16  # until kv_groups says otherwise
        self._suppressed: Tensor | None = None

    def tensors(self) -> Tensors:
        """Every weight by its checkpoint name without prefix."""
        found = {"embed_tokens.weight": self.table, "norm.weight": self.norm.weight}
        if not self.tied:
            found["lm_head.weight"] = self.head
        for i, layer in enumerate(self.layers):
            found |= {f"layers.{i}.{name}": tensor for name, tensor in layer.tensors().items()}
        return found

    def load(
        self,
        checkpoint: Checkpoint,
        *,
        weights: str,
        seed: int,
        canonical: Callable[[str], str | None],
    ) -> None:
        """Fill the weights and fold what can be folded. Raises CheckpointError."""
        self.eos_token_ids = checkpoint.token_ids("eos_token_id", self.vocab_size)
        self.suppress_token_ids = checkpoint.token_ids("suppress_tokens", self.vocab_size)
        fill(
            self.tensors(),
            checkpoint,
            weights=weights,
            seed=seed,
            canonical=canonical,
            ignored=self.ignores,
        )
        self.finish_layers()
        if self.suppress_token_ids:
            self._suppressed = torch.tensor(self.suppress_token_ids, device=self.device)

    def finish_layers(self) -> None:
        """Fold norms into what follows, once the weights are filled."""
        for layer in self.layers:
            layer.finish()
        self.norm.fold_gain()

    def norm_behind(self, layer: int) -> Norm:
        """What reads the stream behind a layer: its successor's input norm, or the final norm."""
        if layer + 1 == self.num_layers:
            return self.norm
        norm: Norm = self.layers[layer + 1].input_norm
        return norm

    def ignores(self, name: str) -> bool:
        """Tensors that released checkpoints may hold without our needing them."""
        return name == "lm_head.weight" and self.tied

    def kv_source(self, layer: int) -> int:
        """The layer whose cache `layer` reads: itself, unless it shares."""
        return layer

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[N, D] -> [N, V], suppressed tokens at minus infinity."""
        return self.suppress(linear(hidden, self.head.t()))

    def suppress(self, logits: Tensor) -> Tensor:
        """Logits [N, V] with suppressed tokens at minus infinity, in place."""
        if self._suppressed is not None:
            logits.index_fill_(1, self._suppressed, -math.inf)
        return logits

    def embed(self, token_ids: Tensor) -> Tensor:
        """[...] -> [..., D], a new tensor, scaled as the first layer reads it."""
        return embed(token_ids, self.table, self.embed_scale)

    def embed_beside(self, token_ids: Tensor, hidden: Tensor, rows: Tensor | None) -> Tensor:
        """`embed` of token_ids [B], and behind each its row of hidden [B, H], or of hidden [T, H]
        at rows [B] -> [B, D + H].
        """
        return embed_beside(token_ids, self.table, self.embed_scale, hidden, rows)

    def memory_bytes(self) -> int:
        """Bytes of weights held; a tied head counts once."""
        return memory_bytes(self.tensors())
