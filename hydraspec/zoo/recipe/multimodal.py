"""Mistral's wrapper around a text model, as Ministral 3 is released: a vision tower, a projector
and the text model in one file. The tower of the zoo is drawn at random, and no text reads it.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import (
    Ministral3ForCausalLM,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PixtralVisionConfig,
    PreTrainedModel,
)

MODEL_TYPE = "mistral3"
TOWER_SEED = 4
IMAGE_TOKEN_ID = 3


def wrap(text: PreTrainedModel) -> Mistral3ForConditionalGeneration:
    """The wrapped model, which shares the text model's weights."""
    tower = PixtralVisionConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=16,
        patch_size=4,
    )
    config = Mistral3Config(
        vision_config=tower,
        text_config=text.config,
        image_token_index=IMAGE_TOKEN_ID,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(TOWER_SEED)
        model = Mistral3ForConditionalGeneration(config)
    model.to(text.dtype)
    model.model.language_model = text.model
    model.lm_head = text.lm_head
    model.generation_config = text.generation_config
    return model


def unwrap(folder: Path) -> PreTrainedModel:
    """The text model of a wrapped checkpoint's folder, in float32."""
    wrapped = Mistral3ForConditionalGeneration.from_pretrained(str(folder), dtype=torch.float32)
    text = Ministral3ForCausalLM(wrapped.config.text_config)
    text.model, text.lm_head = wrapped.model.language_model, wrapped.lm_head
    assert wrapped.generation_config is not None
    text.generation_config = wrapped.generation_config
    return text


def write_stop_tokens(folder: Path, stop_tokens: list[int]) -> None:
    """Write the stop tokens into both configs of a wrapped checkpoint, with keys in order, and the
    type once."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for inner in (config["text_config"], config["vision_config"]):
        inner.pop("dtype", None)
    config["eos_token_id"] = config["text_config"]["eos_token_id"] = stop_tokens
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
