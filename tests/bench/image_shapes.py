"""Folders in the public shapes of Gemma 4 that read images: a config with the released encoder, and
the files that transformers' processor, and vLLM with it, read beside it. They hold no weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hydraspec.shipped import SHAPES

SMALL = {  # E2B and E4B
    **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 16},
    **{"num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": 64},
    **{"standardize": False, "use_clipped_linears": True},
}
LARGE = {  # 26B-A4B and 31B
    **{"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27},
    **{"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 72},
    **{"standardize": True, "use_clipped_linears": False},
}
SHARED = {
    **{"patch_size": 16, "pooling_kernel_size": 3, "position_embedding_size": 10240},
    "default_output_length": 280,  # vLLM needs it; transformers has no default
    **{"rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0}},
}
TOWERS = {"e2b": SMALL, "e4b": SMALL, "26b_a4b": LARGE, "31b": LARGE}  # by the name of the shape
IDS = {"boi_token_id": 255999, "image_token_id": 258880, "eoi_token_id": 258882}
TOKENS = {
    **{"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3, "<|image>": 255999, "<|audio>": 256000},
    **{"<|image|>": 258880, "<|audio|>": 258881, "<image|>": 258882, "<audio|>": 258883},
    "<|video|>": 258884,
}
# The processor reads the tokens of audio too, and refuses every prompt of a tokenizer without them.
NAMES = {
    **{"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"},
    **{"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>"},
    **{"audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>"},
}
PROCESSOR = {
    "processor_class": "Gemma4Processor",
    "image_processor": {
        **{"image_processor_type": "Gemma4ImageProcessor", "max_soft_tokens": 280},
        **{"patch_size": 16, "pooling_kernel_size": 3},
    },
    "feature_extractor": {"feature_extractor_type": "Gemma4AudioFeatureExtractor"},
    "video_processor": {"video_processor_type": "Gemma4VideoProcessor"},
}


def write_shape(folder: Path, name: str) -> None:
    """Write the folder of a shape in TOWERS. Its tokenizer has the special tokens alone, at their
    released ids: prompts are given as ids."""
    text = json.loads((SHAPES / f"gemma4_{name}" / "config.json").read_bytes())
    del text["architectures"]
    if TOWERS[name] is LARGE:
        text["use_bidirectional_attention"] = "vision"
    config: dict[str, Any] = {
        **{"model_type": "gemma4", "architectures": ["Gemma4ForConditionalGeneration"]},
        **{"dtype": text["dtype"], "text_config": text, "audio_config": None, **IDS},
        "vision_config": {"model_type": "gemma4_vision", **TOWERS[name], **SHARED},
        **{"vision_soft_tokens_per_image": 280, "tie_word_embeddings": True},
    }
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": token, "special": True, **plain} for token, i in TOKENS.items()
        ],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": TOKENS, "unk_token": "<unk>"},
    }
    files = {
        "config.json": config,
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", **NAMES},
        "processor_config.json": PROCESSOR,
    }
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        (folder / file).write_text(json.dumps(content), encoding="utf-8")
