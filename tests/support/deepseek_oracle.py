"""transformers' DeepSeek-V3 as an oracle: random shapes, and checkpoints in both layouts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM


def deepseek_config(**changes: Any) -> dict[str, Any]:
    """Arguments of a small DeepseekV3Config: a dense layer, then experts; YaRN as released."""
    return {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 12,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_shared_experts": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 12,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "max_position_embeddings": 256,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    } | changes


def random_deepseek_config(seed: int) -> dict[str, Any]:
    """A shape drawn over every field that changes the computation."""
    draw = random.Random(seed)
    layers, heads = draw.randint(1, 4), draw.choice([1, 2, 3, 4])
    groups, per_group = draw.choice([1, 2, 4]), draw.choice([2, 3, 4])
    kept = draw.randint(1, groups)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": draw.choice([1e2, 1e4])}
    if draw.random() < 0.6:
        rope |= {
            "rope_type": "yarn",
            "factor": draw.choice([2.0, 4.0, 40.0]),
            "original_max_position_embeddings": draw.choice([16, 64]),
            "beta_fast": draw.choice([4, 32]),
            "beta_slow": draw.choice([1, 2]),
        }
        mscales = [{}, {"mscale": 1.0, "mscale_all_dim": 1.0}, {"mscale": 0.707}]
        mscales += [{"mscale": 1.0, "mscale_all_dim": 0.5}, {"mscale_all_dim": 0.7}]
        mscales += [{"attention_factor": 1.3}]
        rope |= draw.choice(mscales)
    return deepseek_config(
        hidden_size=draw.choice([24, 32, 40]),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        n_shared_experts=draw.choice([1, 2]),
        n_routed_experts=groups * per_group,
        num_experts_per_tok=draw.randint(1, min(4, kept * per_group)),
        n_group=groups,
        topk_group=kept,
        norm_topk_prob=draw.random() < 0.7,
        routed_scaling_factor=draw.choice([1.0, 2.5]),
        first_k_dense_replace=draw.randint(0, layers),
        kv_lora_rank=draw.choice([8, 16]),
        q_lora_rank=draw.choice([None, 8, 12]),
        qk_nope_head_dim=draw.choice([6, 12]),
        qk_rope_head_dim=draw.choice([4, 8]),
        v_head_dim=draw.choice([6, 10]),
        rms_norm_eps=draw.choice([1e-6, 1e-3]),
        rope_interleave=draw.random() < 0.7,
        attention_bias=draw.random() < 0.3,
        tie_word_embeddings=draw.random() < 0.2,
        rope_parameters=rope,
    )


def make_deepseek(config: dict[str, Any], seed: int) -> DeepseekV3ForCausalLM:
    """transformers' model in float32; every weight, bias and buffer stirred."""
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**config)).eval()
    draw = torch.Generator().manual_seed(seed)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("inv_freq"):
            continue
        if "norm" in name:
            tensor.data.copy_(torch.rand(tensor.shape, generator=draw) + 0.5)
        else:
            std = tensor.shape[-1] ** -0.5 if tensor.dim() > 1 else 0.3
            tensor.data.copy_(torch.randn(tensor.shape, generator=draw) * std)
    return model


def deepseek_logits(model: DeepseekV3ForCausalLM, prompt: list[int]) -> Tensor:
    """Logits [len, V] of an uncached forward."""
    with torch.no_grad():
        return model(torch.tensor([prompt]), use_cache=False).logits[0]


def pack_experts(folder: Path) -> None:
    """Rewrite the file with a layer's experts in one tensor, as transformers holds them."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    layers = {name.split(".mlp.")[0] for name in tensors if ".mlp.experts." in name}
    for layer in layers:
        stem = f"{layer}.mlp.experts"
        count = len(
            [n for n in tensors if n.startswith(f"{stem}.") and n.endswith("up_proj.weight")]
        )
        parts = [
            [tensors.pop(f"{stem}.{i}.{name}_proj.weight") for i in range(count)]
            for name in ("gate", "up", "down")
        ]
        gate, up, down = (torch.stack(part) for part in parts)
        tensors[f"{stem}.gate_up_proj"] = torch.cat((gate, up), 1)
        tensors[f"{stem}.down_proj"] = down
    save_file(tensors, file, metadata={"format": "pt"})
