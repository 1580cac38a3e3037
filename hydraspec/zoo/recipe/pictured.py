"""The target that reads pictures: its wrapper of transformers, run with shapes that no data
decides, its tokenizer, and its files.

Letters as in `pictured_texts.py`; D width of the text model, E width of the tower.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from hydraspec.zoo.recipe.modeling import (
    GENERIC,
    Masks,
    TargetOutput,
    gemma4_layout,
    initialise,
    load_target,
    run_target,
    vary_layer_scalars,
    write_json,
)
from hydraspec.zoo.recipe.pictured_recipes import (
    BEGIN_ID,
    END_ID,
    FORM,
    IMAGE_ID,
    START,
    TARGET,
    wrapper_config,
)
from hydraspec.zoo.recipe.pictured_texts import SLOTS, PicturedTexts, Pictures
from hydraspec.zoo.recipe.recipes import CHECKPOINTS, FULL, SLIDING
from hydraspec.zoo.recipe.tokenizer import CHAT_TEMPLATE

BYTES = {"õ": BEGIN_ID, "ö": IMAGE_ID, "÷": END_ID}  # as the byte alphabet writes 0xF5 to 0xF7
MARKS = {BEGIN_ID: "<|image>", IMAGE_ID: "<|image|>", END_ID: "<image|>"}
_TEXT = "{{ '<|turn>' + role + '\n' + message['content'] | trim + '<turn|>\n' }}"
_PARTS = (
    "{{ '<|turn>' + role + '\n' }}"
    "{%- if message['content'] is string -%}{{ message['content'] | trim }}"
    "{%- else -%}{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'image' -%}{{ '<|image|>' }}"
    "{%- else -%}{{ part['text'] | trim }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    "{{ '<turn|>\n' }}"
)
TEMPLATE = CHAT_TEMPLATE.replace(_TEXT, _PARTS)


def text_of(wrapper: Any) -> Gemma4ForCausalLM:
    """The text model of a wrapper, which shares its weights."""
    text = Gemma4ForCausalLM(wrapper.config.text_config)
    text.model, text.lm_head = wrapper.model.language_model, wrapper.lm_head
    text.generation_config = wrapper.generation_config
    return text


def build() -> Gemma4ForConditionalGeneration:
    """The wrapper before training: the text model of `START`, and a tower drawn at random."""
    wrapper = Gemma4ForConditionalGeneration(wrapper_config())
    initialise(wrapper, TARGET.seed)
    text = text_of(wrapper)
    vary_layer_scalars(text)
    text.load_state_dict(load_target(CHECKPOINTS / START).state_dict())
    tower: Any = wrapper.model.vision_tower
    with torch.no_grad():
        tower.patch_embedder.position_embedding_table.mul_(0.5)
        tower.std_bias.zero_()
        tower.std_scale.fill_(1.0)
    wrapper.tie_weights()
    return wrapper


def pooled_tokens(tower: Any, pictures: Pictures) -> Tensor:
    """The tower's tokens [P, S, E] before they are standardised, in float32 or wider."""
    device = pictures.patches.device
    values = pictures.patches.float().flatten(1, 2) / 255
    positions = pictures.positions.long().flatten(1, 2)
    is_real = torch.arange(SLOTS, device=device)[None] < pictures.num_tokens[:, None]
    is_real = is_real.repeat_interleave(FORM.pooling**2, 1)
    h = tower.patch_embedder(values, positions, ~is_real)
    rope = tower.encoder.rotary_emb(h, positions)
    mask = is_real[:, None, None].expand(-1, -1, is_real.shape[1], -1)
    for layer in tower.encoder.layers:
        h = layer(h, attention_mask=mask, position_embeddings=rope, position_ids=positions)
    pooled = h.unflatten(1, (SLOTS, -1)).float().mean(2)
    scaled: Tensor = pooled * tower.config.hidden_size**0.5
    return scaled


def picture_rows(wrapper: Any, pictures: Pictures) -> Tensor:
    """The rows [P, S, D] that stand in the text model's embeddings; padding is not zero."""
    tower = wrapper.model.vision_tower
    pooled = (pooled_tokens(tower, pictures) - tower.std_bias) * tower.std_scale
    rows: Tensor = wrapper.model.embed_vision(pooled)
    return rows


