"""The Gemma 4 text model: dense, per-layer-input and mixture-of-experts shapes over a paged KV
cache.

The model follows the released checkpoints' format and transformers' arithmetic
(Gemma4ForCausalLM), and knows nothing of scheduling or speculation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from hydraspec_kernels.embedding import ple_inputs
from hydraspec_kernels.rope import Frequencies, rope_frequencies
from torch import Tensor

from hydraspec.errors import CheckpointError
from hydraspec.models.checkpoint.names import name_in_text_model
from hydraspec.models.checkpoint.reader import Checkpoint
from hydraspec.models.decoder import Decoder
from hydraspec.models.gemma4.config import Gemma4Config, read_gemma4_config
from hydraspec.models.gemma4.layer import Gemma4Layer
from hydraspec.models.gemma4.vision import (
    PREFIXES,
    PatchEmbedder,
    VisionTower,
    build_encoder,
    name_in_encoder,
)
from hydraspec.models.linear import Linear, Table
from hydraspec.models.parts import Share, Weights
from hydraspec.models.place import Place
from hydraspec.parallel.vocabulary import Vocabulary
from hydraspec.types import Rows

_SOUNDS = ("audio_tower.", "embed_audio.")
_SHARED_KV = re.compile(r"layers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.")


class PerLayerEmbedding(Weights):
    """The per-layer inputs (PLE): a second embedding table, and a projection of the scaled token
    embedding. A pipeline stage has the columns of its layers (docs/adr/0024).
    """

    names: Mapping[str, str] = {
        "table": "embed_tokens_per_layer.",
        "projection": "",
        "norm_weight": "per_layer_projection_norm.weight",
    }

    def __init__(self, config: Gemma4Config, held: range, place: Place) -> None:
        """Builds empty weights. held: the layers of this stage, which read the per-layer inputs."""
        self.width = config.ple_size
        share = Share(len(config.layers), held.start, len(held))
        columns = share.times(self.width)
        self.table = Table(
            place,
            Vocabulary(config.ple_vocab_size, place.group),
            columns.count,
            columns=columns if share.is_part else None,
        )
        self.projection = Linear(place, config.hidden_size, {"per_layer_model_projection": columns})
        self.eps = config.rms_norm_eps
        self.norm_weight = place.empty(self.width)
        self.table_scale = rounded(math.sqrt(self.width), place.dtype)
        self.projection_scale = config.hidden_size**-0.5

    def forward(self, token_ids: Tensor, embedded: Tensor) -> Tensor:
        """Per-layer inputs [T, held layers, width] of token_ids [T] and their scaled embeddings
        [T, D]. Unknown ids read row 0.
        """
        ids, table, vocabulary = token_ids, self.table.weight, self.table.vocabulary
        if vocabulary.group.size > 1:  # the rows that were looked up stand in for the table
            is_known = (ids >= 0) & (ids < vocabulary.size)
            table = self.table.embed(torch.where(is_known, ids, 0))
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
    """Gemma 4 target; implements TargetModel."""

    names: Mapping[str, str] = {**Decoder.names, "per_layer": "", "encoder": ""}
    layer_type = Gemma4Layer

    @staticmethod
    def read_config(config: Mapping[str, Any], where: str) -> Gemma4Config:
        """The shape in a raw config.json, whose layers of a kind must be alike."""
        found = read_gemma4_config(config, where)
        _check_uniform(found, where)
        return found

    def __init__(self, config: Gemma4Config, place: Place) -> None:
        super().__init__(config, place)
        self.last_owner = max(i for i, x in enumerate(config.layers) if not x.shares_kv)
        self.embed_scale = rounded(math.sqrt(config.hidden_size), place.dtype)
        self.softcap = config.softcap
        self.per_layer = PerLayerEmbedding(config, self.held, place) if config.ple_size else None
        # Of a pipeline the stages that embed rows: the first, those that read per-layer inputs, and
        # the last one for its drafter.
        drafts = self.stage.is_last and self.stage.drafts
        is_held = self.stage.is_first or bool(config.ple_size) or drafts
        self.encoder: VisionTower | PatchEmbedder | None = build_encoder(
            config.vision, config.hidden_size, place.if_held(is_held)
        )
        self.images_see_ahead = config.images_see_ahead

    def frequencies(self, config: Gemma4Config, place: Place) -> dict[str, Frequencies]:
        """Rotary frequencies of each kind of layers."""
        return rope_frequencies_by_kind(config, place)

    def canonical_name(self, name: str) -> str | None:
        """A checkpoint's tensor name without its prefix; None for those of sounds, and for those of
        images in a model without an encoder.
        """
        name = name_in_text_model(name)
        if name.startswith(PREFIXES):
            return None if self.encoder is None else name_in_encoder(name)
        return None if name.startswith(_SOUNDS) else name

    def fill(self, checkpoint: Checkpoint, *, weights: str, seed: int) -> None:
        """See Decoder. Files without any tensor of images, as text-only releases have them, leave
        the model without its encoder.
        """
        if weights == "checkpoint" and not any(
            name_in_text_model(name).startswith(PREFIXES) for name in checkpoint.entries()
        ):
            self.encoder = None
        super().fill(checkpoint, weights=weights, seed=seed)
        if self.encoder is not None and self.encoder.is_held:
            self.encoder.finish()

    def ignores(self, name: str) -> bool:
        """Returns whether a tensor is not needed: it is of the keys or values of a layer that
        shares KV, or the head of a tied model.
        """
        match = _SHARED_KV.match(name)
        if match is None or int(match[1]) >= self.num_layers:
            return super().ignores(name)
        return bool(self.config.layers[int(match[1])].shares_kv)

    def kv_source(self, layer: int) -> int:
        """The layer whose cache `layer` reads: itself, unless it shares."""
        return int(self.config.layers[layer].kv_source)

    @property
    def embeds(self) -> bool:
        """Returns whether this stage has the embedding table, which per-layer inputs read too."""
        return super().embeds or bool(self.config.ple_size)

    def layer_inputs(self, rows: Rows, embedded: Tensor | None) -> Tensor | None:
        """Per-layer inputs [T, layers of this stage, width]; None for a model without them. Each
        stage computes those of its layers from token ids and from the stream before layer 0
        (None: it is computed here). Rows of images look up one token, and project what they embed.
        """
        if self.per_layer is None:
            return None
        ids = rows.input_ids
        if rows.encoded is not None:
            ids = ids.index_fill(0, rows.encoded.rows, self.config.image_lookup_id)
        return self.per_layer.forward(ids, self.embed_rows(rows) if embedded is None else embedded)


def rounded(value: float, dtype: torch.dtype) -> float:
    """The value rounded to dtype, as published models round their embedding scale."""
    return float(torch.tensor(value, dtype=torch.float64).to(dtype).item())


def rope_frequencies_by_kind(config: Gemma4Config, place: Place) -> dict[str, Frequencies]:
    """Rotary frequencies of each kind of layers."""
    found = {}
    for layer in config.layers:
        rope = config.rope[layer.kind]
        theta = rope_frequencies(layer.head_dim, rope.base, rope.share, rope.factor)
        found[layer.kind] = place.frequencies(theta)
    return found


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
