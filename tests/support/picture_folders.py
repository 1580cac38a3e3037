"""Folders of small Gemma 4 wrappers that read pictures, with a tokenizer and a chat template that
has a place for them; and transformers' processor for such a folder as an oracle.
"""

from __future__ import annotations

import json
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gemma4_oracle import FULL, SLIDING, text_config
from PIL import Image as Pillow
from transformers import AutoTokenizer
from transformers.models.gemma4 import image_processing_pil_gemma4 as without_torchvision
from unified_oracle import ABSENT
from vision_oracle import make_wrapper

from hydraspec.models.checkpoint.reader import resolve_folder
from hydraspec.types import Picture, Request, SamplingParams

TOKENS = {
    **{"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>"},
    **{"audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>"},
}
TEMPLATE = (
    "{{ bos_token }}"
    "{%- for message in messages -%}"
    "{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}"
    "{{ '<|turn>' + role + '\n' }}"
    "{%- if message['content'] is string -%}{{ message['content'] | trim }}"
    "{%- else -%}{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'image' -%}{{ '<|image|>' }}{%- else -%}{{ part['text'] | trim }}"
    "{%- endif -%}{%- endfor -%}{%- endif -%}"
    "{{ '<turn|>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|turn>model\n' }}{%- endif -%}"
)
VOCAB_SIZE = 774  # 768 tokens of the zoo, then six of TOKENS
IMAGE_ID, BEGIN_ID, END_ID = 768, 769, 770
TOWER = {
    **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "position_embedding_size": 1200},
}
PROJECTION = {  # of the 12B, which has no tower
    **{"patch_size": 16, "pooling_kernel_size": 3, "mm_posemb_size": 1200},
    **{"mm_embed_dim": 16, "output_proj_dims": 16},
}


def wrapper_config(
    *, bidirectional: bool = False, unified: bool = False, **changes: Any
) -> dict[str, Any]:
    """A wrapper's config in the zoo's vocabulary. changes: of the top level."""
    text = text_config(
        vocab_size=VOCAB_SIZE,
        layer_types=[SLIDING, FULL],
        num_hidden_layers=2,
        max_position_embeddings=1024,
        use_bidirectional_attention="vision" if bidirectional else None,
    )
    ids = {"image_token_id": IMAGE_ID, "boi_token_id": BEGIN_ID, "eoi_token_id": END_ID}
    wrapper = {"text_config": text, "vision_config": TOWER, "audio_config": None}
    kind = "gemma4"
    if unified:
        kind = "gemma4_unified"
        text = {key: value for key, value in text.items() if key not in ABSENT}
        wrapper |= {"text_config": text, "vision_config": PROJECTION}
    return {"model_type": kind, **wrapper, **ids, **changes}


def write_tokenizer(folder: Path, template: str = TEMPLATE) -> None:
    """Write the zoo's tokenizer with tokens of pictures into a folder."""
    tokenizer = AutoTokenizer.from_pretrained(
        resolve_folder("zoo:tiny_gemma4"), extra_special_tokens=TOKENS
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


def write_wrapper(folder: Path, *, seed: int = 0, max_soft_tokens: int = 70, **how: Any) -> Any:
    """Write a random wrapper, its tokenizer and its processor's file; returns transformers' model.
    Rows of pictures are long, so that tokens depend on them. how: see `wrapper_config`.
    """
    model = make_wrapper(wrapper_config(**how), seed)
    for name, weight in model.model.embed_vision.named_parameters():
        if name.endswith("embedding_projection.weight"):
            weight.data *= 20
    model.save_pretrained(folder)
    write_tokenizer(folder)
    content = {"image_processor": {"max_soft_tokens": max_soft_tokens, "patch_size": 16}}
    (folder / "processor_config.json").write_text(json.dumps(content))
    return model


@pytest.fixture
def processor(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers' processor of such a folder, with at most 70 tokens a picture. It resamples with
    Pillow, and does without parts that read sounds and videos."""
    module = "transformers.models.gemma4.image_processing_gemma4"  # its import needs torchvision
    monkeypatch.setitem(sys.modules, module, without_torchvision)
    from transformers.models.gemma4.processing_gemma4 import Gemma4Processor

    monkeypatch.setattr(Gemma4Processor, "check_argument_for_proper_class", lambda *_: None)
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Gemma4Processor(
        feature_extractor=None,
        image_processor=without_torchvision.Gemma4ImageProcessorPil(max_soft_tokens=70),
        tokenizer=AutoTokenizer.from_pretrained(folder),
        video_processor=None,
    )


def drawn(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Noise over a gradient [height, width, 3] uint8: another filter, or none before it, moves many
    values by more than the few levels by which Pillow's and torch's rounding differ."""
    rng = np.random.default_rng([seed, height, width])
    ramp = np.add.outer(np.arange(height) * 3, np.arange(width) * 2)[..., None] % 200
    return (ramp + rng.integers(0, 56, (height, width, 3))).astype(np.uint8)


def encoded(kind: str, pixels: np.ndarray | Pillow.Image, **options: Any) -> bytes:
    """The file of a picture in a format that Pillow names."""
    picture = pixels if isinstance(pixels, Pillow.Image) else Pillow.fromarray(pixels)
    target = BytesIO()
    picture.save(target, kind, **options)
    return target.getvalue()


def shown(*parts: str | np.ndarray | Picture, index: int = 0, max_tokens: int = 8) -> Request:
    """A request of one message of a user: texts, and pictures as pixels or files."""
    content: list[dict[str, str]] = []
    pictures: list[Picture] = []
    for part in parts:
        if isinstance(part, str):
            content.append({"type": "text", "text": part})
            continue
        content.append({"type": "image"})
        is_file = isinstance(part, Picture)
        pictures.append(part if is_file else Picture(name="drawn", content=encoded("PNG", part)))
    return Request(
        index=index,
        id=f"r{index}",
        sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        messages=[{"role": "user", "content": content}],
        pictures=tuple(pictures),
    )
