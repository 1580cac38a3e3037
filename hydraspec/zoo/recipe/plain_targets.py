"""Targets other than Gemma 4: Qwen3, Mistral and DeepSeek-V3, through transformers' own layers.

Letters: B batch, T target rows, D hidden width, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    DeepseekV3ForCausalLM,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3ForCausalLM,
)

CLASSES: dict[str, type[PreTrainedModel]] = {
    "qwen3": Qwen3ForCausalLM,
    "mistral": MistralForCausalLM,
    "deepseek_v3": DeepseekV3ForCausalLM,
}
ROUTER_BIAS = "e_score_correction_bias"
# What only a generic config class adds, and what transformers computes.
_NOT_PUBLIC = (
    "_name_or_path", "chunk_size_feed_forward", "id2label", "label2id", "problem_type",
    "is_encoder_decoder", "return_dict", "output_attentions", "output_hidden_states",
    "layer_types", "qk_head_dim",
)  # fmt: skip
_PUBLIC_DEEPSEEK: dict[str, Any] = {
    "ep_size": 1,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}


def prepare(model: PreTrainedModel, seed: int) -> None:
    """After the common initialisation: branches that leave the residual stream of order one
    whatever the depth, and router biases that are not zero (they stay as they are set here).
    """
    scale = (2 * model.config.num_hidden_layers) ** -0.5
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                parameter.mul_(scale)
        for name, buffer in model.named_buffers():
            if name.endswith(ROUTER_BIAS):
                steps = torch.randint(-4, 5, buffer.shape, generator=generator)
                buffer.copy_(steps / 64)


def run_plain(
    model: Any, tokens: Tensor, aux_layer_ids: Sequence[int] = ()
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """An uncached forward pass over tokens [B, T]: final-norm states [B, T, D], logits [B, T, V]
    and the residual stream after as many layers as each aux id says.

    Layers run one by one without a mask, so that attention takes its causal kernel.
    """
    body = model.model
    h = body.embed_tokens(tokens)
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    rope = body.rotary_emb(h, position_ids=positions)
    stream = [h]
    for layer in body.layers:
        h = layer(
            h,
            attention_mask=None,
            position_ids=positions,
            position_embeddings=rope,
            use_cache=False,
        )
        stream.append(h)
    hidden = body.norm(h)
    return hidden, model.lm_head(hidden).float(), [stream[i] for i in aux_layer_ids]


def save_plain(model: PreTrainedModel, folder: Path, stop_tokens: list[int]) -> None:
    """Save in bfloat16, with the config in the released layout (rotary base beside the shape)."""
    generation = model.generation_config
    assert generation is not None
    generation.bos_token_id, generation.pad_token_id = 2, 0
    generation.eos_token_id = stop_tokens
    biases = {n: b.float() for n, b in model.named_buffers() if n.endswith(ROUTER_BIAS)}
    model.to(torch.bfloat16).save_pretrained(str(folder))
    tensors = load_file(folder / "model.safetensors")
    write_tensors(folder, tensors | biases)
    path = folder / "config.json"
    config = {k: v for k, v in json.loads(path.read_text()).items() if k not in _NOT_PUBLIC}
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope["rope_theta"], "rope_scaling": None, "eos_token_id": stop_tokens}
    if config["model_type"] == "deepseek_v3":
        del config["head_dim"]
        config |= _PUBLIC_DEEPSEEK
    path.write_text(json.dumps(dict(sorted(config.items())), indent=2) + "\n")


def write_tensors(folder: Path, tensors: dict[str, Tensor], name: str = "model") -> None:
    """Tensors as one safetensors file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.safetensors"
    plain = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
    save_file(plain, path, metadata={"format": "pt"})
    path.chmod(0o644)


def load_plain(folder: Path, device: torch.device | str = "cpu") -> PreTrainedModel:
    """The saved bfloat16 weights, run in float32; MTP layers stay unread."""
    kind = CLASSES[json.loads((folder / "config.json").read_text())["model_type"]]
    model: PreTrainedModel = kind.from_pretrained(str(folder), dtype=torch.float32)
    return model.to(device).eval()
