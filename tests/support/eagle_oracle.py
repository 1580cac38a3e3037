"""EAGLE heads by their definition: plain torch over whole sequences, no cache, no folding, one
request. Shares no code with the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import Ministral3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


@cache
def yarn(size: int, rope: tuple[tuple[str, Any], ...], base: float) -> tuple[Tensor, float]:
    config = Ministral3Config(head_dim=size, rope_parameters={"rope_theta": base, **dict(rope)})
    return ROPE_INIT_FUNCTIONS["yarn"](config, None)


def frequencies(layer: dict[str, Any]) -> tuple[Tensor, float]:
    """Radians a position [H/2], in float32 as published models take them, and the factor of cosines
    and sines; YaRN's are transformers'.
    """
    rope, size = layer.get("rope_scaling") or {}, layer["head_dim"]
    base = layer.get("rope_theta", 10000.0)
    if rope.get("rope_type") == "yarn":
        return yarn(size, tuple(rope.items()), base)
    theta = 1.0 / base ** (torch.arange(0, size, 2).float() / size) / rope.get("factor", 1.0)
    return theta, 1.0


def rotate(x: Tensor, positions: Tensor, theta: Tensor, gain: float) -> Tensor:
    """x [n, heads, H]; dimension i turns with i + H/2."""
    half = x.shape[-1] // 2
    angle = positions.double()[:, None, None] * theta.double()
    cos, sin = angle.cos() * gain, angle.sin() * gain
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def grown(q: Tensor, positions: Tensor, rope: dict[str, Any]) -> Tensor:
    """Queries [n, heads, H] by their positions, as ministral3 scales them."""
    steps = torch.floor(positions / rope.get("original_max_position_embeddings", 1))
    return q * (1 + rope.get("llama_4_scaling_beta", 0.0) * torch.log(1 + steps))[:, None, None]


@dataclass
class PlainEagle:
    """A head's flags and weights (names of the published EAGLE-3 files, `layers.0.` for
    `midlayer.`).
    """

    method: str
    layer: dict[str, Any]  # a Hugging Face config of the layers
    weights: dict[str, Tensor]  # float64
    flags: dict[str, Any] = field(default_factory=dict)
    aux_layer_ids: tuple[int, ...] = ()
    ids: Tensor | None = None  # target ids of the draft vocabulary
    mask_token: int | None = None
    # Rows as they enter a linear map, by its name, where weights are quantised.
    rounding: Callable[[str, Tensor], Tensor] = lambda _, x: x
    input_scales: dict[str, Tensor] = field(default_factory=dict)  # of static FP8, by matrix

    def flag(self, name: str, default: bool = False) -> bool:
        return bool(self.flags.get(name, default))

    # ------------------------------------------------------------------ definition

    def combine(self, aux: list[Tensor], final: Tensor) -> Tensor:
        """Target states [n, D_target] -> [n, D]."""
        if self.method == "eagle" or not self.flag("use_aux_hidden_state", True):
            return final
        eps = self.layer["rms_norm_eps"]
        if self.flag("fc_norm"):
            aux = [norm(x, self.weights[f"fc_norm.{i}.weight"], eps) for i, x in enumerate(aux)]
        x = torch.cat(aux, -1)
        if self.flag("norm_before_fc"):
            x = norm(x, self.weights["input_norm.weight"], eps)
        return self.linear("fc", x)

    def mask_state(self) -> Tensor:
        """[D]"""
        flat = self.weights["mask_hidden"].reshape(1, -1)
        return self.combine(list(flat.chunk(len(self.aux_layer_ids), -1)), flat)[0]

    def run(
        self,
        tokens: Tensor,
        hidden: Tensor,
        positions: Tensor | None = None,
        apart: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """All rows at once: tokens [n], hidden [n, D] at positions [n]; by default 0, 1, ...

        apart [n, n] marks rows that do not see each other, beside those that positions hide.
        Returns the states for the head and those that are fed back, [n, D] each.
        """
        eps, w = self.layer["rms_norm_eps"], self.weights
        positions = torch.arange(len(tokens)) if positions is None else positions
        e = self.embed(tokens)
        x = hidden
        if self.method == "eagle":
            x = self.linear("fc", torch.cat((e, hidden), -1))
        for i in range(self.layer["num_hidden_layers"]):
            name = f"layers.{i}"
            if self.method != "eagle" and i == 0:
                g = norm(x, w[f"{name}.hidden_norm.weight"], eps)
                entering = torch.cat((norm(e, w[f"{name}.input_layernorm.weight"], eps), g), -1)
                x = g if self.flag("norm_before_residual") else x
            elif self.method == "eagle" and i == 0 and not self.flag("is_mistral"):
                entering = x
            else:
                entering = norm(x, w[f"{name}.input_layernorm.weight"], eps)
            x = x + self.attention(i, entering, positions, apart)
            inner = norm(x, w[f"{name}.post_attention_layernorm.weight"], eps)
            gate = self.activate(self.linear(f"{name}.mlp.gate_proj", inner))
            up = self.linear(f"{name}.mlp.up_proj", inner)
            x = x + self.linear(f"{name}.mlp.down_proj", gate * up)
        if self.method == "eagle" and not self.flag("is_mistral"):
            return x, x
        states = norm(x, w["norm.weight"], eps)
        posts = self.flag("norm_output") or self.method == "eagle"
        return states, states if posts else x

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings [n, D] of the tokens after the first one of a text."""
        return self.weights["embed_tokens.weight"][tokens]

    def activate(self, x: Tensor) -> Tensor:
        if self.layer.get("hidden_act", "silu") == "silu":
            return x * torch.sigmoid(x)
        return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))

    def linear(self, name: str, x: Tensor) -> Tensor:
        rows = self.rounding(name, x)
        return rows @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", 0.0)

    def attention(self, i: int, x: Tensor, positions: Tensor, apart: Tensor | None) -> Tensor:
        heads, kv_heads = self.layer["num_attention_heads"], self.layer["num_key_value_heads"]
        size, name = self.layer["head_dim"], f"layers.{i}.self_attn"
        q = self.linear(f"{name}.q_proj", x).view(-1, heads, size)
        k = self.linear(f"{name}.k_proj", x).view(-1, kv_heads, size)
        v = self.linear(f"{name}.v_proj", x).view(-1, kv_heads, size)
        if self.layer["model_type"] == "qwen3":
            eps = self.layer["rms_norm_eps"]
            q = norm(q, self.weights[f"{name}.q_norm.weight"], eps)
            k = norm(k, self.weights[f"{name}.k_norm.weight"], eps)
        q, k = (rotate(part, positions, *frequencies(self.layer)) for part in (q, k))
        q = grown(q, positions, self.layer.get("rope_scaling") or {})
        k, v = (part.repeat_interleave(heads // kv_heads, 1) for part in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) * size**-0.5
        ahead = positions[:, None] - positions[None, :]
        hidden = ahead < 0 if apart is None else (ahead < 0) | apart
        kinds = self.layer.get("layer_types") or []
        if kinds and kinds[i] == "sliding_attention":
            hidden |= ahead >= self.layer["sliding_window"]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out = torch.einsum("hij,jhd->ihd", weights, v).reshape(len(x), -1)
        return self.linear(f"{name}.o_proj", out)

    def logits(self, states: Tensor) -> Tensor:
        return states @ self.weights["lm_head.weight"].T * self.flags.get("logit_scale", 1.0)

    def choose(self, states: Tensor) -> Tensor:
        """The target's ids of the best draft tokens."""
        best = self.logits(states).argmax(-1)
        return best if self.ids is None else self.ids[best]

    # ------------------------------------------------------------------ drafting

    def draft(
        self,
        text: Tensor,
        aux: list[Tensor],
        final: Tensor,
        k: int,
        read: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Drafts [k] behind `text`, and the states they come from [k, D].

        aux and final hold the target's states of every token but the newest, [n - 1, D_target].
        Each step reads the draft before it, or what `read` [k] says stands there.
        """
        hidden = self.combine(aux, final)
        if self.method == "peagle":
            states = self.masked_states(text, hidden, k)
            return self.choose(states), states
        tokens, found, drafts = text[1:], [], []
        for step in range(k):
            states, feedback = self.run(tokens, hidden)
            found.append(states[-1])
            drafts.append(self.choose(states[-1:]))
            tokens = torch.cat((tokens, drafts[-1] if read is None else read[step : step + 1]))
            hidden = torch.cat((hidden, feedback[-1:]))
        return torch.cat(drafts), torch.stack(found)

    def masked_states(self, text: Tensor, hidden: Tensor, k: int) -> Tensor:
        """P-EAGLE: the states of the newest row and of k - 1 mask rows behind it, in one pass."""
        masks = torch.full((k - 1,), self.mask_token)
        rows = torch.cat((hidden, self.mask_state().expand(k - 1, -1)))
        return self.run(torch.cat((text[1:], masks)), rows)[0][len(text) - 2 :]
