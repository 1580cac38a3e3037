"""The Gemma 4 text model: dense, per-layer-input and mixture-of-experts shapes over a paged KV
cache.

Follows the released checkpoints' format and transformers' arithmetic (Gemma4ForCausalLM). Knows
nothing of scheduling or speculation.
"""

from __future__ import annotations

import math
import re

import torch
from hydraspec_kernels.attention import GroupShape, plan_attention
from hydraspec_kernels.embedding.ple_inputs import ple_inputs
from hydraspec_kernels.linear import linear
from hydraspec_kernels.rope import Frequencies, mirrored, rope_frequencies, rope_table
from torch import Tensor

from hydraspec.errors import CheckpointError
from hydraspec.models.attention import GroupPass
from hydraspec.models.checkpoint.reader import Checkpoint
from hydraspec.models.decoder import Decoder
from hydraspec.models.gemma4.config import (
    FULL,
    GROUP_NAMES,
    SLIDING,
    Gemma4Config,
    read_gemma4_config,
)
from hydraspec.models.gemma4.layer import DecoderLayer
from hydraspec.models.layers import Place, Tensors
from hydraspec.types import KVGroupSpec, Rows

_PREFIXES = ("model.language_model.", "language_model.model.", "model.")
_TOWERS = ("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio.")
_SHARED_KV = re.compile(r"layers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.")


def canonical_name(name: str) -> str | None:
    """A checkpoint's tensor name without its prefix; None for the vision and audio towers."""
    if name.endswith("lm_head.weight"):
        return "lm_head.weight"
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            name = name.removeprefix(prefix)
            break
    return None if name.startswith(_TOWERS) else name


class PerLayerEmbedding:
    """The per-layer inputs (PLE): a second embedding table, and a projection of the scaled token
    embedding.
    """

    def __init__(self, config: Gemma4Config, place: Place) -> None:
        self.width, self.num_layers = config.ple_size, len(config.layers)
        self.vocab_size, self.eps = config.ple_vocab_size, config.rms_norm_eps
        self.table = place.empty(self.vocab_size, self.num_layers * self.width)
        self.projection = place.matrix(config.hidden_size, self.num_layers * self.width)
        self.norm_weight = place.empty(self.width)
        self.table_scale = rounded(math.sqrt(self.width), place.dtype)
        self.projection_scale = config.hidden_size**-0.5

    def tensors(self) -> Tensors:
        return {
            "embed_tokens_per_layer.weight": self.table,
            "per_layer_model_projection.weight": self.projection.t(),
            "per_layer_projection_norm.weight": self.norm_weight,
        }

    def __call__(self, token_ids: Tensor, embedded: Tensor) -> Tensor:
        """token_ids [T] and their scaled embeddings [T, D] -> [T, num_layers, width]. Unknown ids
        read row 0.
        """
        return ple_inputs(
            token_ids,
            self.table,
            linear(embedded, self.projection),
            self.norm_weight,
            table_scale=self.table_scale,
            projection_scale=self.projection_scale,
            eps=self.eps,
        )


