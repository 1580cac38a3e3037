"""The base of every target model: tables, layers, a final norm, and how they are filled."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Self

import torch
from hydraspec_kernels.attention import GroupShape
from hydraspec_kernels.quantised import E4M3
from torch import Tensor

from hydraspec.models.aux_states import AuxCollector
from hydraspec.models.base import ImageEncoder
from hydraspec.models.checkpoint.reader import Checkpoint
from hydraspec.models.kv_groups import (
    TARGET_GROUPS,
    BlockSize,
    GroupPass,
    group_layers,
    group_passes,
)
from hydraspec.models.layers import Norm
from hydraspec.models.linear import Table
from hydraspec.models.needed_rows import reduced
from hydraspec.models.parts import DecoderConfig, Tensors, Weights, held, prefixed
from hydraspec.models.place import Place
from hydraspec.models.stages import WHOLE, LayerFacts, Stage, layers_of_stage
from hydraspec.models.weights import EMPTY, fill, outline
from hydraspec.parallel.group import SOLO, TensorGroup
from hydraspec.parallel.vocabulary import Vocabulary
from hydraspec.types import IntermediateTensors, KVGroupSpec, NeededRows, Rows


class Decoder(Weights):
    """The part of TargetModel that does not depend on the kind of layer.

    A layer has `kind`, `input_norm`, `attention`, `tensors()`, `finish()` and `forward(h, y,
    shared, cache, next_norm, *extra)`. Its class has `group_shape`, the attention of a KV group,
    and `rope_tables`, a rotary table for each kind of layers; see `DenseLayer`.

    A pipeline stage holds some of the layers. Layers are numbered globally everywhere; weights of
    other stages have names and shapes here, but no memory.
    """

    names: Mapping[str, str] = {"table": "embed_tokens.", "norm": "norm.", "layers": "layers."}
    layer_type: ClassVar[Any]  # called with (config, index, place)

    @staticmethod
    @abstractmethod
    def read_config(config: Mapping[str, Any], where: str) -> Any:
        """The shape in a raw config.json; `where` names its folder. Raises CheckpointError."""

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        *,
        weights: str,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
        group: TensorGroup = SOLO,
        stage: Stage = WHOLE,
    ) -> Self:
        """The target of a checkpoint: its config is read and checked, then its weights are filled
        ("checkpoint", "random", or "empty" to leave them). Raises CheckpointError.
        """
        where = str(checkpoint.folder)
        config = cls.read_config(checkpoint.config, where)
        config.divided.check(group.size, where)
        with torch.no_grad():
            model = cls(config, Place(dtype, device, group, stage, checkpoint.is_quantised))
            if weights != EMPTY:
                model.fill(checkpoint, weights=weights, seed=seed)
            elif checkpoint.is_quantised:
                outline(model, checkpoint)
        return model

    def __init__(self, config: Any, place: Place) -> None:
        """Builds all layers with empty weights. Raises ConfigurationError: see layers_of_stage."""
        layers = [partial(self.layer_type, config, i) for i in range(config.num_layers)]
        self.config, self.theta = config, self.frequencies(config, place)
        self.place, self.dtype, self.device = place, place.dtype, place.device
        self.stage = place.stage
        self.num_layers = len(layers)
        self.held = range(self.num_layers)
        if self.stage.count > 1:
            self.held = layers_of_stage(self.stage, self._facts(config, layers, place))
        self.layers = [build(place.if_held(i in self.held)) for i, build in enumerate(layers)]
        self.vocabulary = vocabulary = Vocabulary(config.vocab_size, place.group)
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.max_position_embeddings = config.max_position_embeddings
        self.tied = config.tied
        self.eos_token_ids: tuple[int, ...] = ()
        self.suppress_token_ids: tuple[int, ...] = ()
        at_end = place.if_held(self.stage.is_last)
        self.table = Table(place.if_held(self.embeds), vocabulary, self.hidden_size)
        self.head = self.table if self.tied else Table(at_end, vocabulary, self.hidden_size)
        self.norm = Norm(self.hidden_size, config.rms_norm_eps, at_end)
        self.next_norms = [*(layer.input_norm for layer in self.layers[1:]), self.norm]
        if not self.stage.is_last:
            self.next_norms[self.held[-1]] = None  # the next stage reads the stream
        self.embed_scale: float | None = None  # of the embedding, as the first layer reads it
        self.softcap: float | None = None  # of the logits
        self.block_size: BlockSize = 16  # until kv_groups says otherwise
        self.groups: dict[str, GroupShape] = {}  # by kind of layer; filled by kv_groups
        self.last_owner = self.num_layers - 1  # the last layer that writes KV
        self.kv_scales: dict[int, Tensor] = {}  # [2, Hkv] by layer, of an e4m3 cache
        self._suppressed: Tensor | None = None
        self.encoder: ImageEncoder | None = None  # a family that reads images sets both
        self.images_see_ahead = False

    def _facts(
        self, config: DecoderConfig, layers: Sequence[Callable[[Place], Any]], place: Place
    ) -> LayerFacts:
        """Sizes, KV sources and kinds of all layers, from layers without memory, so that they are
        equal on all ranks.
        """
        nowhere = replace(place, group=SOLO, stage=WHOLE).if_held(False)
        built = [build(nowhere) for build in layers]
        return LayerFacts(
            num_bytes=[
                sum(held(weight).nbytes for weight in layer.tensors().values()) for layer in built
            ],
            head_bytes=config.vocab_size * config.hidden_size * self.dtype.itemsize,
            kv_sources=[self.kv_source(i) for i in range(len(layers))],
            kinds=[layer.kind for layer in built],
        )

    @property
    def embeds(self) -> bool:
        """Returns whether this stage has the embedding table."""
        return self.stage.is_first or (self.stage.is_last and (self.tied or self.stage.drafts))

    def frequencies(self, config: Any, place: Place) -> Any:
        """Rotary frequencies, as the layers' `rope_tables` reads them."""
        return place.frequencies(config.rope.theta)

    def tensors(self) -> Tensors:
        """Every weight by its checkpoint name without prefix."""
        head = {} if self.tied else prefixed("lm_head.", self.head.tensors())
        return super().tensors() | head

    def fill(self, checkpoint: Checkpoint, *, weights: str, seed: int) -> None:
        """Fills the weights from files, or at random (weights="random"). Raises CheckpointError."""
        self.eos_token_ids = checkpoint.token_ids("eos_token_id", self.vocab_size)
        self.suppress_token_ids = checkpoint.token_ids("suppress_tokens", self.vocab_size)
        fill(self, checkpoint, weights=weights, seed=seed)
        for i in self.held:
            self.layers[i].finish()
        if columns := self.vocabulary.rows_of(self.suppress_token_ids):
            self._suppressed = torch.tensor(columns, device=self.device)

    def ignores(self, name: str) -> bool:
        """Returns whether released checkpoints may hold this tensor although it is not needed."""
        return name == "lm_head.weight" and self.tied

    def kv_source(self, layer: int) -> int:
        """The layer whose cache `layer` reads: itself, unless it shares."""
        return layer

    def kv_groups(self, block_size: BlockSize) -> list[KVGroupSpec]:
        """See TargetModel.kv_groups: sliding layers first, then full ones. Groups are those of
        the whole model, their layers those that this stage holds.
        """
        self.block_size = block_size
        owners = {i: each.kind for i, each in enumerate(self.layers) if self.kv_source(i) == i}
        # A new dict: another engine's shallow copy of this target keeps its own.
        self.groups, specs = group_layers(
            owners,
            TARGET_GROUPS,
            block_size,
            lambda kind, size: self.layer_type.group_shape(self.config, kind, size, self.place),
        )
        dtype = E4M3 if self.kv_scales else None
        return [
            replace(spec, layers=tuple(i for i in spec.layers if i in self.held), dtype=dtype)
            for spec in specs
        ]

    def over_plain_cache(self) -> Self:
        """The same weights over caches that round nothing."""
        found = copy(self)
        found.kv_scales, found.layers = {}, list(self.layers)
        for i in self.held:
            layer = found.layers[i] = copy(self.layers[i])
            layer.attention = copy(layer.attention)
            layer.attention.use_kv_scales(None)
        return found

    def forward(
        self,
        batch: Rows,
        kv_caches: list[Tensor | None],
        aux_layer_ids: Sequence[int] = (),
        needed: NeededRows | None = None,
        received: IntermediateTensors | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """See TargetModel.forward. All rows write their keys and values; after the last layer that
        writes any, only needed rows are computed.
        """
        first = self.held.start
        aux = self._collector(aux_layer_ids)
        h = inputs = None
        if received is None:
            h = self.embed_rows(batch)
            inputs = self.layer_inputs(batch, h)
        else:
            h = received.hidden_states
            inputs = self.layer_inputs(batch, None)
            aux.keep(self.aux_ids_before(aux_layer_ids), received.aux_hidden_states)
        aux.see(first, h)
        y = self.layers[first].input_norm.forward(h)
        passes = self._passes(batch)
        last = self.last_owner
        if needed is None or last not in self.held or any(i > last for i in aux_layer_ids):
            return self._run(self.held, h, y, inputs, passes, kv_caches, aux)[1], aux.states()
        h, y = self._run(range(first, last), h, y, inputs, passes, kv_caches, aux)
        layer = self.layers[last]
        layer.attention.write_kv(y, passes[layer.kind], self._cache(kv_caches, last))
        num_rows, targets = h.shape[0], needed.rows if needed.targets is None else needed.targets
        hidden = h.new_zeros(num_rows + (needed.targets is not None), h.shape[1])
        if needed.segments:
            h, y = h.index_select(0, needed.rows), y.index_select(0, needed.rows)
            if inputs is not None:
                inputs = inputs.index_select(0, needed.rows)
            passes = self._passes(reduced(batch, needed))
            rest = range(last, self.num_layers)
            y = self._run(rest, h, y, inputs, passes, kv_caches, aux)[1]
            hidden.index_copy_(0, targets, y)
        return hidden[:num_rows], aux.states()

    def aux_ids_before(self, aux_layer_ids: Sequence[int]) -> list[int]:
        """The given aux ids whose states come from earlier pipeline stages."""
        return [i for i in aux_layer_ids if i < self.held.start]

    def _collector(self, aux_layer_ids: Sequence[int]) -> AuxCollector:
        """Collector of the aux states that this stage returns. Before the last stage, a state at
        the stage's end is left out: it is the stream, which the next stage receives.
        """
        if self.stage.is_last:
            return AuxCollector(aux_layer_ids, self.num_layers)
        return AuxCollector([i for i in aux_layer_ids if i < self.held.stop], self.num_layers)

    def layer_inputs(self, rows: Rows, embedded: Tensor | None) -> Tensor | None:
        """Inputs [T, layers, width] that the layers of this stage read beside the stream; None if
        there are none. embedded [T, D] is None after the first stage.
        """
        return None

    def extra_inputs(self, inputs: Tensor | None, layer: int) -> tuple[Tensor, ...]:
        """Extra positional inputs of a layer, from `layer_inputs`."""
        return () if inputs is None else (inputs[:, layer - self.held.start],)

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
        """Runs some layers: the stream h [T, D] before them and its norm y -> both after them."""
        for i in layers:
            layer, extra = self.layers[i], self.extra_inputs(inputs, i)
            cache = self._cache(kv_caches, i)
            h, y = layer.forward(h, y, passes[layer.kind], cache, self.next_norms[i], *extra)
            aux.see(i + 1, h)
        return h, y

    def _passes(self, rows: Rows) -> dict[str, GroupPass]:
        tables = self.layer_type.rope_tables(self.config, self.theta, rows.positions, self.dtype)
        return group_passes(self.groups, rows, tables, self.dtype)

    def _cache(self, kv_caches: list[Tensor | None], layer: int) -> Tensor:
        source = self.kv_source(layer)
        cache = kv_caches[source]
        assert cache is not None, f"layer {layer} reads layer {source}, which has no cache"
        return cache

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, vocabulary.num_rows] of hidden [N, D], soft cap applied, suppressed tokens at
        minus infinity.
        """
        return self.suppress(self.head.logits(hidden, self.softcap))

    def suppress(self, logits: Tensor) -> Tensor:
        """Logits [N, vocabulary.num_rows] with suppressed tokens at minus infinity, in place."""
        if self._suppressed is not None:
            logits.index_fill_(1, self._suppressed, -math.inf)
        return logits

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings [..., D] of token_ids [...], a new tensor, scaled as layer 0 reads them."""
        return self.table.embed(token_ids, self.embed_scale)

    def embed_rows(self, rows: Rows) -> Tensor:
        """The stream [T, D] before layer 0: embeddings, and the encoder's outputs of other rows."""
        embedded = self.embed(rows.input_ids)
        return embedded if rows.encoded is None else rows.encoded.merge(embedded)

    def embed_beside(self, token_ids: Tensor, hidden: Tensor, rows: Tensor | None) -> Tensor:
        """Embeddings of token_ids [B], each concatenated with its row of hidden [B, H], or of
        hidden [T, H] at rows [B] -> [B, D + H].
        """
        return self.table.embed_beside(token_ids, self.embed_scale, hidden, rows)
