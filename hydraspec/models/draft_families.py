"""The families of decoder layers that draft heads with KV of their own are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from hydraspec.models.checkpoint.config_reader import ConfigReader
from hydraspec.models.dense.config import read_dense_config
from hydraspec.models.dense.layer import DenseLayer
from hydraspec.models.gemma4.config import read_gemma4_config
from hydraspec.models.gemma4.layer import Gemma4Layer
from hydraspec.models.gemma4.model import rope_frequencies_by_kind
from hydraspec.models.kv_groups import FULL
from hydraspec.models.place import Place

FamilyName = Literal["dense", "gemma4"]


@dataclass(slots=True, frozen=True)
class Family:
    """A family of layers."""

    read: Callable[[dict[str, Any], str], Any]  # the shape in a Hugging Face config
    layer: Any  # the class of layers
    frequencies: Callable[[Any, Place], Any]  # rotary frequencies of a shape


FAMILIES: dict[str, Family] = {
    "dense": Family(
        read_dense_config, DenseLayer, lambda shape, place: place.frequencies(shape.rope.theta)
    ),
    "gemma4": Family(read_gemma4_config, Gemma4Layer, rope_frequencies_by_kind),
}


def plain_gemma_layers(keys: ConfigReader) -> dict[str, Any]:
    """The config of a drafter's Gemma 4 layers: their target's, of which all attend to everything.
    Raises CheckpointError for experts, per-layer inputs and shared KV, which drafters lack."""
    for key in ("enable_moe_block", "hidden_size_per_layer_input", "num_kv_shared_layers"):
        if keys.get(key):
            raise keys.fail(key, "0 or false: drafters have plain layers")
    kinds = [FULL] * keys.count("num_hidden_layers")
    plain = {"hidden_size_per_layer_input": 0, "layer_types": kinds, "model_type": "gemma4_text"}
    return {**keys.values, **plain}