def embed(wrapper: Any, batch: PicturedTexts) -> Tensor:
    """Embeddings [B, T, D] of texts, with the pictures' rows in place of placeholders."""
    x: Tensor = wrapper.model.language_model.embed_tokens(batch.tokens)
    if not len(batch.pictures):
        return x
    rows = picture_rows(wrapper, batch.pictures).flatten(0, 1)[batch.places.clamp(min=0)]
    return torch.where(batch.places[..., None] >= 0, rows.to(x.dtype), x)


def sight(places: Tensor, window: int) -> Masks:
    """Boolean masks [B, 1, T, T] by layer type: rows of a picture see each other in sliding layers,
    whichever comes first."""
    at = torch.arange(places.shape[1], device=places.device)
    back = at[:, None] - at
    picture = torch.where(places < 0, -1, places // SLOTS)
    same = (picture[:, :, None] == picture[:, None]) & (picture >= 0)[:, None]
    causal = (back >= 0).expand_as(same)
    return {FULL: causal[:, None], SLIDING: ((causal | same) & (back < window))[:, None]}


def run(
    wrapper: Any, text: PreTrainedModel, batch: PicturedTexts, aux_layer_ids: Sequence[int] = ()
) -> tuple[TargetOutput, Tensor]:
    """Outputs of an uncached pass over texts, and their embeddings [B, T, D]."""
    embedded = embed(wrapper, batch)
    masks = sight(batch.places, text.config.sliding_window)
    return run_target(text, batch.tokens, masks, aux_layer_ids, embedded=embedded), embedded


# ------------------------------------------------------------------ files


def save_tokenizer(folder: Path) -> None:
    """Write the zoo's tokenizer with marks of pictures in place of bytes that no text holds, the
    chat template with a place for pictures, and the processor's file."""
    source = CHECKPOINTS / START
    folder.mkdir(parents=True, exist_ok=True)
    content = json.loads((source / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    for byte, token in BYTES.items():
        assert vocabulary.pop(byte) == token, f"{byte!r} is another token"
        vocabulary[MARKS[token]] = token
        last = dict(content["added_tokens"][-1])
        content["added_tokens"].append(last | {"id": token, "content": MARKS[token]})
    content["model"]["vocab"] = dict(sorted(vocabulary.items(), key=lambda item: item[1]))
    (folder / "tokenizer.json").write_text(json.dumps(content, indent=2, ensure_ascii=False))
    settings = json.loads((source / "tokenizer_config.json").read_text())
    names = ("boi_token", "image_token", "eoi_token")
    settings |= dict(zip(names, MARKS.values(), strict=True))
    settings["extra_special_tokens"] += MARKS.values()
    write_json(folder / "tokenizer_config.json", settings)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokens = PreTrainedTokenizerFast.from_pretrained(str(folder))
    assert [tokens.convert_tokens_to_ids(mark) for mark in MARKS.values()] == list(MARKS)


def save_target(wrapper: Any, folder: Path, stop_tokens: list[int]) -> None:
    """Write the whole model in bfloat16, in the layout of the released checkpoints."""
    generation = wrapper.generation_config
    generation.bos_token_id, generation.pad_token_id = 2, 0
    generation.eos_token_id = stop_tokens
    wrapper.to(torch.bfloat16).save_pretrained(str(folder))
    (folder / "model.safetensors").chmod(0o644)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] = gemma4_layout(config["text_config"])
    config["text_config"].pop("dtype", None)
    vision = config["vision_config"]
    config["vision_config"] = {k: v for k, v in vision.items() if k not in (*GENERIC, "dtype")}
    config["eos_token_id"] = config["text_config"]["eos_token_id"] = stop_tokens
    write_json(folder / "config.json", config)
    processor = {
        "image_processor_type": "Gemma4ImageProcessor",
        "max_soft_tokens": FORM.max_tokens,
        "patch_size": FORM.patch_size,
        "pooling_kernel_size": FORM.pooling,
    }
    write_json(
        folder / "processor_config.json",
        {
            "image_processor": processor,
            "image_seq_length": FORM.max_tokens,
            "processor_class": "Gemma4Processor",
        },
    )


def load(folder: Path, device: torch.device | str = "cpu") -> Gemma4ForConditionalGeneration:
    """The wrapper of a folder, in float32, for evaluation."""
    found = Gemma4ForConditionalGeneration.from_pretrained(str(folder), dtype=torch.float32)
    return found.to(device).eval()
