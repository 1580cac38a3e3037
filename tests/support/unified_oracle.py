"""transformers' Gemma 4 unified (the 12B) as an oracle: random text models, assistants, and the
released layout, a wrapper with the projections of images and sounds.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from gemma4_oracle import FULL, SLIDING, random_text_config, stir, text_config
from safetensors.torch import load_file
from transformers import (
    Gemma4UnifiedAssistantConfig,
    Gemma4UnifiedAssistantForCausalLM,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForCausalLM,
    Gemma4UnifiedForConditionalGeneration,
    Gemma4UnifiedTextConfig,
)

ABSENT = (  # in a unified text model
    *("hidden_size_per_layer_input", "vocab_size_per_layer_input", "enable_moe_block"),
    *("num_experts", "top_k_experts", "moe_intermediate_size"),
)
# Released files have these keys of Gemma 4, which say that there is nothing of the kind.
RELEASED = {
    **{"enable_moe_block": False, "num_experts": None, "top_k_experts": None},
    **{"moe_intermediate_size": None, "hidden_size_per_layer_input": 0},
    **{"vocab_size_per_layer_input": 262144, "use_bidirectional_attention": "vision"},
}


def unified_config(**changes: Any) -> dict[str, Any]:
    """Arguments of a small Gemma4UnifiedTextConfig; every one can be overridden."""
    return {k: v for k, v in text_config(**changes).items() if k not in ABSENT}


def random_unified_config(seed: int) -> dict[str, Any]:
    """A shape drawn over every field of a unified text model; it has layers of both kinds, without
    which transformers' assistants do not run."""
    config = {k: v for k, v in random_text_config(seed).items() if k not in ABSENT}
    if SLIDING not in config["layer_types"]:
        config["layer_types"] = [SLIDING, *config["layer_types"][1:]]
        config.pop("num_kv_shared_layers", None)  # they may leave no full layer with KV
    return config


def make_unified(config: dict[str, Any], seed: int) -> Gemma4UnifiedForCausalLM:
    """transformers' text model in float32 with stirred weights."""
    model = Gemma4UnifiedForCausalLM(Gemma4UnifiedTextConfig(**config)).eval()
    stir(model, seed)
    return model


def draft_config(target: dict[str, Any], seed: int) -> dict[str, Any]:
    """A text config of an assistant for a target: its KV shapes, window and kinds of layers."""
    draw = random.Random(seed)
    kinds = [kind for kind in (SLIDING, FULL) if kind in target["layer_types"]]
    layers = draw.randint(len(kinds), 4)
    return target | {
        "hidden_size": draw.choice([16, 24]),
        "intermediate_size": draw.choice([16, 40]),
        "num_hidden_layers": layers,
        "num_kv_shared_layers": layers,
        "layer_types": [draw.choice(kinds) for _ in range(layers - len(kinds))] + kinds,
        "use_double_wide_mlp": False,
        "final_logit_softcapping": None,
        "tie_word_embeddings": True,
    }


def make_unified_assistant(
    text: dict[str, Any], seed: int, **top: Any
) -> Gemma4UnifiedAssistantForCausalLM:
    """transformers' assistant in float32 with stirred weights."""
    config = Gemma4UnifiedAssistantConfig(text_config=Gemma4UnifiedTextConfig(**text), **top)
    model = Gemma4UnifiedAssistantForCausalLM(config).eval()
    stir(model, seed)
    return model


def to_wrapper(folder: Path, config: dict[str, Any]) -> None:
    """Rewrite a text model's folder as the 12B is released: by transformers' own writer, which
    names the tensors of images and sounds, with a config in the released layout.
    """
    text = load_file(folder / "model.safetensors")
    whole = Gemma4UnifiedForConditionalGeneration(
        Gemma4UnifiedConfig(
            text_config=Gemma4UnifiedTextConfig(**config),
            vision_config={
                **{"patch_size": 2, "mm_embed_dim": 8, "mm_posemb_size": 6},
                "output_proj_dims": 8,
            },
            audio_config={"audio_embed_dim": 4},
            tie_word_embeddings=config.get("tie_word_embeddings", True),
        )
    )
    named = {name.replace("model.", "model.language_model.", 1): t for name, t in text.items()}
    missing, unexpected = whole.load_state_dict(named, strict=False)
    assert not unexpected
    assert all("embed_" in name or name == "lm_head.weight" for name in missing)
    whole.tie_weights()
    whole.save_pretrained(folder)
    file = folder / "config.json"
    raw = json.loads(file.read_text())
    nested = raw["text_config"] | RELEASED
    nested.pop("per_layer_config")
    nested["global_head_dim"] = config["global_head_dim"]
    nested["num_global_key_value_heads"] = config["num_global_key_value_heads"]
    file.write_text(json.dumps(raw | {"text_config": nested}))


def other_tensors(folder: Path) -> set[str]:
    """Names of a folder's tensors of images and sounds."""
    names = load_file(folder / "model.safetensors")
    return {name for name in names if not name.startswith(("model.language_model.", "lm_head."))}


def random_prompts(seed: int, vocab_size: int = 96) -> list[list[int]]:
    """Prompts shorter than, about and well beyond the windows."""
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (n,), generator=draw).tolist() for n in (3, 12, 34)]