class Gemma4Target(Decoder):
    """Implements TargetModel."""

    def __init__(self, config: Gemma4Config, place: Place) -> None:
        super().__init__(
            place,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_layers=len(config.layers),
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=config.rms_norm_eps,
            tied=config.tied,
        )
        self.config = config
        self.embed_scale = rounded(math.sqrt(config.hidden_size), place.dtype)
        self.per_layer = PerLayerEmbedding(config, place) if config.ple_size else None
        self.layers = [DecoderLayer(config, layer, place) for layer in config.layers]
        owners = [i for i, layer in enumerate(config.layers) if not layer.shares_kv]
        self.num_owners = owners[-1] + 1
        self.theta = rope_thetas(config, place)
        self.groups: dict[str, GroupShape] = {}

    def tensors(self) -> Tensors:
        """Every weight by its checkpoint name without prefix."""
        return super().tensors() | (self.per_layer.tensors() if self.per_layer else {})

    def finish_layers(self) -> None:
        scale = 1.0
        for i, layer in enumerate(self.layers):
            self.stream_scales[i] = scale = layer.finish(scale)
        self.norm.fold_gain(stream_in=scale)

    def ignores(self, name: str) -> bool:
        """Keys and values of layers that share them, and the head of a tied model."""
        match = _SHARED_KV.match(name)
        if match is None or int(match[1]) >= self.num_layers:
            return super().ignores(name)
        return self.config.layers[int(match[1])].shares_kv

    def kv_groups(self, block_size: int) -> list[KVGroupSpec]:
        """Sliding layers first, then full ones; also sets the block size forward reads with."""
        self.block_size = block_size
        self.groups = {}  # not cleared: another engine's view of this target has the old ones
        specs = []
        for kind in (SLIDING, FULL):
            owners = [
                i for i, x in enumerate(self.config.layers) if x.kind == kind and not x.shares_kv
            ]
            if not owners:
                continue
            shape = self.config.layers[owners[0]]
            window = self.config.sliding_window if kind == SLIDING else None
            self.groups[kind] = GroupShape(
                num_heads=self.config.num_heads,
                num_kv_heads=shape.num_kv_heads,
                head_dim=shape.head_dim,
                block_size=block_size,
                window=window,
            )
            specs.append(
                KVGroupSpec(
                    name=GROUP_NAMES[kind],
                    layers=tuple(owners),
                    num_kv_heads=shape.num_kv_heads,
                    head_dim=shape.head_dim,
                    block_size=block_size,
                    window=window,
                )
            )
        return specs

    def kv_source(self, layer: int) -> int:
        """The layer whose cache `layer` reads: itself, unless it shares."""
        return self.config.layers[layer].kv_source

    def layer_inputs(self, token_ids: Tensor, embedded: Tensor) -> Tensor | None:
        """[T, num_layers, width] of a model with per-layer inputs."""
        return None if self.per_layer is None else self.per_layer(token_ids, embedded)

    def own_inputs(self, inputs: Tensor | None, layer: int) -> tuple[Tensor | None, ...]:
        """[T, width] of a model with per-layer inputs."""
        return (None if inputs is None else inputs[:, layer],)

    def _passes(self, batch: Rows) -> dict[str, GroupPass]:
        assert self.groups, "call kv_groups before forward"
        passes = {}
        for g, (kind, shape) in enumerate(self.groups.items()):
            cos, sin = rope_table(batch.positions, self.theta[kind], self.dtype)
            plan = plan_attention(
                shape,
                batch.segments,
                batch.block_tables[g],
                batch.seq_lens,
                batch.positions,
                self.dtype,
                batch.query_start_loc,
            )
            slots = batch.slot_mapping[g]
            passes[kind] = GroupPass(cos, sin, plan, slots, batch.has_padding)
        return passes

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[N, D] -> [N, V], soft cap applied, suppressed tokens at minus infinity."""
        return self.suppress(linear(hidden, self.head.t(), softcap=self.config.softcap))


def rounded(value: float, dtype: torch.dtype) -> float:
    """value as dtype holds it: published models round their embedding scale."""
    return float(torch.tensor(value, dtype=torch.float64).to(dtype).item())


def rope_thetas(config: Gemma4Config, place: Place) -> dict[str, Frequencies]:
    """Rotary frequencies per layer type, in float32 (float64 for a float64 model)."""
    wide = torch.promote_types(place.dtype, torch.float32)
    thetas = {}
    for layer in config.layers:
        rope = config.rope[layer.kind]
        theta = rope_frequencies(layer.head_dim, rope.base, rope.share, rope.factor)
        thetas[layer.kind] = mirrored(theta.to(place.device, wide))
    return thetas


def load_gemma4(
    checkpoint: Checkpoint, *, weights: str, dtype: torch.dtype, device: torch.device, seed: int
) -> Gemma4Target:
    """Read and check the config, then fill the weights. Raises CheckpointError."""
    where = str(checkpoint.folder)
    config = read_gemma4_config(checkpoint.config, where)
    _check_uniform(config, where)
    with torch.no_grad():
        model = Gemma4Target(config, Place(dtype, device))
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
