"""Random checkpoints with MTP layers in every layout, and ones whose drafts are often right."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from deepseek_oracle import deepseek_config, make_deepseek, random_deepseek_config
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

NAMES = {
    "deepseek": ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
    "mimo": ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
    "speculators": ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
}
KINDS = tuple(NAMES)
VOCAB = 24  # of agreeable targets


def qwen_config(**changes: Any) -> dict[str, Any]:
    return {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    } | changes


def random_config(kind: str, seed: int) -> dict[str, Any]:
    if kind == "deepseek":
        return random_deepseek_config(seed)
    draw = random.Random(seed)
    heads = draw.choice([2, 4])
    size = draw.choice([24, 32])
    return qwen_config(
        hidden_size=size,
        num_attention_heads=heads,
        num_key_value_heads=draw.choice([1, 2, heads]),
        # Qwen2's head size follows from its width.
        head_dim=size // heads if kind == "mimo" else draw.choice([8, 12]),
        intermediate_size=draw.choice([16, 40]),
        num_hidden_layers=draw.randint(1, 3),
        rms_norm_eps=draw.choice([1e-6, 1e-3]),
        tie_word_embeddings=draw.random() < 0.3,
        rope_parameters={"rope_type": "default", "rope_theta": draw.choice([1e2, 1e4])},
    )


def stirred(model: nn.Module, seed: int) -> nn.Module:
    draw = torch.Generator().manual_seed(seed)
    for name, tensor in model.named_parameters():
        if "norm" in name:
            tensor.data.copy_(torch.rand(tensor.shape, generator=draw) + 0.5)
        else:
            std = tensor.shape[-1] ** -0.5 if tensor.dim() > 1 else 0.3
            tensor.data.copy_(torch.randn(tensor.shape, generator=draw) * std)
    return model


def write_mtp(
    folder: Path, kind: str, config: dict[str, Any], num_mtp: int, seed: int
) -> tuple[Path, Path]:
    """Folders of the target and of the MTP layers (the same but for speculators).

    The MTP blocks are further layers of a deeper model, renamed; what is MTP's own is random.
    """
    layers = config["num_hidden_layers"]
    deeper = config | {"num_hidden_layers": layers + num_mtp}
    if kind == "deepseek":
        model: nn.Module = make_deepseek(deeper, seed)
    elif kind == "mimo":
        model = stirred(Qwen2ForCausalLM(Qwen2Config(**deeper)), seed)
    else:
        model = stirred(Qwen3ForCausalLM(Qwen3Config(**deeper)), seed)
    model.save_pretrained(folder)
    raw = json.loads((folder / "config.json").read_text())
    raw |= {"num_hidden_layers": layers, "num_nextn_predict_layers": num_mtp}
    raw.pop("layer_types", None)
    if kind == "mimo":
        raw["model_type"] = "mimo"
    tensors = load_file(folder / "model.safetensors")
    mtp = mtp_tensors(kind, config, layers, num_mtp, tensors, seed)
    if kind != "speculators":
        (folder / "config.json").write_text(json.dumps(raw))
        save_file(tensors | mtp, folder / "model.safetensors", metadata={"format": "pt"})
        return folder, folder
    raw.pop("num_nextn_predict_layers")
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    drafter = folder / "drafter"
    drafter.mkdir()
    ours = {
        "speculators_model_type": "mtp",
        "num_nextn_predict_layers": num_mtp,
        "transformer_layer_config": raw,
    }
    (drafter / "config.json").write_text(json.dumps(ours))
    save_file(mtp, drafter / "model.safetensors", metadata={"format": "pt"})
    return folder, drafter


def mtp_tensors(
    kind: str,
    config: dict[str, Any],
    layers: int,
    num_mtp: int,
    tensors: dict[str, Tensor],
    seed: int,
) -> dict[str, Tensor]:
    """Take the blocks behind the target's layers out of `tensors`, and add MTP's own weights."""
    draw, size = torch.Generator().manual_seed(seed + 1), config["hidden_size"]
    found: dict[str, Tensor] = {}
    for i in range(num_mtp):
        old, new = f"model.layers.{layers + i}.", f"model.layers.{layers + i}."
        if kind != "deepseek":
            new = f"model.mtp_layers.{i}." if kind == "mimo" else f"mtp_layers.{i}."
        for name in [name for name in tensors if name.startswith(old)]:
            found[new + name.removeprefix(old)] = tensors.pop(name)
        *norms, projection, last = NAMES[kind]
        for norm in (*norms, last):
            found[f"{new}{norm}.weight"] = torch.rand(size, generator=draw) + 0.5
        matrix = torch.randn(size, 2 * size, generator=draw) * (2 * size) ** -0.5
        found[f"{new}{projection}.weight"] = matrix
        if kind == "deepseek":  # releases hold copies; these must not be read
            copy = torch.full((config["vocab_size"], size), torch.nan)
            found[f"{new}embed_tokens.weight"] = copy
            found[f"{new}shared_head.head.weight"] = copy.clone()
    return found


def agreeable(kind: str, folder: Path, num_mtp: int, weight: float, seed: int) -> Path:
    """A target of few tokens, and MTP layers that are often right and often wrong.

    The target mostly maps a token's embedding to the next token, its layers weigh in by `weight`;
    the MTP layer passes the embedding on, and its block weighs in as much. So they agree unless
    what they read besides tips the balance.
    """
    sizes = {"vocab_size": VOCAB, "num_hidden_layers": 2, "max_position_embeddings": 96}
    config = deepseek_config(**sizes) if kind == "deepseek" else qwen_config(**sizes)
    write_mtp(folder, kind, config, num_mtp, seed)
    tensors = load_file(folder / "model.safetensors")
    eye = torch.eye(config["hidden_size"])
    token_norm, _, projection, last = NAMES[kind]
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.mul_(weight)
        elif name.endswith(f"{projection}.weight"):
            parts = (eye, 0.2 * weight * tensor[:, : len(eye)])
            tensor.copy_(torch.cat(parts if kind == "deepseek" else parts[::-1], 1))
        elif name.endswith(f"{last}.weight"):
            tensor.copy_(tensors["model.norm.weight"])
        elif name.endswith(f"{token_norm}.weight"):
            tensor.fill_(1.0)
        elif name == "model.embed_tokens.weight":
            tensor.div_(tensor.pow(2).mean(-1, keepdim=True).sqrt())
            tensors["lm_head.weight"].copy_(tensor.roll(1, 0) * len(eye) ** -0.5)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
