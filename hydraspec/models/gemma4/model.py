"""The Gemma 4 text model: dense, per-layer-input and mixture-of-experts shapes over a paged KV
cache.

Follows the released checkpoints' format and transformers' arithmetic (Gemma4ForCausalLM). Knows
nothing of scheduling or speculation.
"""

from __future__ import annotations

import math
import re
from functools import partial

import torch
from hydraspec_kernels.attention import GroupShape
from hydraspec_kernels.embedding import ple_inputs
from hydraspec_kernels.linear import linear
from hydraspec_kernels.rope import Frequencies, rope_frequencies, rope_table
from torch import Tensor

from hydraspec.errors import CheckpointError
from hydraspec.models.checkpoint.names import name_in_text_model
from hydraspec.models.checkpoint.reader import Checkpoint
from hydraspec.models.decoder import Decoder
from hydraspec.models.gemma4.config import Gemma4Config, read_gemma4_config
from hydraspec.models.gemma4.layer import Gemma4Layer
from hydraspec.models.kv_groups import SLIDING, RopeTable
from hydraspec.models.linear import Linear
from hydraspec.models.parts import Share, Tensors
from hydraspec.models.place import Place
from hydraspec.models.stages import WHOLE, Stage
from hydraspec.parallel.group import SOLO, TensorGroup
from hydraspec.parallel.vocabulary import Vocabulary

_TOWERS = ("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio.")
_SHARED_KV = re.compile(r"layers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.")


def canonical_name(name: str) -> str | None:
    """A checkpoint's tensor name without its prefix; None for the vision and audio towers."""
    name = name_in_text_model(name)
    return None if name.startswith(_TOWERS) else name


class PerLayerEmbedding:
    """The per-layer inputs (PLE): a second embedding table, and a projection of the scaled token
    embedding. A pipeline stage has the columns of its layers (docs/adr/0024).
    """

    def __init__(self, config: Gemma4Config, held: range, place: Place) -> None:
        """held: the layers that read what is computed here."""
        self.width, self.num_layers = config.ple_size, len(held)
        share = Share(len(config.layers), held.start, len(held))
        self.columns = share.times(self.width) if share.is_part else None
        self.place, self.eps = place, config.rms_norm_eps
        self.vocabulary = Vocabulary(config.ple_vocab_size, place.group)
        self.table = place.table(self.vocabulary, self.num_layers * self.width)
        columns = {"per_layer_model_projection": share.times(self.width)}
        self.projection = Linear(place, config.hidden_size, columns)
        self.norm_weight = place.empty(self.width)
        self.table_scale = rounded(math.sqrt(self.width), place.dtype)
        self.projection_scale = config.hidden_size**-0.5

    def tensors(self) -> Tensors:
        return {
            "embed_tokens_per_layer.weight": self.place.rows(
                self.table, self.vocabulary, self.columns
            ),
            "per_layer_projection_norm.weight": self.norm_weight,
            **self.projection.tensors(),
        }

    def forward(self, token_ids: Tensor, embedded: Tensor) -> Tensor:
        """token_ids [T] and their scaled embeddings [T, D] -> [T, num_layers, width]. Unknown ids
        read row 0.
        """
        ids, table = token_ids, self.table
        if self.place.group.size > 1:  # the rows that were looked up stand in for the table
            is_known = (ids >= 0) & (ids < self.vocabulary.size)
            table = self.vocabulary.embed(torch.where(is_known, ids, 0), table)
            ids = torch.arange(len(table), device=ids.device)
        return ple_inputs(
            ids,
            table,
            self.projection.forward(embedded),
            self.norm_weight,
            table_scale=self.table_scale,
            projection_scale=self.projection_scale,
            eps=self.eps,
        )


