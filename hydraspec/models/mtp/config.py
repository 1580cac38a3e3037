"""Reads the multi-token-prediction (MTP) layers that a checkpoint announces, and their layout.

DeepSeek-V3 and MiMo keep them in the target's own files, the speculators format in a separate
folder. The layouts differ in names, in the order of the concatenation, and in whether the first
position's embedding is blanked (docs/adr/0008).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hydraspec.errors import CheckpointError, ConfigurationError
from hydraspec.models.checkpoint.config_reader import ConfigReader
from hydraspec.models.checkpoint.reader import Checkpoint
from hydraspec.models.deepseek.config import DeepseekConfig, read_deepseek_config
from hydraspec.models.deepseek.layer import DeepseekLayer
from hydraspec.models.dense.config import DenseConfig, read_dense_config
from hydraspec.models.dense.layer import DenseLayer


@dataclass(slots=True, frozen=True, kw_only=True)
class MTPLayout:
    """Names and conventions of a published layout."""

    name: str
    layer_type: Any  # class of the decoder blocks, as of a target's layers
    token_norm: str
    hidden_norm: str
    projection: str  # 2D -> D
    final_norm: str
    embedding_first: bool  # in the concatenation
    blanks_first_position: bool  # the embedding of the row at position 0 is zero


DEEPSEEK = MTPLayout(
    name="DeepSeek-V3",
    layer_type=DeepseekLayer,
    token_norm="enorm",
    hidden_norm="hnorm",
    projection="eh_proj",
    final_norm="shared_head.norm",
    embedding_first=True,
    blanks_first_position=True,
)
MIMO = MTPLayout(
    name="MiMo",
    layer_type=DenseLayer,
    token_norm="token_layernorm",
    hidden_norm="hidden_layernorm",
    projection="input_proj",
    final_norm="final_layernorm",
    embedding_first=False,
    blanks_first_position=True,
)
SPECULATORS = replace(MIMO, name="speculators", embedding_first=True, blanks_first_position=False)


@dataclass(slots=True, frozen=True, kw_only=True)
class MTPConfig:
    """The MTP layers of a checkpoint."""

    layout: MTPLayout
    block: DeepseekConfig | DenseConfig  # of each layer's decoder block
    num_layers: int
    prefixes: tuple[str, ...]  # of each layer's tensors, without `model.`

    @property
    def hidden_size(self) -> int:
        """Width of the layers' hidden states."""
        return self.block.hidden_size


def read_mtp_config(opened: Checkpoint) -> MTPConfig:
    """The MTP layers that a raw config.json announces.

    Raises CheckpointError: none announced, or in a layout that is not built.
    """
    raw, where = opened.config, str(opened.folder)
    if raw.get("speculators_model_type") == "mtp":
        return _speculators(raw, where)
    kind = raw.get("model_type")
    if kind not in ("deepseek_v3", "mimo"):
        raise CheckpointError(
            f"config.json of {where!r}: model_type is {kind!r}; MTP layers are known of "
            "deepseek_v3 and mimo, and in speculators folders (speculators_model_type mtp): "
            "choose another method"
        )
    count = _num_layers(raw, where)
    if kind == "mimo":
        prefixes = tuple(f"mtp_layers.{i}." for i in range(count))
        dense = read_dense_config(raw, where)
        return MTPConfig(layout=MIMO, block=dense, num_layers=count, prefixes=prefixes)
    latent = read_deepseek_config(raw, where)
    prefixes = tuple(f"layers.{latent.num_layers + i}." for i in range(count))
    return MTPConfig(layout=DEEPSEEK, block=latent, num_layers=count, prefixes=prefixes)


def _num_layers(raw: Mapping[str, object], where: str) -> int:
    count = ConfigReader(raw, where).count("num_nextn_predict_layers", 0, least=0)
    if count == 0:
        raise CheckpointError(
            f"checkpoint {where!r} has no MTP layers (num_nextn_predict_layers 0 or absent); "
            "method=mtp needs them: give a release that kept them, or choose another method"
        )
    return count


def _speculators(raw: Mapping[str, object], where: str) -> MTPConfig:
    block = raw.get("transformer_layer_config")
    if not isinstance(block, Mapping):
        raise CheckpointError(
            f"config.json of {where!r}: transformer_layer_config is {block!r}; expected the "
            "decoder layer's config"
        )
    count = ConfigReader(raw, where).count("num_nextn_predict_layers", 1)
    return MTPConfig(
        layout=SPECULATORS,
        block=read_dense_config(block, where),
        num_layers=count,
        prefixes=tuple(f"mtp_layers.{i}." for i in range(count)),
    )


def check_num_drafts(num_drafts: int, num_layers: int, where: str) -> None:
    """Raises ConfigurationError for K above the number n of layers unless K is a multiple of n,
    since step j runs layer j % n.
    """
    if num_drafts > num_layers and num_drafts % num_layers:
        fits = num_drafts // num_layers * num_layers
        raise ConfigurationError(
            f"method.num_speculative_tokens={num_drafts} does not go with the {num_layers} MTP "
            f"layers of {where!r}, which take turns: allowed are 1 to {num_layers} and multiples "
            f"of {num_layers}, such as {fits}"
        )
