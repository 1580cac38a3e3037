"""Shapes and training settings of the zoo's target that reads pictures, and of its drafters."""

from __future__ import annotations

from typing import Any

from transformers import Gemma4Config

from hydraspec.models.pictures.format import PictureFormat
from hydraspec.zoo.recipe.assistant_recipes import AssistantRecipe
from hydraspec.zoo.recipe.draft_heads import LayerShape
from hydraspec.zoo.recipe.recipes import (
    GEMMA4_COMMON,
    TARGETS,
    DraftRecipe,
    TargetRecipe,
    Training,
)

NAME = "tiny_gemma4_images"
START = "tiny_gemma4_unified"  # the text model, and the assistant, that training begins with
BEGIN_ID, IMAGE_ID, END_ID = 183, 184, 185  # bytes 0xF5 to 0xF7, which no text in UTF-8 holds
# Pictures of workload=images have cells of 32 pixels; a token stands for 12 x 12 pixels.
FORM = PictureFormat(
    patch_size=6,
    pooling=2,
    max_tokens=70,
    max_positions=140,
    begin_id=BEGIN_ID,
    image_id=IMAGE_ID,
    end_id=END_ID,
    may_be_cut=False,
)
VISION: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "patch_size": FORM.patch_size,
    "pooling_kernel_size": FORM.pooling,
    "position_embedding_size": FORM.max_positions,
    "standardize": True,
}
# The shape of `START`, as the sizes with a tower have it: an image's rows see each other in
# sliding layers.
TEXT: dict[str, Any] = {
    **GEMMA4_COMMON,
    **TARGETS[START].shape,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "use_bidirectional_attention": "vision",
}
# The tower alone, with heads that name and count the shapes of a picture.
TOWER = Training(steps=1200, learning_rate=3e-3, weight_decay=0.01, batch_size=32, seed=6)
# Tower and text model together; a step has the numbers of texts of `PARTS`.
TARGET = TargetRecipe(
    shape=TEXT, start=START, steps=800, batch_size=14, learning_rate=6e-4, weight_decay=0.01
)
NUM_SCENES, NUM_TEXTS, NUM_DRAFTER_TEXTS = 12_000, 14_000, 4_000
PARTS = (4, 8, 2)  # of 14 texts of a step: without a picture, with one, with two
ASSISTANT = AssistantRecipe(
    teacher=START, steps=60, batch_size=14, learning_rate=1e-3, weight_decay=0.01
)
EAGLE3 = DraftRecipe(
    kind="eagle3",
    target=NAME,
    layer=LayerShape(hidden_size=96, intermediate_size=96, num_kv_heads=1),
    aux_layer_ids=(2, 6, 10),
    draft_vocab_size=512,
    norm_before_fc=True,
    supports_mm_inputs=True,
    batch_size=14,
    steps=360,
)


def wrapper_config() -> Gemma4Config:
    """A new config of the whole model."""
    return Gemma4Config(
        text_config={**TEXT, "model_type": "gemma4_text"},
        vision_config=VISION,
        boi_token_id=BEGIN_ID,
        image_token_id=IMAGE_ID,
        eoi_token_id=END_ID,
        tie_word_embeddings=True,
    )
