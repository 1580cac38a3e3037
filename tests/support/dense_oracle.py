"""transformers' Llama-like decoders as an oracle, MiMo's definition in plain torch, and random
shapes of all of them.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gemma4_oracle import stir
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

CLASSES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "ministral": (MinistralConfig, MinistralForCausalLM),
    "ministral3": (Ministral3Config, Ministral3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "yarn with gains": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "beta_fast": 16.0,
        "truncate": False,
    },
}


def small(**changes: Any) -> dict[str, Any]:
    """Keys that every family shares, in a small shape; every one can be overridden."""
    return {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    } | changes


def random_config(family: str, seed: int) -> dict[str, Any]:
    """A shape drawn over every field that changes a family's computation."""
    draw = random.Random(f"{family} {seed}")
    heads = draw.choice([2, 4, 6])
    layers = draw.randint(1, 5)
    rope = draw.choice(list(ROPES))
    config = small(
        hidden_size=heads * draw.choice([6, 8]),
        intermediate_size=draw.choice([16, 48]),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=draw.choice([n for n in range(1, heads + 1) if heads % n == 0]),
        head_dim=draw.choice([8, 16]),
        rms_norm_eps=draw.choice([1e-6, 1e-3]),
        tie_word_embeddings=draw.random() < 0.4,
        rope_parameters={"rope_type": rope, "rope_theta": draw.choice([1e2, 1e4, 1e6])}
        | ROPES[rope],
    )
    if family == "ministral3":  # contexts end well beyond the original one
        config["rope_parameters"] = {
            "rope_type": "yarn",
            "rope_theta": draw.choice([1e2, 1e4, 1e6]),
            "factor": draw.choice([2.0, 16.0, 64.0]),
            "original_max_position_embeddings": draw.choice([4, 7, 16]),
            "beta_fast": draw.choice([4.0, 32.0]),
            "beta_slow": 1.0,
            "mscale": draw.choice([0.7, 1.0]),
            "mscale_all_dim": draw.choice([0.0, 1.0]),
            "llama_4_scaling_beta": draw.choice([0.0, 0.1, 0.8]),
        }
        return config
    if family in ("llama", "qwen3"):
        config["attention_bias"] = draw.random() < 0.4
    if family == "llama":
        config["mlp_bias"] = draw.random() < 0.4
        if draw.random() < 0.3:
            del config["head_dim"]
    elif family == "mistral":
        config["sliding_window"] = draw.choice([None, 3, 8, 11])
    elif draw.random() < 0.6:
        config |= {"use_sliding_window": True, "sliding_window": draw.choice([3, 8, 11])}
        config["max_window_layers"] = draw.randint(0, layers)
        if draw.random() < 0.5:
            config["layer_types"] = [
                draw.choice(["sliding_attention", "full_attention"]) for _ in range(layers)
            ]
    if family in CLASSES and draw.random() < 0.3:
        config["hidden_act"] = "gelu_pytorch_tanh"
    return config


def make_dense(family: str, config: dict[str, Any], seed: int) -> PreTrainedModel:
    """transformers' model in float32 with stirred weights."""
    config_class, model_class = CLASSES[family]
    model = model_class(config_class(**config)).eval()
    stir(model, seed)
    return model


def oracle(model: PreTrainedModel, prompt: list[int]) -> tuple[Tensor, list[Tensor]]:
    """Logits [len, V] and hidden states [len, D] of an uncached forward; the last is normed."""
    with torch.no_grad():
        out = model(torch.tensor([prompt]), output_hidden_states=True, use_cache=False)
    return out.logits[0], [h[0] for h in out.hidden_states]


