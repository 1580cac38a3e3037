"""Keys of Gemma 4's `vision_config`, of the released encoders and of the 12B, which has none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hydraspec.models.checkpoint.config_reader import ConfigReader
from hydraspec.models.gemma4.unified import WRAPPER
from hydraspec.models.rope_scaling import MIN_THETA

KEY = "vision_config"
# Values that released files leave out, as transformers' Gemma4VisionConfig has them.
DEFAULTS: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "position_embedding_size": 10240,
}
UNIFIED_DEFAULTS: dict[str, Any] = {
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "mm_embed_dim": 3840,
    "mm_posemb_size": 1120,
    "output_proj_dims": 3840,
    "rms_norm_eps": 1e-6,
}
_THETA = 100.0
_MOST_PIXELS = 1024  # sides of a patch; of those released 48


@dataclass(slots=True, frozen=True, kw_only=True)
class PatchShape:
    """What both ways of reading images have."""

    patch_size: int  # pixels, of a side of a patch
    pool: int  # a token stands for pool * pool patches
    num_positions: int  # columns or rows of patches that have an embedding
    eps: float

    @property
    def patch_values(self) -> int:
        """Numbers of a patch: three for each pixel."""
        return 3 * self.patch_size**2


@dataclass(slots=True, frozen=True, kw_only=True)
class TowerShape(PatchShape):
    """Shape of a vision tower (model_type gemma4_vision)."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    theta: float  # base of the rotary frequencies, of columns as of rows
    clipped: bool  # every linear map clamps its inputs and its outputs
    standardised: bool  # tokens are shifted and scaled before the projection


@dataclass(slots=True, frozen=True, kw_only=True)
class UnifiedShape(PatchShape):
    """Shape of a projection of patches without a tower (model_type gemma4_unified_vision); its
    patches are as large as a token's, so that `pool` is 1.
    """

    embed_size: int


def read_vision(config: Mapping[str, Any], where: str) -> TowerShape | UnifiedShape | None:
    """The shape in a wrapper's raw config.json; None for a model without images. Raises
    CheckpointError for values that are out of range or not understood.
    """
    nested = config.get(KEY)
    if nested is None:
        return None
    if not isinstance(nested, Mapping):
        raise ConfigReader(config, where).fail(
            KEY, "an object with the keys of the image encoder, or null: download it again"
        )
    is_unified = config.get("model_type") == WRAPPER
    reader = ConfigReader(config, where).part(KEY, nested)
    reader.defaults = {
        f"{KEY}.{key}": value
        for key, value in (UNIFIED_DEFAULTS if is_unified else DEFAULTS).items()
    }
    expected = "gemma4_unified_vision" if is_unified else "gemma4_vision"
    if reader.get(f"{KEY}.model_type", expected) != expected:
        raise reader.fail(
            f"{KEY}.model_type",
            f"{expected}, since model_type is {config.get('model_type')}: mend the config",
        )
    return _unified(reader) if is_unified else _tower(reader)


def _side(reader: ConfigReader, name: str) -> int:
    key = f"{KEY}.{name}"
    size = reader.count(key)
    if size > _MOST_PIXELS:
        raise reader.fail(key, f"an integer from 1 to {_MOST_PIXELS}")
    return size


def _switch(reader: ConfigReader, name: str) -> bool:
    return bool(reader.flag(f"{KEY}.{name}"))


def _unified(reader: ConfigReader) -> UnifiedShape:
    width = reader.count(f"{KEY}.mm_embed_dim")
    projected = reader.count(f"{KEY}.output_proj_dims", width)
    if projected != width:
        raise reader.fail(
            f"{KEY}.output_proj_dims", f"{width}, as mm_embed_dim: the projection reads that width"
        )
    return UnifiedShape(
        patch_size=_side(reader, "patch_size") * _side(reader, "pooling_kernel_size"),
        pool=1,
        num_positions=reader.count(f"{KEY}.mm_posemb_size"),
        eps=reader.eps(f"{KEY}.rms_norm_eps"),
        embed_size=width,
    )


def _tower(reader: ConfigReader) -> TowerShape:
    heads, kv_heads = (
        reader.count(f"{KEY}.{name}") for name in ("num_attention_heads", "num_key_value_heads")
    )
    head_dim = reader.count(f"{KEY}.head_dim")
    if heads % kv_heads:
        raise reader.fail(f"{KEY}.num_attention_heads", f"a multiple of the {kv_heads} KV heads")
    if head_dim % 4:
        raise reader.fail(
            f"{KEY}.head_dim",
            "a multiple of 4: rotary positions turn pairs, half of them by columns, half by rows",
        )
    if reader.get(f"{KEY}.hidden_activation") != DEFAULTS["hidden_activation"]:
        raise reader.fail(f"{KEY}.hidden_activation", "gelu_pytorch_tanh, the only one released")
    if _switch(reader, "attention_bias"):
        raise reader.fail(f"{KEY}.attention_bias", "false: released encoders have no biases")
    return TowerShape(
        patch_size=_side(reader, "patch_size"),
        pool=_side(reader, "pooling_kernel_size"),
        num_positions=reader.count(f"{KEY}.position_embedding_size"),
        eps=reader.eps(f"{KEY}.rms_norm_eps"),
        hidden_size=reader.count(f"{KEY}.hidden_size"),
        intermediate_size=reader.count(f"{KEY}.intermediate_size"),
        num_layers=reader.count(f"{KEY}.num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        theta=_rope_theta(reader),
        clipped=_switch(reader, "use_clipped_linears"),
        standardised=_switch(reader, "standardize"),
    )


def _rope_theta(reader: ConfigReader) -> float:
    key = f"{KEY}.rope_parameters"
    values = reader.get(key, {})
    if not isinstance(values, Mapping) or values.get("rope_type", "axial") not in (
        *("axial", "default"),
    ):
        raise reader.fail(key, "an object with rope_theta, and rope_type axial or default")
    part = reader.part(key, values)
    return part.number(f"{key}.rope_theta", _THETA, least=MIN_THETA)
