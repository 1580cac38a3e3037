"""transformers' Gemma 4 with images as an oracle: random wrappers of every kind of encoder, random
images, and what the processor would hand to it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gemma4_oracle import SLIDING, random_text_config, stir
from torch import Tensor
from transformers import (
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
)
from unified_oracle import ABSENT, random_unified_config

from hydraspec.types import EncodedRows, Image, Span

BOI, IMAGE, EOI = 93, 94, 95  # of the 96 ids of the small text models
SHAPES = ((3, 2), (1, 1), (2, 4), (5, 1))  # columns and rows of the tokens of images


def random_wrapper(seed: int, **changes: Any) -> dict[str, Any]:
    """A wrapper's config drawn over every field of text and tower; every second is unified.
    changes: of the text."""
    draw = random.Random(seed + 1000)
    is_unified = seed % 2 == 1
    text = random_unified_config(seed) if is_unified else random_text_config(seed)
    if SLIDING not in text["layer_types"]:
        text["layer_types"] = [SLIDING, *text["layer_types"][1:]]
        text.pop("num_kv_shared_layers", None)
    text["use_bidirectional_attention"] = draw.choice([None, "vision"])
    text |= changes
    text = {k: v for k, v in text.items() if not (is_unified and k in ABSENT)}
    heads = draw.choice([2, 4])
    tower = {
        "hidden_size": draw.choice([16, 24, 40]),
        "intermediate_size": draw.choice([16, 48]),
        "num_hidden_layers": draw.randint(1, 4),
        "num_attention_heads": heads,
        "num_key_value_heads": draw.choice([heads, heads, heads // 2]),
        "head_dim": draw.choice([8, 12]),
        "patch_size": 2,
        "pooling_kernel_size": draw.choice([2, 3]),
        "position_embedding_size": 24,
        "use_clipped_linears": draw.random() < 0.5,
        "standardize": draw.random() < 0.5,
        "rms_norm_eps": draw.choice([1e-6, 1e-3]),
        "rope_parameters": {"rope_type": "axial", "rope_theta": draw.choice([10.0, 100.0])},
    }
    if is_unified:
        width = draw.choice([16, 24])
        tower = {
            **{"patch_size": 2, "pooling_kernel_size": draw.choice([1, 3])},
            **{"mm_embed_dim": width, "output_proj_dims": width, "mm_posemb_size": 24},
            "rms_norm_eps": draw.choice([1e-6, 1e-3]),
        }
    return {
        **{"model_type": "gemma4_unified" if is_unified else "gemma4"},
        **{"text_config": text, "vision_config": tower, "audio_config": None},
        **{"boi_token_id": BOI, "image_token_id": IMAGE, "eoi_token_id": EOI},
        **{"video_token_id": 258884, "audio_token_id": 258881},
        "tie_word_embeddings": text.get("tie_word_embeddings", True),
    }


def make_wrapper(config: dict[str, Any], seed: int) -> Any:
    """transformers' wrapper in float32 with stirred weights; bounds of clipped maps clamp a few
    activations of many."""
    config = {k: v for k, v in config.items() if k != "model_type"}
    if "mm_embed_dim" in config["vision_config"]:
        model = Gemma4UnifiedForConditionalGeneration(Gemma4UnifiedConfig(**config)).eval()
    else:
        model = Gemma4ForConditionalGeneration(Gemma4Config(**config)).eval()
    stir(model, seed)
    draw = torch.Generator().manual_seed(seed + 1)
    for name, tensor in model.named_buffers():
        if name.endswith(("_min", "_max")):
            bound = 1.0 + torch.rand((), generator=draw)
            tensor.data.copy_(-bound if name.endswith("_min") else bound)
    model.tie_weights()
    return model


def random_image(shape: tuple[int, int], config: dict[str, Any], seed: int) -> Image:
    """An image of `shape` tokens (columns, rows)."""
    vision, pool = config["vision_config"], config["vision_config"]["pooling_kernel_size"]
    side = vision["patch_size"]
    if "mm_embed_dim" in vision:
        side, pool = side * pool, 1
    columns, rows = shape[0] * pool, shape[1] * pool
    draw = np.random.default_rng(seed)
    where = np.stack(np.divmod(np.arange(columns * rows), columns)[::-1], 1)
    patches = draw.random((columns * rows, 3 * side**2), dtype=np.float32)
    return Image(patches=patches, positions=where.astype(np.int64), num_tokens=shape[0] * shape[1])


def padded(images: list[Image], pool: int) -> tuple[Tensor, Tensor]:
    """Pixel values and position ids, padded as the processor pads them."""
    most = max(len(image.patches) for image in images)
    most = -(-most // pool**2) * pool**2
    values = torch.zeros(len(images), most, images[0].patches.shape[1])
    places = torch.full((len(images), most, 2), -1)
    for i, image in enumerate(images):
        values[i, : len(image.patches)] = torch.from_numpy(image.patches)
        places[i, : len(image.patches)] = torch.from_numpy(image.positions)
    return values, places


def oracle_features(model: Any, images: list[Image]) -> list[Tensor]:
    """transformers' embeddings [tokens, D] of each image."""
    vision = model.config.vision_config
    is_unified = hasattr(vision, "mm_embed_dim")
    values, places = padded(images, 1 if is_unified else vision.pooling_kernel_size)
    with torch.no_grad():
        return list(model.model.get_image_features(values, places).pooler_output)


