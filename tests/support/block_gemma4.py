"""deepseek-ai's block drafters of Gemma 4 layers, by their definition and as a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from block_oracle import PlainBlock
from eagle_folders import matrix, write
from eagle_oracle import norm, rotate
from torch import Tensor


class PlainGemmaBlock(PlainBlock):
    """Four norms a layer, values normed without weight, scores unscaled, a scalar at the end."""

    def block_states(self, text: Tensor, aux: list[Tensor], k: int, whole: bool = False) -> Tensor:
        eps, w, rows = self.layer["rms_norm_eps"], self.weights, self.num_rows(k)
        context = self.features(aux)
        ids = torch.full((rows,), self.mask_token)
        ids[0] = text[-1]
        x = w["embed_tokens.weight"][ids] * self.layer["hidden_size"] ** 0.5
        for i in range(self.layer["num_hidden_layers"]):
            name = f"layers.{i}"
            norms = {n: w[f"{name}.{n}_layernorm.weight"] for n in NORMS}
            a = self.block_attention(i, norm(x, norms["input"], eps), context, len(context))
            x = x + norm(a, norms["post_attention"], eps)
            inner = norm(x, norms["pre_feedforward"], eps)
            gate = torch.nn.functional.gelu(
                self.linear(f"{name}.mlp.gate_proj", inner), approximate="tanh"
            )
            up = self.linear(f"{name}.mlp.up_proj", inner)
            m = self.linear(f"{name}.mlp.down_proj", gate * up)
            x = (x + norm(m, norms["post_feedforward"], eps)) * w[f"{name}.layer_scalar"]
        found = norm(x, w["norm.weight"], eps)
        return found if whole else found[-k:]

    def block_attention(self, i: int, x: Tensor, context: Tensor, start: int) -> Tensor:
        size, eps = self.layer["global_head_dim"], self.layer["rms_norm_eps"]
        is_equal, name = self.layer["attention_k_eq_v"], f"layers.{i}.self_attn"
        heads = self.layer["num_attention_heads"]
        kv = self.layer["num_global_key_value_heads" if is_equal else "num_key_value_heads"]
        places = torch.arange(start + len(x))
        both = torch.cat((context, x))
        q = self.linear(f"{name}.q_proj", x).view(-1, heads, size)
        k = self.linear(f"{name}.k_proj", both).view(-1, kv, size)
        v = k if is_equal else self.linear(f"{name}.v_proj", both).view(-1, kv, size)
        q = norm(q, self.weights[f"{name}.q_norm.weight"], eps)
        k = norm(k, self.weights[f"{name}.k_norm.weight"], eps)
        v = norm(v, torch.ones(size).double(), eps)
        rope = self.layer["rope_parameters"]["full_attention"]
        theta = rope["rope_theta"] ** (-torch.arange(0, size, 2).float() / size)
        theta[int(rope["partial_rotary_factor"] * size / 2) :] = 0.0
        q, k = rotate(q, places[start:], theta, 1.0), rotate(k, places, theta, 1.0)
        k, v = (part.repeat_interleave(heads // kv, 1) for part in (k, v))
        weights = torch.einsum("ihd,jhd->hij", q, k).softmax(-1)
        out = torch.einsum("hij,jhd->ihd", weights, v).reshape(len(x), -1)
        return self.linear(f"{name}.o_proj", out)

    def logits(self, states: Tensor) -> Tensor:
        cap = self.layer["final_logit_softcapping"]
        return cap * torch.tanh(states @ self.weights["lm_head.weight"].T / cap)


NORMS = ("input", "post_attention", "pre_feedforward", "post_feedforward")


def draw_gemma_layer(rng: np.random.Generator, target: Any) -> dict[str, Any]:
    """The config of two layers of a drafter, with and without separate values."""
    kv = int(rng.choice([1, 2]))
    return {
        "attention_bias": False,
        "attention_k_eq_v": bool(rng.random() < 0.5),
        "enable_moe_block": False,
        "final_logit_softcapping": 3.0,
        "global_head_dim": 8,
        "head_dim": 4,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": target.hidden_size,
        "hidden_size_per_layer_input": 0,
        "intermediate_size": 24,
        "max_position_embeddings": 256,
        "model_type": "gemma4_unified_text",
        "num_attention_heads": 2 * kv,
        "num_global_key_value_heads": kv,
        "num_hidden_layers": 2,
        "num_key_value_heads": kv,
        "num_kv_shared_layers": 0,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "full_attention": {
                "partial_rotary_factor": 0.5,
                "rope_theta": 100.0,
                "rope_type": "proportional",
            }
        },
        "sliding_window": 8,
        "vocab_size": target.vocab_size,
    }


def shapes_of_layer(
    layer: dict[str, Any], i: int, inputs: int
) -> tuple[dict[str, tuple[int, int]], dict[str, int]]:
    """Shapes of the matrices of layer i, whose attention reads `inputs` values, and widths of its
    norms."""
    size, inner, dim = layer["hidden_size"], layer["intermediate_size"], layer["global_head_dim"]
    queries, kv = layer["num_attention_heads"] * dim, layer["num_key_value_heads"] * dim
    name, part = f"layers.{i}", f"layers.{i}.self_attn"
    shapes = {f"{part}.q_proj": (queries, inputs), f"{part}.k_proj": (kv, inputs)}
    shapes |= {} if layer["attention_k_eq_v"] else {f"{part}.v_proj": (kv, inputs)}
    shapes |= {f"{part}.o_proj": (size, queries)}
    shapes |= {f"{name}.mlp.{n}_proj": (inner, size) for n in ("gate", "up")}
    shapes |= {f"{name}.mlp.down_proj": (size, inner)}
    norms = {f"{name}.{n}_layernorm": size for n in NORMS}
    return shapes, norms | {f"{part}.q_norm": dim, f"{part}.k_norm": dim}


def draw_gemma_block(rng: np.random.Generator, target: Any) -> PlainGemmaBlock:
    """A head with every tensor, norms away from 1."""
    layer, rank = draw_gemma_layer(rng, target), 4
    size = target.hidden_size
    ids = rng.permutation(target.num_layers + 1)[:2]
    head = PlainGemmaBlock(
        method="dspark",
        layer=layer,
        weights={},
        flags={
            "markov_rank": rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        },
        aux_layer_ids=tuple(int(i) for i in ids),
        mask_token=4,
        block_size=6,
        samples_anchor=True,
    )
    shapes = {
        "embed_tokens": (target.vocab_size, size),
        "lm_head": (target.vocab_size, size),
        "fc": (size, 2 * size),
        "markov_head.markov_w1": (target.vocab_size, rank),
        "markov_head.markov_w2": (target.vocab_size, rank),
        "confidence_head.proj": (1, size + rank),
    }
    norms = {"hidden_norm": size, "norm": size}
    for i in range(2):
        of_layer, its_norms = shapes_of_layer(layer, i, size)
        shapes, norms = shapes | of_layer, norms | its_norms
        head.weights[f"layers.{i}.layer_scalar"] = torch.tensor([0.5 + 0.25 * i]).double()
    head.weights |= {f"{name}.weight": matrix(rng, *shape) for name, shape in shapes.items()}
    for name, width in norms.items():
        head.weights[f"{name}.weight"] = torch.from_numpy(rng.uniform(0.5, 1.5, width))
    head.weights["confidence_head.proj.bias"] = torch.tensor([0.3]).double()
    return head


def write_gemma_block(folder: Path, head: PlainGemmaBlock, target: Any) -> Path:
    """The head as deepseek-ai writes it."""
    config = {
        **head.layer,
        **head.flags,
        "architectures": ["Gemma4DSparkModel"],
        "block_size": head.block_size,
        "layer_types": ["full_attention"] * 2,
        "mask_token_id": head.mask_token,
        "num_anchors": 512,
        "num_target_layers": target.num_layers,
        "target_layer_ids": [i - 1 for i in head.aux_layer_ids],
        "tie_word_embeddings": False,
    }
    return write(folder, config, {n: t.contiguous() for n, t in head.weights.items()})
