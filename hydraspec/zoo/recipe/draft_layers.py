"""Plain torch layers of EAGLE-type heads, run for all rows of a text at once, step by step.

Names are those of the published files, so that `state_dict` is the checkpoint.

At step j the row of target position p stands at position p + j. It sees what the head keeps of the
target's rows 0..p (step 0, its own causal pass) and of its own steps 1..j.

Letters: B batch, T rows, D hidden width, N heads, H head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """A decoder layer's shape, and its rotary base."""

    hidden_size: int
    intermediate_size: int
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    rope_theta: float = 10_000.0
    eps: float = 1e-6


@dataclass
class StepCache:
    """Keys and values [B, N, T, H] of one layer, an entry for each step so far."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


def attend(query: Tensor, cache: StepCache, scale: float) -> Tensor:
    """query [B, N, T, H] of the newest step -> [B, T, N * value size]."""
    rounds = query.shape[1] // cache.keys[0].shape[1]
    keys = [k.repeat_interleave(rounds, 1) for k in cache.keys]
    values = [v.repeat_interleave(rounds, 1) for v in cache.values]
    out: Tensor
    if len(keys) == 1:
        out = F.scaled_dot_product_attention(query, keys[0], values[0], is_causal=True, scale=scale)
        return out.transpose(1, 2).flatten(2)
    rows = torch.arange(query.shape[2], device=query.device)
    context = (query @ keys[0].transpose(2, 3)).float()
    context = context.masked_fill(rows[None] > rows[:, None], float("-inf"))
    own = [(query * k).sum(-1, keepdim=True).float() for k in keys[1:]]
    weights = (torch.cat([context, *own], -1) * scale).softmax(-1)
    context, *own = weights.split([len(rows), *[1] * len(own)], -1)
    out = context.to(values[0].dtype) @ values[0]
    for weight, value in zip(own, values[1:], strict=True):
        out = out + weight.to(value.dtype) * value
    return out.transpose(1, 2).flatten(2)


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """x [B, N, T, H] by positions [T]; dimension i turns with i + H/2."""
    half = x.shape[-1] // 2
    places = torch.arange(half, device=x.device, dtype=torch.float32)
    angles = positions[:, None] * theta ** (-places / half)
    cos, sin = angles.cos(), angles.sin()
    first, second = x.float().split(half, -1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return turned.to(x.dtype)


class Norm(nn.Module):
    """RMS norm in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def linear(inputs: int, outputs: int) -> nn.Linear:
    """A linear layer without bias."""
    return nn.Linear(inputs, outputs, bias=False)


class Attention(nn.Module):
    """Llama's, over inputs of `inputs` width."""

    def __init__(self, shape: LayerShape, inputs: int) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = linear(inputs, shape.num_heads * shape.head_dim)
        self.k_proj = linear(inputs, shape.num_kv_heads * shape.head_dim)
        self.v_proj = linear(inputs, shape.num_kv_heads * shape.head_dim)
        self.o_proj = linear(shape.num_heads * shape.head_dim, shape.hidden_size)

    def forward(self, x: Tensor, positions: Tensor, cache: StepCache) -> Tensor:
        shape = self.shape
        parts = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k, v = (part.unflatten(-1, (-1, shape.head_dim)).transpose(1, 2) for part in parts)
        cache.keys.append(rotate(k, positions, shape.rope_theta))
        cache.values.append(v)
        query = rotate(q, positions, shape.rope_theta)
        out: Tensor = self.o_proj(attend(query, cache, shape.head_dim**-0.5))
        return out


class GatedMLP(nn.Module):
    """Llama's MLP: SiLU-gated, three projections without bias."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.gate_proj = linear(shape.hidden_size, shape.intermediate_size)
        self.up_proj = linear(shape.hidden_size, shape.intermediate_size)
        self.down_proj = linear(shape.intermediate_size, shape.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Llama's decoder layer."""

    def __init__(self, shape: LayerShape, inputs: int | None = None) -> None:
        super().__init__()
        self.self_attn = Attention(shape, inputs or shape.hidden_size)
        self.mlp = GatedMLP(shape)
        self.input_layernorm = Norm(shape.hidden_size, shape.eps)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.eps)

    def forward(self, h: Tensor, positions: Tensor, cache: StepCache) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        h = h + self.self_attn(self.input_layernorm(h), positions, cache)
        out: Tensor = h + self.mlp(self.post_attention_layernorm(h))
        return out


class FusedLayer(Layer):
    """EAGLE-3's first layer: attention reads normed embedding and normed state side by side."""

    def __init__(self, shape: LayerShape, *, norm_before_residual: bool) -> None:
        super().__init__(shape, 2 * shape.hidden_size)
        self.hidden_norm = Norm(shape.hidden_size, shape.eps)
        self.norm_before_residual = norm_before_residual

    def fuse(self, e: Tensor, h: Tensor, positions: Tensor, cache: StepCache) -> Tensor:
        """Embeddings and states [B, T, D] -> [B, T, D]."""
        normed = self.hidden_norm(h)
        h = normed if self.norm_before_residual else h
        x = torch.cat([self.input_layernorm(e), normed], -1)
        h = h + self.self_attn(x, positions, cache)
        out: Tensor = h + self.mlp(self.post_attention_layernorm(h))
        return out
