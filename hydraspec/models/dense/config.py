"""config.json of Llama-like dense decoders (Llama, Mistral's, Qwen2, Qwen3, MiMo), read raw.

A family is a row of FAMILIES: what its modelling code fixes, and the defaults of keys that its
files leave out (transformers' configuration classes).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hydraspec_kernels.linear import Activation

from hydraspec.errors import CheckpointError
from hydraspec.models.checkpoint.config_reader import ConfigReader, text_part
from hydraspec.models.kv_groups import FULL, SLIDING
from hydraspec.models.parts import DecoderConfig, Divided
from hydraspec.models.rope_scaling import BETA, LENGTH, Rope, read_rope


@dataclass(slots=True, frozen=True, kw_only=True)
class Family:
    """Properties of a model family that its checkpoints' files do not state."""

    bias: Literal["none", "keys", "qkv"] = "none"  # keys: attention_bias and mlp_bias decide
    qk_norm: bool = False
    # if_asked: by use_sliding_window; refused: a window contradicts the family
    window: Literal["never", "if_asked", "given", "refused"] = "never"
    defaults: Mapping[str, Any] = field(default_factory=dict)
    rope_keys: Collection[str] | None = None  # all of its rotary parameters; None: see `read_rope`


_QWEN_DEFAULTS = {"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28}
_MISTRAL_DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 131072}
_MINISTRAL3_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    LENGTH: 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    BETA: 0.1,
}
_MINISTRAL3_DEFAULTS = _MISTRAL_DEFAULTS | {
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
}
_MINISTRAL3_ROPE = {
    *_MINISTRAL3_YARN,
    *("type", "attention_factor", "truncate", "partial_rotary_factor", "max_position_embeddings"),
}
FAMILIES: dict[str, Family] = {
    "llama": Family(bias="keys", defaults={"max_position_embeddings": 2048}),
    "mistral": Family(window="given", defaults=_MISTRAL_DEFAULTS),
    "ministral": Family(window="given", defaults=_MISTRAL_DEFAULTS),
    "ministral3": Family(
        window="refused",
        defaults={**_MINISTRAL3_DEFAULTS, "rope_parameters": _MINISTRAL3_YARN},
        rope_keys=_MINISTRAL3_ROPE,
    ),
    "qwen2": Family(bias="qkv", window="if_asked", defaults=_QWEN_DEFAULTS),
    "mimo": Family(bias="qkv", window="if_asked", defaults=_QWEN_DEFAULTS),
    "qwen3": Family(
        bias="keys", qk_norm=True, window="if_asked", defaults=_QWEN_DEFAULTS | {"head_dim": 128}
    ),
}
ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
MISTRAL_WINDOW = 4096  # sliding_window of Mistral configs without the key; null means none


@dataclass(slots=True, frozen=True, kw_only=True)
class DenseConfig(DecoderConfig):
    """A dense decoder's shape; also that of a draft head's decoder layers."""

    model_type: str
    intermediate_size: int
    num_kv_heads: int
    head_dim: int
    kinds: tuple[str, ...]  # SLIDING or FULL, a layer each
    sliding_window: int | None
    qk_norm: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    activation: Activation  # of the MLP's gate
    rope: Rope

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.kinds)

    @property
    def score_scale(self) -> float:
        """Factor of attention scores: 1/sqrt(head_dim), times the square of YaRN's gain."""
        return float(self.head_dim**-0.5 * self.rope.gain**2)

    @property
    def divided(self) -> Divided:
        """Dimensions that tensor-parallel ranks divide."""
        kv_heads = {"num_key_value_heads": self.num_kv_heads}
        return Divided(self.num_heads, kv_heads, {"intermediate_size": self.intermediate_size})


