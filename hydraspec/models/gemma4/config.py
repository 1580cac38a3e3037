"""Gemma 4's config.json, read raw: both published layouts, top level or under `text_config`.

transformers' own config object moves `global_head_dim` and `num_global_key_value_heads` into
`per_layer_config`; code that asks it for the attribute silently gets the sliding layers' sizes.
Therefore the raw file is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hydraspec.models.checkpoint.config_reader import ConfigReader, text_part
from hydraspec.models.gemma4 import unified
from hydraspec.models.gemma4.vision_config import TowerShape, UnifiedShape, read_vision
from hydraspec.models.kv_groups import FULL, SLIDING
from hydraspec.models.parts import DecoderConfig, Divided
from hydraspec.models.rope_scaling import MIN_THETA

# Released configs leave out values that equal transformers' defaults (Gemma4TextConfig).
DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "sliding_window": 512,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
}
DEFAULT_ROPE: dict[str, dict[str, Any]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


@dataclass(slots=True, frozen=True, kw_only=True)
class LayerShape:
    """Shape of a decoder layer, as far as layers differ."""

    kind: str  # SLIDING or FULL
    head_dim: int
    num_kv_heads: int
    intermediate_size: int
    k_eq_v: bool  # values are the key projection, normed without weight
    kv_source: int  # the layer whose cache it reads; itself unless KV is shared
    shares_kv: bool


@dataclass(slots=True, frozen=True, kw_only=True)
class RopeShape:
    """Rotary embedding of one layer type: base, share of the pairs that turn, divisor of the
    frequencies.
    """

    base: float
    share: float
    factor: float


@dataclass(slots=True, frozen=True, kw_only=True)
class Gemma4Config(DecoderConfig):
    """Shape of a Gemma 4 text model."""

    sliding_window: int
    softcap: float | None
    attention_bias: bool
    ple_size: int  # width of the per-layer inputs, 0 for none
    ple_vocab_size: int
    num_experts: int  # 0 for a dense model
    top_k_experts: int
    moe_intermediate_size: int
    layers: tuple[LayerShape, ...]
    rope: Mapping[str, RopeShape]
    vision: TowerShape | UnifiedShape | None = None  # None: no image encoder
    image_lookup_id: int = 0  # the token that image rows look up in the per-layer table
    images_see_ahead: bool = False  # on sliding layers an image's rows see each other both ways

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)

    @property
    def divided(self) -> Divided:
        """Dimensions that tensor-parallel ranks divide."""
        kv_heads = {f"KV heads of {layer.kind} layers": layer.num_kv_heads for layer in self.layers}
        widths = {"intermediate_size": min(layer.intermediate_size for layer in self.layers)}
        if self.num_experts:
            widths["moe_intermediate_size"] = self.moe_intermediate_size
        return Divided(self.num_heads, kv_heads, widths)

    def last_owner(self, kind: str) -> int | None:
        """The last layer of a type that owns KV, or None."""
        owners = [i for i, x in enumerate(self.layers) if x.kind == kind and not x.shares_kv]
        return owners[-1] if owners else None


def read_gemma4_config(
    config: Mapping[str, Any], where: str, *, is_assistant: bool = False
) -> Gemma4Config:
    """The shape in a raw config.json; `where` names the folder in messages.

    An assistant's layers own no KV; each reads the target's last owner of its type (kv_source -1
    here). Raises CheckpointError for keys that are absent, out of range or not supported.
    """
    unified.check_nesting(config, where)
    is_unified = unified.is_unified(config)
    defaults = DEFAULTS | unified.DEFAULTS if is_unified else DEFAULTS
    reader = ConfigReader(text_part(config), where, defaults)
    if is_unified:
        unified.check_unified(reader)
    _refuse_unsupported(reader)
    num_layers = reader.count("num_hidden_layers")
    kinds = _layer_kinds(reader, num_layers)
    num_shared = num_layers if is_assistant else reader.count("num_kv_shared_layers", 0, least=0)
    layers = tuple(
        _layer_shape(reader, i, kinds, num_layers - num_shared, is_assistant)
        for i in range(num_layers)
    )
    moe = bool(reader.get("enable_moe_block", False))
    ple = reader.count("hidden_size_per_layer_input", least=0)
    softcap = reader.get("final_logit_softcapping")  # null: none
    vision = None if is_assistant else read_vision(config, where)
    return Gemma4Config(
        vocab_size=reader.count("vocab_size"),
        hidden_size=reader.count("hidden_size"),
        num_heads=reader.count("num_attention_heads"),
        max_position_embeddings=reader.count("max_position_embeddings"),
        rms_norm_eps=reader.eps("rms_norm_eps"),
        sliding_window=reader.count("sliding_window"),
        softcap=None if softcap is None else reader.number("final_logit_softcapping"),
        attention_bias=bool(reader.get("attention_bias", False)),
        tied=bool(config.get("tie_word_embeddings", reader.get("tie_word_embeddings", True))),
        ple_size=ple,
        ple_vocab_size=reader.count("vocab_size_per_layer_input") if ple else 0,
        num_experts=reader.count("num_experts") if moe else 0,
        top_k_experts=reader.count("top_k_experts") if moe else 0,
        moe_intermediate_size=reader.count("moe_intermediate_size") if moe else 0,
        layers=layers,
        rope={kind: _rope_shape(reader, kind) for kind in sorted(set(kinds))},
        vision=vision,
        image_lookup_id=reader.count("pad_token_id", 0, least=0) if vision and ple else 0,
        images_see_ahead=vision is not None and images_see_ahead(config),
    )


def images_see_ahead(config: Mapping[str, Any]) -> bool:
    """Returns whether rows of an image see each other both ways in a model with this raw
    config.json, so that its images must not be cut; unified models do unless the key says null.
    """
    default = "vision" if unified.is_unified(config) else None
    return bool(text_part(config).get("use_bidirectional_attention", default) == "vision")


def _refuse_unsupported(reader: ConfigReader) -> None:
    if reader.get("hidden_activation") != "gelu_pytorch_tanh":
        raise reader.fail("hidden_activation", "gelu_pytorch_tanh, the only one released")
    if reader.get("use_bidirectional_attention") == "all":
        raise reader.fail("use_bidirectional_attention", "null or vision: decoding is causal")


def _layer_kinds(reader: ConfigReader, num_layers: int) -> list[str]:
    kinds = reader.get("layer_types")
    if kinds is None:
        kinds = [SLIDING if (i + 1) % 6 else FULL for i in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or set(kinds) - {SLIDING, FULL}:
        raise reader.fail(
            "layer_types", f"{num_layers} names (num_hidden_layers), each {SLIDING} or {FULL}"
        )
    return [*kinds[:-1], FULL]  # the last layer sees everything, whatever the file says


def _layer_shape(
    reader: ConfigReader, i: int, kinds: list[str], first_shared: int, is_assistant: bool
) -> LayerShape:
    kind, shares = kinds[i], i >= first_shared
    k_eq_v = kind == FULL and bool(reader.get("attention_k_eq_v", False))
    head_dim, kv_heads = _head_shape(reader, i, kind, k_eq_v)
    if head_dim % 2:
        key = "global_head_dim" if kind == FULL else "head_dim"
        raise reader.fail(key, f"even, as rotary positions turn pairs (layer {i} has {head_dim})")
    if reader.count("num_attention_heads") % kv_heads:
        raise reader.fail("num_attention_heads", f"a multiple of layer {i}'s {kv_heads} KV heads")
    source = i
    if shares:
        owners = [j for j in range(first_shared) if kinds[j] == kind]
        if not owners and not is_assistant:
            raise reader.fail(
                "num_kv_shared_layers", f"a count that leaves a {kind} layer with KV of its own"
            )
        source = owners[-1] if owners else -1
    wide = shares and bool(reader.get("use_double_wide_mlp", False))
    return LayerShape(
        kind=kind,
        head_dim=head_dim,
        num_kv_heads=kv_heads,
        intermediate_size=reader.count("intermediate_size") * (2 if wide else 1),
        k_eq_v=k_eq_v,
        kv_source=source,
        shares_kv=shares,
    )


def _head_shape(reader: ConfigReader, i: int, kind: str, k_eq_v: bool) -> tuple[int, int]:
    """head_dim and KV heads of a layer: per_layer_config where the file has it, else the global_
    keys.
    """
    head_dim, kv_heads = reader.count("head_dim"), reader.count("num_key_value_heads")
    per_layer = reader.get("per_layer_config")
    if per_layer is None:
        if kind == FULL:
            head_dim = reader.count("global_head_dim", 512)
            if k_eq_v:
                kv_heads = reader.count("num_global_key_value_heads", kv_heads)
        return head_dim, kv_heads
    try:
        by_index = {int(key): value for key, value in per_layer.items()}
        override = by_index.get(i, {})
        part = reader.part(f"per_layer_config.{i}", override)
    except (AttributeError, TypeError, ValueError):
        raise reader.fail("per_layer_config", "layer indices with head_dim and KV heads") from None
    sizes = {"head_dim": head_dim, "num_key_value_heads": kv_heads}
    found = (part.count(f"per_layer_config.{i}.{key}", size) for key, size in sizes.items())
    return next(found), next(found)


def _rope_shape(reader: ConfigReader, kind: str) -> RopeShape:
    parameters = reader.get("rope_parameters", DEFAULT_ROPE)
    values = parameters.get(kind) if isinstance(parameters, Mapping) else None
    if not isinstance(values, Mapping) or values.get("rope_type") not in (
        "default",
        "proportional",
    ):
        raise reader.fail("rope_parameters", f"{kind} with rope_type default or proportional")
    proportional, key = values["rope_type"] == "proportional", f"rope_parameters.{kind}"
    part = reader.part(key, values)
    share = part.number(f"{key}.partial_rotary_factor", 1.0, most=1.0)
    factor = part.number(f"{key}.factor", 1.0)
    return RopeShape(
        base=part.number(f"{key}.rope_theta", DEFAULT_ROPE[kind]["rope_theta"], least=MIN_THETA),
        share=share if proportional else 1.0,
        factor=factor if proportional else 1.0,
    )
