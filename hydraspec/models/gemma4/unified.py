"""Keys of a Gemma 4 unified config (model_type gemma4_unified, the 12B): a dense text model whose
images and sounds are projected without an encoder.

Its text model computes what Gemma 4's dense one computes. transformers' defaults differ, and keys
of per-layer inputs and experts, which released files carry, say that there are none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hydraspec.models.checkpoint.config_reader import ConfigReader, text_part

WRAPPER, TEXT, ASSISTANT = "gemma4_unified", "gemma4_unified_text", "gemma4_unified_assistant"
GEMMA4_TEXT = "gemma4_text"
# Values of transformers' Gemma4UnifiedTextConfig that are not those of Gemma4TextConfig.
DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 262144,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
}
# The text types under text_config by the model_type above it.
_NESTED = {
    "gemma4": (GEMMA4_TEXT,),
    WRAPPER: (TEXT,),
    ASSISTANT: (TEXT, GEMMA4_TEXT),  # of the same arithmetic
}
_SWITCHES = ("attention_bias", "attention_k_eq_v", "tie_word_embeddings", "use_double_wide_mlp")
_EXPERTS = ("enable_moe_block", "num_experts", "top_k_experts", "moe_intermediate_size")


def is_unified(config: Mapping[str, Any]) -> bool:
    """Returns whether a raw config.json has a unified text model, alone, in a wrapper or in an
    assistant.
    """
    kind = text_part(config).get("model_type")
    return (config.get("model_type") if kind is None else kind) in (WRAPPER, TEXT, ASSISTANT)


def check_nesting(config: Mapping[str, Any], where: str) -> None:
    """Refuses a text_config that is not of the type that its wrapper takes, where either is
    unified. Raises CheckpointError.
    """
    kind, reader = config.get("model_type"), ConfigReader(config, where)
    nested = config.get("text_config")
    if kind in (WRAPPER, ASSISTANT) and not isinstance(nested, Mapping):
        raise reader.fail(
            "text_config",
            f"an object with the keys of the text model, since model_type is {kind}: download "
            "config.json again",
        )
    inner = nested.get("model_type") if isinstance(nested, Mapping) else None
    if inner is None or kind not in _NESTED or inner in _NESTED[kind]:
        return
    if kind != "gemma4" or inner == TEXT:
        expected = f"{' or '.join(_NESTED[kind])}, since model_type is {kind}: mend the config"
        raise ConfigReader({"text_config.model_type": inner}, where).fail(
            "text_config.model_type", expected
        )


def check_unified(reader: ConfigReader) -> None:
    """Refuses keys of the text model that are not understood. Raises CheckpointError."""
    if reader.get("hidden_size_per_layer_input"):
        raise reader.fail(
            "hidden_size_per_layer_input",
            "0 or null: a unified model has no per-layer inputs (those with them have model_type "
            "gemma4): mend the config",
        )
    for key in _EXPERTS:
        if reader.get(key):
            raise reader.fail(
                key,
                "false, 0 or null: a unified model is dense (those with experts have model_type "
                "gemma4): mend the config",
            )
    for key in _SWITCHES:
        reader.flag(key)  # raises for another type
    if reader.get("use_bidirectional_attention") not in (None, "vision"):
        raise reader.fail("use_bidirectional_attention", "null or vision: text is decoded causally")
