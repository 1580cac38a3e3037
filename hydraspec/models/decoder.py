"""What every target model has in common: tables, layers, a final norm, and how they are filled."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from hydraspec_kernels.attention import GroupShape
from hydraspec_kernels.embedding import embed, embed_beside
from hydraspec_kernels.linear import linear
from torch import Tensor

from hydraspec.distributed.vocabulary import Vocabulary
from hydraspec.models.aux_states import AuxCollector
from hydraspec.models.checkpoint.reader import Checkpoint
from hydraspec.models.decoder_config import DecoderConfig
from hydraspec.models.kv_groups import (
    TARGET_GROUPS,
    GroupPass,
    RopeTable,
    group_layers,
    group_passes,
)
from hydraspec.models.layers import Norm, Place, prefixed
from hydraspec.models.needed_rows import reduced
from hydraspec.models.parts import Tensors
from hydraspec.models.weights import fill, memory_bytes
from hydraspec.types import KVGroupSpec, NeededRows, Rows


class Decoder:
    """The part of TargetModel that does not depend on the kind of layer.

    A layer has `kind`, `input_norm`, `attention`, `tensors()`, `finish()` and `forward(h, y,
    shared, cache, next_norm, *extra)`; see `DenseLayer`. A subclass implements `group_shape` and
    `rope_tables`.
    """

    def __init__(self, config: DecoderConfig, layers: Sequence[Any], place: Place) -> None:
        self.dtype, self.device = place.dtype, place.device
        self.layers, self.num_layers = layers, len(layers)
        self.vocabulary = Vocabulary(config.vocab_size)
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.max_position_embeddings = config.max_position_embeddings
        self.tied = config.tied
        self.eos_token_ids: tuple[int, ...] = ()
        self.suppress_token_ids: tuple[int, ...] = ()
        self.table = place.empty(self.vocab_size, self.hidden_size)
        self.head = self.table if self.tied else place.empty(self.vocab_size, self.hidden_size)
        self.norm = Norm(self.hidden_size, config.rms_norm_eps, place)
        self.next_norms = [*(layer.input_norm for layer in layers[1:]), self.norm]
        self.embed_scale: float | None = None  # of the embedding, as the first layer reads it
        self.block_size = 16  # until kv_groups says otherwise
        self.groups: dict[str, GroupShape] = {}  # by kind of layer; filled by kv_groups
        self.last_owner = self.num_layers - 1  # the last layer that writes KV
        self._suppressed: Tensor | None = None

    @abstractmethod
    def group_shape(self, kind: str, block_size: int) -> GroupShape:
        """The attention of the KV group of a kind of layers."""

    @abstractmethod
    def rope_tables(self, positions: Tensor) -> dict[str, RopeTable]:
        """A rotary table for each kind of layers in `groups`."""

    def tensors(self) -> Tensors:
        """Every weight by its checkpoint name without prefix."""
        found: Tensors = {"embed_tokens.weight": self.table, "norm.weight": self.norm.weight}
        if not self.tied:
            found["lm_head.weight"] = self.head
        for i, layer in enumerate(self.layers):
            found |= prefixed(f"layers.{i}.", layer.tensors())
        return found

    def load(
        self,
        checkpoint: Checkpoint,
        *,
        weights: str,
        seed: int,
        canonical: Callable[[str], str | None],
    ) -> None:
        """Fill the weights. Raises CheckpointError."""
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
        for layer in self.layers:
            layer.finish()
        if self.suppress_token_ids:
            self._suppressed = torch.tensor(self.suppress_token_ids, device=self.device)

    def ignores(self, name: str) -> bool:
        """Tensors that released checkpoints may hold without our needing them."""
        return name == "lm_head.weight" and self.tied

    def kv_source(self, layer: int) -> int:
        """The layer whose cache `layer` reads: itself, unless it shares."""
        return layer

    def kv_groups(self, block_size: int) -> list[KVGroupSpec]:
        """See TargetModel.kv_groups: sliding layers first, then full ones."""
        self.block_size = block_size
        owners = {i: each.kind for i, each in enumerate(self.layers) if self.kv_source(i) == i}
        # A new dict: another engine's shallow copy of this target keeps its own.
        self.groups, specs = group_layers(
            owners, TARGET_GROUPS, lambda kind: self.group_shape(kind, block_size)
        )
        return specs

    def forward(
        self,
        batch: Rows,
        kv_caches: list[Tensor | None],
        aux_layer_ids: Sequence[int] = (),
        needed: NeededRows | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """See TargetModel.forward. All rows write their keys and values; after the last layer that
        writes any, only needed rows are computed.
        """
        aux = AuxCollector(aux_layer_ids, self.num_layers)
        h = self.embed(batch.input_ids)
        aux.see(0, h)
        inputs = self.layer_inputs(batch.input_ids, h)
        y = self.layers[0].input_norm.forward(h)
        passes = self._passes(batch)
        last = self.last_owner
        if needed is None or any(i > last for i in aux_layer_ids):
            everything = range(self.num_layers)
            return self._run(everything, h, y, inputs, passes, kv_caches, aux)[1], aux.states()
        h, y = self._run(range(last), h, y, inputs, passes, kv_caches, aux)
        layer = self.layers[last]
        layer.attention.write_kv(y, passes[layer.kind], self._cache(kv_caches, last))
        hidden = torch.zeros_like(h)
        if needed.segments:
            h, y = h.index_select(0, needed.rows), y.index_select(0, needed.rows)
            if inputs is not None:
                inputs = inputs.index_select(0, needed.rows)
            passes = self._passes(reduced(batch, needed))
            rest = range(last, self.num_layers)
            y = self._run(rest, h, y, inputs, passes, kv_caches, aux)[1]
            hidden.index_copy_(0, needed.rows, y)
        return hidden, aux.states()

    def layer_inputs(self, token_ids: Tensor, embedded: Tensor) -> Tensor | None:
        """What layers read of a row beside the stream, if anything: [T, num_layers, width]."""
        return None

    def extra_inputs(self, inputs: Tensor | None, layer: int) -> tuple[Tensor, ...]:
        """Extra positional inputs of a layer, from `layer_inputs`."""
        return () if inputs is None else (inputs[:, layer],)

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
        """Some layers: the stream h [T, D] before them and its norm y -> the same after them."""
        for i in layers:
            layer, extra = self.layers[i], self.extra_inputs(inputs, i)
            cache = self._cache(kv_caches, i)
            h, y = layer.forward(h, y, passes[layer.kind], cache, self.next_norms[i], *extra)
            aux.see(i + 1, h)
        return h, y

    def _passes(self, rows: Rows) -> dict[str, GroupPass]:
        return group_passes(self.groups, rows, self.rope_tables(rows.positions), self.dtype)

    def _cache(self, kv_caches: list[Tensor | None], layer: int) -> Tensor:
        source = self.kv_source(layer)
        cache = kv_caches[source]
        assert cache is not None, f"layer {layer} reads layer {source}, which has no cache"
        return cache

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
        """`embed` of token_ids [B], and beside each its row of hidden [B, H], or of hidden [T, H]
        at rows [B] -> [B, D + H].
        """
        return embed_beside(token_ids, self.table, self.embed_scale, hidden, rows)

    def memory_bytes(self) -> int:
        """Bytes of weights held; a tied head counts once."""
        return memory_bytes(self.tensors())
