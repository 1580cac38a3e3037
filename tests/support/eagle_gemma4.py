"""deepseek-ai's EAGLE-3 heads of one Gemma 4 layer, by their definition and as a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from block_gemma4 import NORMS, draw_gemma_layer, shapes_of_layer
from eagle_folders import matrix, write
from eagle_oracle import PlainEagle, norm, rotate
from torch import Tensor


class PlainGemmaEagle(PlainEagle):
    """A scaled embedding, four norms, values normed without weight, scores unscaled, a scalar at
    the end, capped logits."""

    def run(self, tokens: Tensor, hidden: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
        eps, w, name = self.layer["rms_norm_eps"], self.weights, "layers.0"
        norms = {n: w[f"{name}.{n}_layernorm.weight"] for n in NORMS}
        e = w["embed_tokens.weight"][tokens] * self.layer["hidden_size"] ** 0.5
        g = norm(hidden, w[f"{name}.hidden_norm.weight"], eps)
        entering = torch.cat((norm(e, norms["input"], eps), g), -1)
        a = self.attention(0, entering, torch.arange(first, first + len(tokens)))
        x = hidden + norm(a, norms["post_attention"], eps)
        inner = norm(x, norms["pre_feedforward"], eps)
        gate = torch.nn.functional.gelu(
            self.linear(f"{name}.mlp.gate_proj", inner), approximate="tanh"
        )
        m = self.linear(f"{name}.mlp.down_proj", gate * self.linear(f"{name}.mlp.up_proj", inner))
        x = (x + norm(m, norms["post_feedforward"], eps)) * w[f"{name}.layer_scalar"]
        return norm(x, w["norm.weight"], eps), x

    def attention(self, i: int, x: Tensor, positions: Tensor) -> Tensor:
        layer, eps, name = self.layer, self.layer["rms_norm_eps"], f"layers.{i}.self_attn"
        size, is_equal = layer["global_head_dim"], layer["attention_k_eq_v"]
        heads = layer["num_attention_heads"]
        kv = layer["num_global_key_value_heads" if is_equal else "num_key_value_heads"]
        q = self.linear(f"{name}.q_proj", x).view(-1, heads, size)
        k = self.linear(f"{name}.k_proj", x).view(-1, kv, size)
        v = k if is_equal else self.linear(f"{name}.v_proj", x).view(-1, kv, size)
        q = norm(q, self.weights[f"{name}.q_norm.weight"], eps)
        k = norm(k, self.weights[f"{name}.k_norm.weight"], eps)
        v = norm(v, torch.ones(size).double(), eps)
        rope = layer["rope_parameters"]["full_attention"]
        theta = rope["rope_theta"] ** (-torch.arange(0, size, 2).float() / size)
        theta[int(rope["partial_rotary_factor"] * size / 2) :] = 0.0
        q, k = (rotate(part, positions, theta, 1.0) for part in (q, k))
        k, v = (part.repeat_interleave(heads // kv, 1) for part in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k)
        later = positions[:, None] < positions[None, :]
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        out = torch.einsum("hij,jhd->ihd", weights, v).reshape(len(x), -1)
        return self.linear(f"{name}.o_proj", out)

    def logits(self, states: Tensor) -> Tensor:
        cap = self.layer["final_logit_softcapping"]
        return cap * torch.tanh(states @ self.weights["lm_head.weight"].T / cap)


def draw_gemma_eagle3(rng: np.random.Generator, target: Any) -> PlainGemmaEagle:
    """A head with every tensor, norms away from 1."""
    layer = draw_gemma_layer(rng, target) | {"num_hidden_layers": 1}
    size = target.hidden_size
    ids = 1 + rng.permutation(target.num_layers)[: int(rng.integers(1, 4))]
    head = PlainGemmaEagle(
        method="eagle3", layer=layer, weights={}, aux_layer_ids=tuple(int(i) for i in ids)
    )
    shapes, norms = shapes_of_layer(layer, 0, 2 * size)
    shapes |= {
        "embed_tokens": (target.vocab_size, size),
        "lm_head": (target.vocab_size, size),
        "fc": (size, len(ids) * size),
    }
    norms |= {"layers.0.hidden_norm": size, "norm": size}
    head.weights = {f"{name}.weight": matrix(rng, *shape) for name, shape in shapes.items()}
    for name, width in norms.items():
        head.weights[f"{name}.weight"] = torch.from_numpy(rng.uniform(0.5, 1.5, width))
    head.weights["layers.0.layer_scalar"] = torch.tensor([0.75]).double()
    return head


def write_gemma_eagle3(folder: Path, head: PlainGemmaEagle, target: Any) -> Path:
    """The head as deepseek-ai writes it."""
    config = {
        **head.layer,
        "architectures": ["Gemma4Eagle3Model"],
        "draft_num_hidden_layers": head.layer["num_hidden_layers"],
        "layer_types": ["full_attention"] * head.layer["num_hidden_layers"],
        "num_target_layers": target.num_layers,
        "step_loss_decay": 0.8,
        "target_layer_ids": [i - 1 for i in head.aux_layer_ids],
        "tie_word_embeddings": False,
        "ttt_length": 7,
    }
    return write(folder, config, {n: t.contiguous() for n, t in head.weights.items()})