def to_old_rope_layout(folder: Path) -> None:
    """Rewrite config.json as transformers 4 wrote it: rope_theta and rope_scaling."""
    file = folder / "config.json"
    raw = json.loads(file.read_text())
    rope = raw.pop("rope_parameters")
    raw["rope_theta"] = rope.pop("rope_theta")
    raw["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    file.write_text(json.dumps(raw))


def to_multimodal_layout(folder: Path) -> None:
    """Rewrite a text model's folder as released around a vision tower: Mistral's wrapper."""
    text = json.loads((folder / "config.json").read_text())
    raw = {"model_type": "mistral3", "text_config": text}
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    tensors["model.vision_tower.ln_pre.weight"] = torch.ones(4)
    save_file(tensors, folder / "model.safetensors")


# MiMo: config.json keys of Qwen2 (XiaomiMiMo/MiMo-7B, modeling_mimo.py), without rope scaling.


def make_mimo(config: dict[str, Any], seed: int, folder: Path) -> dict[str, Tensor]:
    """A MiMo checkpoint on disk with one draft layer beside the model; returns its tensors."""
    draw = torch.Generator().manual_seed(seed)
    d, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], d), "model.norm.weight": (d,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], d)
    blocks = [f"layers.{i}" for i in range(config["num_hidden_layers"])] + ["mtp_layers.0"]
    for block in blocks:
        for name, shape in {
            "self_attn.q_proj.weight": (q, d),
            "self_attn.q_proj.bias": (q,),
            "self_attn.k_proj.weight": (kv, d),
            "self_attn.k_proj.bias": (kv,),
            "self_attn.v_proj.weight": (kv, d),
            "self_attn.v_proj.bias": (kv,),
            "self_attn.o_proj.weight": (d, q),
            "mlp.gate_proj.weight": (inner, d),
            "mlp.up_proj.weight": (inner, d),
            "mlp.down_proj.weight": (d, inner),
            "input_layernorm.weight": (d,),
            "post_attention_layernorm.weight": (d,),
        }.items():
            shapes[f"model.{block}.{name}"] = shape
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        shapes[f"model.mtp_layers.0.{name}.weight"] = (d,)
    shapes["model.mtp_layers.0.input_proj.weight"] = (d, 2 * d)
    tensors = {}
    for name, shape in shapes.items():
        if "norm" in name:
            tensors[name] = torch.rand(shape, generator=draw) + 0.5
        else:
            std = shape[-1] ** -0.5 if len(shape) > 1 else 0.3
            tensors[name] = torch.randn(shape, generator=draw) * std
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    raw = {"model_type": "mimo", "num_nextn_predict_layers": 1} | config
    (folder / "config.json").write_text(json.dumps(raw))
    return tensors


def mimo_logits(w: dict[str, Tensor], config: dict[str, Any], prompt: list[int]) -> Tensor:
    """Logits [len, V], written out from MiMo's definition: Qwen2 blocks, every position at once."""
    dim, eps = config["head_dim"], config["rms_norm_eps"]
    base = config["rope_parameters"]["rope_theta"]
    position = torch.arange(len(prompt)).double()
    angle = position[:, None] / base ** (torch.arange(0, dim, 2).double() / dim)
    cos, sin = (torch.cat((f(angle), f(angle)), -1) for f in (torch.cos, torch.sin))
    ahead = position[:, None] - position

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * w[name].double()

    def linear(x: Tensor, name: str) -> Tensor:
        bias = w.get(f"{name}.bias")
        return F.linear(x, w[f"{name}.weight"].double(), None if bias is None else bias.double())

    def heads(x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, dim)).transpose(0, 1)

    def turn(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    h = w["model.embed_tokens.weight"].double()[prompt]
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}"
        x = norm(h, f"{at}.input_layernorm.weight")
        q, k, v = (heads(linear(x, f"{at}.self_attn.{n}_proj")) for n in "qkv")
        group = config["num_attention_heads"] // config["num_key_value_heads"]
        k, v = turn(k).repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        scores = turn(q) @ k.transpose(1, 2) / dim**0.5
        hidden = ahead < 0
        if config.get("use_sliding_window") and i >= config["max_window_layers"]:
            hidden = hidden | (ahead >= config["sliding_window"])
        p = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        h = h + linear((p @ v).transpose(0, 1).flatten(1), f"{at}.self_attn.o_proj")
        x = norm(h, f"{at}.post_attention_layernorm.weight")
        gate, up = linear(x, f"{at}.mlp.gate_proj"), linear(x, f"{at}.mlp.up_proj")
        h = h + linear(F.silu(gate) * up, f"{at}.mlp.down_proj")
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return norm(h, "model.norm.weight") @ head.double().t()