class Gemma4Target(Decoder):
    """Implements TargetModel."""

    def __init__(self, config: Gemma4Config, place: Place) -> None:
        self.config = config
        layers = [partial(Gemma4Layer, config, layer) for layer in config.layers]
        super().__init__(config, layers, place)
        self.last_owner = max(i for i, x in enumerate(config.layers) if not x.shares_kv)
        self.embed_scale = rounded(math.sqrt(config.hidden_size), place.dtype)
        self.per_layer = PerLayerEmbedding(config, self.held, place) if config.ple_size else None
        self.frequencies = rope_frequencies_by_kind(config, place)

    def tensors(self) -> Tensors:
        """Every weight by its checkpoint name without prefix."""
        return super().tensors() | (self.per_layer.tensors() if self.per_layer else {})

    def ignores(self, name: str) -> bool:
        """Keys and values of layers that share them, and the head of a tied model."""
        match = _SHARED_KV.match(name)
        if match is None or int(match[1]) >= self.num_layers:
            return super().ignores(name)
        return self.config.layers[int(match[1])].shares_kv

    def kv_source(self, layer: int) -> int:
        """The layer whose cache `layer` reads: itself, unless it shares."""
        return self.config.layers[layer].kv_source

    def group_shape(self, kind: str, block_size: int) -> GroupShape:
        """The attention of the KV group of a kind of layers, which all have one shape, with this
        rank's heads.
        """
        layer = next(layer for layer in self.config.layers if layer.kind == kind)
        queries, kv = self.place.heads(self.config.num_heads, layer.num_kv_heads)
        return GroupShape(
            num_heads=queries.count,
            num_kv_heads=kv.count,
            head_dim=layer.head_dim,
            block_size=block_size,
            window=self.config.sliding_window if kind == SLIDING else None,
        )

    def rope_tables(self, positions: Tensor) -> dict[str, RopeTable]:
        """A rotary table for each kind of layers."""
        return {
            kind: rope_table(positions, self.frequencies[kind], self.dtype) for kind in self.groups
        }

    @property
    def embeds(self) -> bool:
        """Per-layer inputs read the embedding too."""
        return super().embeds or bool(self.config.ple_size)

    def layer_inputs(self, token_ids: Tensor, embedded: Tensor | None) -> Tensor | None:
        """[T, layers of this stage, width] of a model with per-layer inputs. Each stage computes
        those of its layers from token ids.
        """
        if self.per_layer is None:
            return None
        embedded = self.embed(token_ids) if embedded is None else embedded
        return self.per_layer.forward(token_ids, embedded)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[N, D] -> [N, vocabulary.num_rows], soft cap applied, suppressed tokens at minus
        infinity.
        """
        return self.suppress(linear(hidden, self.head.t(), softcap=self.config.softcap))


def rounded(value: float, dtype: torch.dtype) -> float:
    """value as dtype holds it: published models round their embedding scale."""
    return float(torch.tensor(value, dtype=torch.float64).to(dtype).item())


def rope_frequencies_by_kind(config: Gemma4Config, place: Place) -> dict[str, Frequencies]:
    """Rotary frequencies of each kind of layers."""
    found = {}
    for layer in config.layers:
        rope = config.rope[layer.kind]
        theta = rope_frequencies(layer.head_dim, rope.base, rope.share, rope.factor)
        found[layer.kind] = place.frequencies(theta)
    return found


def load_gemma4(
    checkpoint: Checkpoint,
    *,
    weights: str,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    group: TensorGroup = SOLO,
    stage: Stage = WHOLE,
) -> Gemma4Target:
    """Read and check the config, then fill the weights. Raises CheckpointError."""
    where = str(checkpoint.folder)
    config = read_gemma4_config(checkpoint.config, where)
    _check_uniform(config, where)
    config.divided.check(group.size, where)
    with torch.no_grad():
        model = Gemma4Target(config, Place(dtype, device, group, stage))
        model.load(checkpoint, weights=weights, seed=seed, canonical=canonical_name)
    return model


def _check_uniform(config: Gemma4Config, where: str) -> None:
    shapes: dict[str, set[tuple[int, int]]] = {}
    for layer in config.layers:
        shapes.setdefault(layer.kind, set()).add((layer.head_dim, layer.num_kv_heads))
    for kind, found in shapes.items():
        if len(found) > 1:
            raise CheckpointError(
                f"config.json of {where!r}: {kind} layers have several shapes (head_dim, KV heads) "
                f"{sorted(found)}; expected one, since they share a KV block table"
            )
