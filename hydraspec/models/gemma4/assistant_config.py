"""The config.json of a Gemma 4 assistant, read raw."""

from __future__ import annotations

from dataclasses import dataclass

from hydraspec.errors import CheckpointError
from hydraspec.models.checkpoint.config_reader import ConfigReader, text_part
from hydraspec.models.checkpoint.reader import Checkpoint, open_checkpoint
from hydraspec.models.gemma4 import unified
from hydraspec.models.gemma4.config import Gemma4Config, read_gemma4_config

MODEL_TYPES = ("gemma4_assistant", unified.ASSISTANT)
TARGETS = ("gemma4", "gemma4_text", unified.WRAPPER, unified.TEXT)  # what assistants are made for
TOP_K = "centroid_intermediate_top_k"
DEFAULTS = {"num_centroids": 2048, TOP_K: 32, "backbone_hidden_size": 1536}
UNIFIED_DEFAULTS = DEFAULTS | {"backbone_hidden_size": 3840}


@dataclass(slots=True, frozen=True)
class AssistantConfig:
    """Shape of a Gemma 4 assistant."""

    text: Gemma4Config  # its own layers; none owns KV
    backbone_hidden_size: int
    num_centroids: int  # 0 for a dense head
    centroid_top_k: int


def read_assistant(checkpoint: str) -> tuple[Checkpoint, AssistantConfig]:
    """Opens an assistant's folder and reads its shape. Raises CheckpointError."""
    opened = open_checkpoint(checkpoint)
    raw, where = opened.config, str(opened.folder)
    if raw.get("model_type") not in MODEL_TYPES:
        hint = ""
        if raw.get("model_type") in TARGETS:
            hint = ". It is a target: give it as target.checkpoint"
        raise CheckpointError(
            f"checkpoint {where!r} has model_type {raw.get('model_type')!r}; method "
            f"gemma4_mtp reads {', '.join(MODEL_TYPES)}{hint}"
        )
    unified.check_nesting(raw, where)
    # Released assistants leave per-layer inputs out of their text config or set them to 0; they
    # never have any.
    text = dict(text_part(raw))
    text.setdefault("hidden_size_per_layer_input", 0)
    for key in ("hidden_size_per_layer_input", "enable_moe_block", "use_double_wide_mlp"):
        if text.get(key):
            raise CheckpointError(
                f"config.json of {where!r}: {key} is {text[key]!r}; an assistant has none"
            )
    config = read_gemma4_config({**raw, "text_config": text}, where, is_assistant=True)
    centroids = top_k = 0
    is_unified = raw["model_type"] == unified.ASSISTANT
    reader = ConfigReader(raw, where, UNIFIED_DEFAULTS if is_unified else DEFAULTS)
    if raw.get("use_ordered_embeddings"):
        centroids, top_k = reader.count("num_centroids"), reader.count(TOP_K)
        if config.vocab_size % centroids or top_k > centroids:
            raise reader.fail(
                "num_centroids",
                f"a divisor of vocab_size {config.vocab_size}, at least {TOP_K} ({top_k})",
            )
    return opened, AssistantConfig(config, reader.count("backbone_hidden_size"), centroids, top_k)