def read_dense_config(config: Mapping[str, Any], where: str) -> DenseConfig:
    """The shape in a raw config.json, top level or under text_config; `where` names the folder.

    Raises CheckpointError for a model_type that is not in FAMILIES, and for keys that are absent,
    out of range or not supported.
    """
    values = text_part(config)
    model_type = values.get("model_type")
    if model_type not in FAMILIES:
        raise CheckpointError(
            f"config.json of {where!r}: model_type is {model_type!r}; expected a dense decoder, "
            f"one of {', '.join(FAMILIES)}"
        )
    family = FAMILIES[model_type]
    reader = ConfigReader(values, where, family.defaults)
    _refuse_uncomputed(reader)
    heads, head_dim = _heads(reader)
    kinds, window = _windows(reader, family)
    max_positions = reader.count("max_position_embeddings")
    by_keys = family.bias == "keys"
    bias = by_keys and bool(reader.get("attention_bias", False))
    return DenseConfig(
        model_type=str(model_type),
        vocab_size=reader.count("vocab_size"),
        hidden_size=reader.count("hidden_size"),
        intermediate_size=reader.count("intermediate_size"),
        num_heads=heads,
        num_kv_heads=_kv_heads(reader, heads),
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rms_norm_eps=reader.eps("rms_norm_eps", 1e-6),
        kinds=kinds,
        sliding_window=window,
        qk_norm=family.qk_norm,
        qkv_bias=bias or family.bias == "qkv",
        out_bias=bias,
        mlp_bias=by_keys and bool(reader.get("mlp_bias", False)),
        activation=_activation(reader),
        tied=bool(config.get("tie_word_embeddings", reader.get("tie_word_embeddings", False))),
        rope=read_rope(reader, head_dim, max_positions, family.rope_keys),
    )


def _activation(reader: ConfigReader) -> Activation:
    """The activation of hidden_act; draft heads made for Gemma targets have gelu_pytorch_tanh."""
    name = reader.get("hidden_act", "silu")
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise reader.fail("hidden_act", f"one of {', '.join(ACTIVATIONS)}")
    if reader.get("hidden_activation") not in (None, name):  # Gemma's name of hidden_act
        raise reader.fail("hidden_activation", f"{name} or nothing, since hidden_act says {name}")
    return ACTIVATIONS[name]


def _refuse_uncomputed(reader: ConfigReader) -> None:
    """Raises CheckpointError for keys of related families that would change the computation."""
    for key in ("partial_rotary_factor", "residual_multiplier"):
        if reader.get(key, 1) != 1:
            raise reader.fail(key, "1 or nothing; no other value is computed: use another model")
    if reader.get("attn_logit_softcapping") is not None:
        raise reader.fail("attn_logit_softcapping", "nothing: attention scores have no soft cap")
    without = reader.get("no_rope_layers")
    if without and (not isinstance(without, list) or any(flag != 1 for flag in without)):
        raise reader.fail("no_rope_layers", "1 for every layer: all layers rotate")


def _heads(reader: ConfigReader) -> tuple[int, int]:
    """Number of query heads, and head_dim."""
    heads, width = reader.count("num_attention_heads"), reader.count("hidden_size")
    head_dim = reader.count("head_dim", width // heads if width % heads == 0 else None)
    if head_dim % 2:
        raise reader.fail("head_dim", "an even number: rotary positions turn pairs")
    return heads, head_dim


def _kv_heads(reader: ConfigReader, heads: int) -> int:
    kv_heads = reader.count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise reader.fail("num_attention_heads", f"a multiple of the {kv_heads} KV heads")
    return kv_heads


def _windows(reader: ConfigReader, family: Family) -> tuple[tuple[str, ...], int | None]:
    """Layer kinds, and the sliding layers' window; None if there are no sliding layers."""
    num_layers = reader.count("num_hidden_layers")
    kinds, window = reader.get("layer_types"), None
    if family.window == "refused" and reader.get("sliding_window") is not None:
        raise reader.fail("sliding_window", "null: all layers of this model_type attend to all")
    if family.window == "given":
        window = reader.values.get("sliding_window", MISTRAL_WINDOW)
        first = 0
    elif family.window == "if_asked" and reader.get("use_sliding_window", False):
        window = reader.get("sliding_window")
        first = reader.count("max_window_layers", least=0)
    if kinds is None:
        kinds = [FULL] * num_layers
        if window is not None:
            kinds = [SLIDING if i >= first else FULL for i in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or set(kinds) - {SLIDING, FULL}:
        raise reader.fail(
            "layer_types", f"{num_layers} names (num_hidden_layers), each {SLIDING} or {FULL}"
        )
    if SLIDING not in kinds:
        return tuple(kinds), None
    if window is None:
        raise reader.fail("layer_types", f"no {SLIDING}: this config turns windows off")
    return tuple(kinds), reader.count("sliding_window", MISTRAL_WINDOW)