@dataclass
class ImagePrompt:
    """A prompt with images, as both sides read it."""

    token_ids: list[int]
    spans: tuple[Span, ...]
    images: tuple[Image, ...]


def image_prompt(
    parts: list[Any], config: dict[str, Any], digests: list[str] | None = None
) -> ImagePrompt:
    """The prompt of lists of text ids and of images, each of which is put between its two marks."""
    ids: list[int] = []
    spans: list[Span] = []
    images = [part for part in parts if isinstance(part, Image)]
    names = iter(digests or [f"{i:02x}" for i in range(len(images))])
    sees_ahead = config["text_config"]["use_bidirectional_attention"] == "vision"
    for part in parts:
        if not isinstance(part, Image):
            ids += part
            continue
        span = Span(
            kind="image",
            start=len(ids) + 1,
            length=part.num_tokens,
            digest=next(names),
            may_be_cut=not sees_ahead,
        )
        spans.append(span)
        ids += [BOI, *[IMAGE] * part.num_tokens, EOI]
    return ImagePrompt(ids, tuple(spans), tuple(images))


def oracle_inputs(model: Any, prompt: ImagePrompt) -> dict[str, Any]:
    """Arguments of transformers' forward for a prompt. Masks are those that its `generate` prepares
    for compiled caches, where images see ahead on sliding layers alone, within the window: without
    them the unified model's forward of 5.17 lets images see ahead on every layer, which is neither
    what the other models compute nor what other engines do (vLLM's pull request 47217).
    """
    ids = torch.tensor([prompt.token_ids])
    found: dict[str, Any] = {"input_ids": ids, "mm_token_type_ids": (ids == IMAGE).long()}
    text = model.config.text_config
    found["attention_mask"] = model.create_masks_for_generate(
        *(model.config, torch.zeros(1, len(prompt.token_ids), text.hidden_size), None, None),
        torch.arange(len(prompt.token_ids))[None],
        mm_token_type_ids=found["mm_token_type_ids"],
    )
    if prompt.images:
        vision = model.config.vision_config
        pool = 1 if hasattr(vision, "mm_embed_dim") else vision.pooling_kernel_size
        found["pixel_values"], found["image_position_ids"] = padded(list(prompt.images), pool)
    return found


def encoded_rows(target: Any, prompt: ImagePrompt, start: int, stop: int) -> EncodedRows | None:
    """What the engine hands to the forward pass of the rows `start` to `stop`."""
    rows: list[int] = []
    states: list[Tensor] = []
    until = torch.zeros(stop - start, dtype=torch.int64)
    for span, image in zip(prompt.spans, prompt.images, strict=True):
        inside = range(max(start, span.start), min(stop, span.end))
        if not inside:
            continue
        encoded = target.encoder.encode([image])[0]
        states.append(encoded[inside.start - span.start : inside.stop - span.start])
        rows += [p - start for p in inside]
        until[inside.start - start : inside.stop - start] = span.end - 1
    if not rows:
        return None
    return EncodedRows(
        rows=torch.tensor(rows),
        states=torch.cat(states),
        sees_until=until if target.images_see_ahead else None,
    )


def random_image_prompt(config: dict[str, Any], seed: int, num_images: int) -> ImagePrompt:
    """Text, then images of several sizes with text between and after them."""
    draw = random.Random(seed)
    parts: list[Any] = [[draw.randrange(3, 90) for _ in range(draw.randint(1, 5))]]
    for i in range(num_images):
        parts.append(random_image(draw.choice(SHAPES), config, 100 * seed + i))
        parts.append([draw.randrange(3, 90) for _ in range(draw.randint(0, 4))])
    parts.append([draw.randrange(3, 90) for _ in range(2)])
    return image_prompt(parts, config)


def oracle_image_logits(model: Any, prompt: ImagePrompt) -> Tensor:
    """Logits [len, V] of an uncached forward."""
    with torch.no_grad():
        return model(**oracle_inputs(model, prompt), output_hidden_states=True).logits[0]
