"""MTP layers written down plainly: whole uncached passes in float64 over tensors straight from a
file.

Shares no code with the engine. One decoder block for DeepSeek-V3 (keys and values expanded), one
for Qwen2 and Qwen3.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding


class Weights(dict[str, Tensor]):
    """Tensors by name, and the linear maps among them."""

    # Rows as they enter a map that is quantised; the matrix that attention absorbs takes them as
    # they are.
    rounding: Callable[[Tensor], Tensor] | None = None

    def linear(self, name: str, x: Tensor) -> Tensor:
        if self.rounding is not None and not name.endswith("kv_b_proj"):
            x = self.rounding(x)
        return F.linear(x, self[f"{name}.weight"], self.get(f"{name}.bias"))


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal softmax attention: q, k [L, H, d], v [L, H, dv] -> [L, H * dv]."""
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    ahead = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    p = scores.masked_fill(ahead, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", p, v).flatten(1)


def turn(x: Tensor, angles: Tensor, interleaved: bool, gain: float = 1.0) -> Tensor:
    """Rotate x [L, H, d] by angles [L, d/2], as complex numbers."""
    pairs = x.unflatten(-1, (-1, 2)) if interleaved else torch.stack(x.chunk(2, -1), -1)
    turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(
        torch.full_like(angles, gain), angles
    ).unsqueeze(1)
    return torch.cat((turned.real, turned.imag), -1)


def swiglu(x: Tensor, w: Weights, name: str) -> Tensor:
    gate, up = (w.linear(f"{name}.{part}_proj", x) for part in ("gate", "up"))
    return w.linear(f"{name}.down_proj", F.silu(gate) * up)


def deepseek_attention(x: Tensor, w: Weights, c: dict[str, Any]) -> Tensor:
    rotary = DeepseekV3RotaryEmbedding(DeepseekV3Config.from_dict(dict(c)))
    angles = torch.arange(len(x)).double()[:, None] * rotary.inv_freq.double()
    heads, n, r = c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"]
    rank, interleaved = c["kv_lora_rank"], c.get("rope_interleave", True)

    def linear(inputs: Tensor, name: str) -> Tensor:
        return w.linear(f"self_attn.{name}", inputs)

    if c["q_lora_rank"] is None:
        q = linear(x, "q_proj")
    else:
        q = rms(linear(x, "q_a_proj"), w["self_attn.q_a_layernorm.weight"], 1e-6)
        q = linear(q, "q_b_proj")
    q = q.view(len(x), heads, n + r)
    down = linear(x, "kv_a_proj_with_mqa")
    latent = rms(down[:, :rank], w["self_attn.kv_a_layernorm.weight"], 1e-6)
    key, value = linear(latent, "kv_b_proj").view(len(x), heads, -1).split((n, c["v_head_dim"]), -1)
    gain = rotary.attention_scaling
    shared = turn(down[:, None, rank:], angles, interleaved, gain).expand(-1, heads, -1)
    q = torch.cat((q[..., :n], turn(q[..., n:], angles, interleaved, gain)), -1)
    rope, scale = c["rope_parameters"], (n + r) ** -0.5
    if rope["rope_type"] != "default" and rope.get("mscale_all_dim"):
        mscale = 0.1 * rope["mscale_all_dim"] * torch.tensor(rope["factor"]).double().log() + 1
        scale *= float(mscale) ** 2
    return linear(attend(q, torch.cat((key, shared), -1), value, scale), "o_proj")


def deepseek_experts(x: Tensor, w: Weights, c: dict[str, Any]) -> Tensor:
    """Every expert on every row, with a share of zero where it was not chosen."""
    count, groups = c["n_routed_experts"], c["n_group"]
    scores = (x @ w["mlp.gate.weight"].t()).sigmoid()
    biased = scores + w["mlp.gate.e_score_correction_bias"]
    sums = biased.unflatten(1, (groups, -1)).sort(-1, descending=True).values[..., :2].sum(-1)
    rank = sums.argsort(-1, descending=True).argsort(-1)
    is_open = (rank < c["topk_group"]).repeat_interleave(count // groups, 1)
    order = biased.masked_fill(~is_open, -torch.inf).argsort(-1, descending=True).argsort(-1)
    shares = scores * (order < c["num_experts_per_tok"])
    if c["norm_topk_prob"]:
        shares = shares / shares.sum(-1, keepdim=True)
    routed = [shares[:, i : i + 1] * swiglu(x, w, f"mlp.experts.{i}") for i in range(count)]
    shared = swiglu(x, w, "mlp.shared_experts")
    return torch.stack(routed).sum(0) * c["routed_scaling_factor"] + shared


def deepseek_block(x: Tensor, w: Weights, c: dict[str, Any]) -> Tensor:
    eps = c["rms_norm_eps"]
    x = x + deepseek_attention(rms(x, w["input_layernorm.weight"], eps), w, c)
    y = rms(x, w["post_attention_layernorm.weight"], eps)
    is_dense = "mlp.gate_proj.weight" in w
    return x + (swiglu(y, w, "mlp") if is_dense else deepseek_experts(y, w, c))


def qwen_block(x: Tensor, w: Weights, c: dict[str, Any]) -> Tensor:
    eps, heads, kv = c["rms_norm_eps"], c["num_attention_heads"], c["num_key_value_heads"]
    y = rms(x, w["input_layernorm.weight"], eps)

    def part(name: str, count: int) -> Tensor:
        bias = w.get(f"self_attn.{name}_proj.bias")
        out = F.linear(y, w[f"self_attn.{name}_proj.weight"], bias).view(len(y), count, -1)
        norm = w.get(f"self_attn.{name}_norm.weight")
        return out if norm is None else rms(out, norm, eps)

    q, k, v = part("q", heads), part("k", kv), part("v", kv)
    dim = q.shape[-1]
    inv_freq = 1.0 / c["rope_parameters"]["rope_theta"] ** (torch.arange(0, dim, 2).float() / dim)
    angles = torch.arange(len(x)).double()[:, None] * inv_freq.double()
    q, k = turn(q, angles, False), turn(k, angles, False)
    k, v = (part.repeat_interleave(heads // kv, 1) for part in (k, v))
    x = x + attend(q, k, v, dim**-0.5) @ w["self_attn.o_proj.weight"].t()
    return x + swiglu(rms(x, w["post_attention_layernorm.weight"], eps), w, "mlp")


# Names: norm of the embedding, norm of the state, projection, last norm; block; embedding first;
# the first position blanked.
DEFINITIONS = {
    "deepseek": (("enorm", "hnorm", "eh_proj", "shared_head.norm"), deepseek_block, True, True),
    "mimo": (
        ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        qwen_block,
        False,
        True,
    ),
    "speculators": (
        ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        qwen_block,
        True,
        False,
    ),
}


@dataclass
class PlainMTP:
    """The MTP layers of one folder."""

    kind: str
    config: dict[str, Any]
    table: Tensor  # [V, D], the target's
    head: Tensor  # [V, D], the target's
    layers: list[Weights] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path, kind: str, target: Path | None = None) -> PlainMTP:
        """From a folder; the target's tables are in it, or in `target`."""
        raw = json.loads((folder / "config.json").read_text())
        config = raw.get("transformer_layer_config", raw)
        weights = load_doubles(folder)
        tables = weights if target is None else load_doubles(target)
        table = tables["embed_tokens.weight"]
        plain = cls(kind, config, table, tables.get("lm_head.weight", table))
        for i in range(raw["num_nextn_predict_layers"]):
            first = config["num_hidden_layers"]
            prefix = f"layers.{first + i}." if kind == "deepseek" else f"mtp_layers.{i}."
            plain.layers.append(
                Weights(
                    {n.removeprefix(prefix): t for n, t in weights.items() if n.startswith(prefix)}
                )
            )
        return plain

    def chain(self, hidden: Tensor, tokens: list[int], k: int) -> tuple[list[int], list[Tensor]]:
        """Greedy drafts behind `tokens`, and their logits [V].

        hidden [len(tokens) - 1, D] are the target's final-norm states of all tokens but the last.
        """
        (token_norm, hidden_norm, projection, last), block, first, blanks = DEFINITIONS[self.kind]
        eps, drafts, scores = self.config["rms_norm_eps"], list[int](), list[Tensor]()
        for step in range(k):
            w = self.layers[step % len(self.layers)]
            e = self.table[torch.tensor([*tokens, *drafts])[1:]]
            if blanks:
                e[0] = 0
            parts = [
                rms(e, w[f"{token_norm}.weight"], eps),
                rms(hidden, w[f"{hidden_norm}.weight"], eps),
            ]
            x = torch.cat(parts if first else parts[::-1], -1) @ w[f"{projection}.weight"].t()
            state = rms(block(x, w, self.config), w[f"{last}.weight"], eps)[-1]
            scores.append(self.head @ state)
            drafts.append(int(scores[-1].argmax()))
            hidden = torch.cat((hidden, state[None]))
        return drafts, scores


def load_doubles(folder: Path) -> Weights:
    """Every tensor in float64, without the leading `model.`."""
    tensors = load_file(folder / "model.safetensors")
    return Weights({name.removeprefix("model."): each.double() for name, each in tensors.items()})
