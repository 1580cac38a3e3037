"""What every target model has in common: tables, layers, a final norm, and how they are filled."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from hydraspec_kernels.embedding import embed, embed_beside
from hydraspec_kernels.linear import linear
from torch import Tensor

from hydraspec.models.attention import GroupPass
from hydraspec.models.aux_states import AuxCollector
from hydraspec.models.checkpoint.reader import Checkpoint
from hydraspec.models.layers import Norm, Place, Tensors
from hydraspec.models.needed_rows import reduced
from hydraspec.models.weights import fill, memory_bytes
from hydraspec.types import NeededRows, Rows


class Decoder:
    """The part of TargetModel that does not depend on the kind of layer.

    A subclass sets `layers` (each with `tensors()`, and the `kind` of its pass), and implements
    `kv_groups` and `_passes`.
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
        self.num_owners = num_layers  # layers up to the last one that writes KV
        self.stream_scales = [1.0] * num_layers  # c after each layer: the stream is held as h / c
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

    def forward(
        self,
        batch: Rows,
        kv_caches: list[Tensor | None],
        aux_layer_ids: Sequence[int] = (),
        needed: NeededRows | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """See TargetModel.forward. All rows write their keys and values; only needed ones run what
        follows the last of them.
        """
        aux = AuxCollector(aux_layer_ids, self.num_layers, in_place=not self.folded)
        h = self.embed(batch.input_ids)
        aux.see(0, h)
        inputs = self.layer_inputs(batch.input_ids, h)
        last = self.num_owners - 1
        if any(i > last for i in aux_layer_ids):
            needed = None
        y = h if self.folded else self.layers[0].input_norm.scaled(h)
        passes = self._passes(batch)
        whole = range(self.num_layers if needed is None else last)
        h, y = self._run(whole, h, y, inputs, passes, kv_caches, aux)
        if needed is None:
            return self.norm.scaled(h) if self.folded else y, aux.states()
        layer = self.layers[last]
        x = layer.input_norm.normed(h) if self.folded else y
        layer.attention.write(x, passes[layer.kind], self._cache(kv_caches, last))
        hidden = torch.zeros_like(h)
        if needed.segments:
            h, y = h.index_select(0, needed.rows), y.index_select(0, needed.rows)
            if inputs is not None:
                inputs = inputs.index_select(0, needed.rows)
            passes = self._passes(reduced(batch, needed))
            rest = range(last, self.num_layers)
            h, y = self._run(rest, h, y, inputs, passes, kv_caches, aux)
            hidden.index_copy_(0, needed.rows, self.norm.scaled(h) if self.folded else y)
        return hidden, aux.states()

    def layer_inputs(self, token_ids: Tensor, embedded: Tensor) -> Tensor | None:
        """What layers read of a row beside the stream, if anything: [T, num_layers, width]."""
        return None

    def own_inputs(self, inputs: Tensor | None, layer: int) -> tuple[Tensor | None, ...]:
        """What of these this layer is called with, behind its cache."""
        return ()

    def _run(
        self,
        layers: range,
        h: Tensor,
        y: Tensor,
        inputs: Tensor | None,
        passes: dict[str, GroupPass],
        kv_caches: list[Tensor | None],
        aux: AuxCollector,
    ) -> tuple[Tensor, Tensor]:
        """Some layers: the stream h [T, D] in front of them and its norm y -> the same behind them.
        A folded model has no use for y.
        """
        for i in layers:
            layer, cache = self.layers[i], self._cache(kv_caches, i)
            shared, own = passes[layer.kind], self.own_inputs(inputs, i)
            if self.folded:
                h = layer(h, shared, cache, *own)
            else:
                h, y = layer.advance(h, y, shared, cache, *own, self.norm_behind(i))
            aux.see(i + 1, h, self.stream_scales[i])
        return h, y

    def _cache(self, kv_caches: list[Tensor | None], layer: int) -> Tensor:
        source = self.kv_source(layer)
        cache = kv_caches[source]
        assert cache is not None, f"layer {layer} reads layer {source}, which has no cache"
        return cache

    def _passes(self, batch: Rows) -> dict[str, GroupPass]:
        """By kind, what layers share in a pass over these rows."""
        raise NotImplementedError

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
