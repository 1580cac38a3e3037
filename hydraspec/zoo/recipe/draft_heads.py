"""Plain definitions of the drafters with their own KV, EAGLE-3, P-EAGLE, EAGLE-1 and MTP, over
layers that run for all rows of a text at once, step by step.

The convention for all: the row of target position p reads, at step 0, token p + 1 and the target's
state at p, and predicts token p + 2; step j reads token p + 1 + j and what step j - 1 fed back, and
predicts token p + 2 + j. P-EAGLE's later steps read the mask token and the mask state instead. At
step j the row stands at position p + j; it sees what the head keeps of the target's rows 0..p (step
0, its own causal pass) and of its own steps 1..j.

Names are those of the published files, so that `state_dict` is the checkpoint.

Letters: B batch, T rows, D hidden width, N heads, H head size, A aux states, V vocabulary, W draft
vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3DecoderLayer,
    DeepseekV3RotaryEmbedding,
    apply_rotary_pos_emb_interleave,
)


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """YaRN (Peng et al. 2023) with its recommended gain, and queries that grow as Llama 4's."""

    factor: float
    length: int  # positions of the original context
    beta_fast: float
    beta_slow: float
    query_beta: float

    def frequencies(self, plain: Tensor, theta: float) -> Tensor:
        """The frequencies [H/2], of which those that turn less than `beta_slow` times in the
        original context are divided by `factor`, and those above `beta_fast` kept.
        """

        def place(turns: float) -> float:
            return len(plain) * math.log(self.length / (2 * math.pi * turns)) / math.log(theta)

        first, last = math.floor(place(self.beta_fast)), math.ceil(place(self.beta_slow))
        first = max(first, 0)
        at = torch.arange(len(plain), device=plain.device)
        share = ((at - first) / (last - first)).clamp(0, 1)
        return plain * (1 - share) + plain / self.factor * share

    @property
    def gain(self) -> float:
        """Factor of rotated queries and keys."""
        return 1 + 0.1 * math.log(self.factor)

    def growth(self, positions: Tensor) -> Tensor:
        """Factors [T] of queries at positions [T]."""
        return 1 + self.query_beta * torch.log1p(torch.floor(positions / self.length))


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """A decoder layer's shape, and its rotary base."""

    hidden_size: int
    intermediate_size: int
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    rope_theta: float = 10_000.0
    yarn: Yarn | None = None
    eps: float = 1e-6


@dataclass
class StepCache:
    """Keys and values [B, N, T, H] of one layer, an entry for each step so far."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


def attend(query: Tensor, cache: StepCache, scale: float) -> Tensor:
    """Attention of the newest step's query [B, N, T, H] over the cache -> [B, T, N * value size]:
    row t sees rows 0..t of step 0, and its own row of every later step."""
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


def rotate(x: Tensor, positions: Tensor, theta: float, yarn: Yarn | None = None) -> Tensor:
    """Rotary embedding of x [B, N, T, H] at positions [T]; dimension i turns with i + H/2."""
    half = x.shape[-1] // 2
    places = torch.arange(half, device=x.device, dtype=torch.float32)
    frequencies = theta ** (-places / half)
    if yarn is not None:
        frequencies = yarn.frequencies(frequencies, theta)
    angles = positions[:, None] * frequencies
    gain = 1.0 if yarn is None else yarn.gain
    cos, sin = angles.cos() * gain, angles.sin() * gain
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
    """Llama's attention, over inputs of width `inputs`."""

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
        cache.keys.append(rotate(k, positions, shape.rope_theta, shape.yarn))
        cache.values.append(v)
        query = rotate(q, positions, shape.rope_theta, shape.yarn)
        if shape.yarn is not None:
            query = query * shape.yarn.growth(positions)[:, None].to(query.dtype)
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
        """The layer's output, h [B, T, D] -> [B, T, D]; adds the rows' KV to `cache`."""
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
        """The layer's output from embeddings e and states h [B, T, D] -> [B, T, D]."""
        normed = self.hidden_norm(h)
        h = normed if self.norm_before_residual else h
        x = torch.cat([self.input_layernorm(e), normed], -1)
        h = h + self.self_attn(x, positions, cache)
        out: Tensor = h + self.mlp(self.post_attention_layernorm(h))
        return out


# ------------------------------------------------------------------ heads


@dataclass
class TargetView:
    """Inputs that a head may read of the target, for all rows of some texts."""

    table: Tensor  # [V, D] embedding, unscaled
    head: Tensor  # [V, D]
    hidden: Tensor  # [B, T, D] after the final norm
    aux: Tensor  # [B, T, A * D]


@dataclass
class Run:
    """State of a head between two draft steps."""

    target: TargetView
    state: Tensor  # [B, T, D] hidden states that the next step reads
    step: int = 0
    caches: list[StepCache] = field(default_factory=list)

    def positions(self) -> Tensor:
        """Positions [T] of the current step's rows."""
        return torch.arange(self.state.shape[1], device=self.state.device) + self.step


class DraftHead(nn.Module):
    """A drafter head: call `begin` once, then `advance` for every step."""

    token_ids: Tensor | None = None  # [W] target ids of the draft vocabulary; None: all
    num_layers: int = 1

    def begin(self, target: TargetView) -> Run:
        run = Run(target, self.first_state(target))
        run.caches = [StepCache() for _ in range(self.num_layers)]
        return run

    def first_state(self, target: TargetView) -> Tensor:
        """The hidden states that the first step reads, [B, T, D]."""
        return target.hidden

    def advance(self, run: Run, tokens: Tensor) -> Tensor:
        """Logits of the next draft step of every row, which reads tokens [B, T] -> [B, T, W]."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Eagle3Shape:
    """An EAGLE-3 head's shape and flags; P-EAGLE's where there is a mask token."""

    layer: LayerShape
    target_size: int
    draft_vocab_size: int
    vocab_size: int
    num_aux: int = 3
    num_layers: int = 1
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    mask_token_id: int | None = None


class Eagle3Head(DraftHead):
    """EAGLE-3 (Li et al. 2025); with a mask token, P-EAGLE (arXiv 2602.01469)."""

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        size, eps, width = shape.layer.hidden_size, shape.layer.eps, shape.target_size
        self.shape, self.num_layers = shape, shape.num_layers
        first = FusedLayer(shape.layer, norm_before_residual=shape.norm_before_residual)
        more = [Layer(shape.layer) for _ in range(1, shape.num_layers)]
        self.fc = linear(shape.num_aux * width, size)
        self.layers = nn.ModuleList([first, *more])
        self.norm = Norm(size, eps)
        self.lm_head = linear(size, shape.draft_vocab_size)
        if shape.norm_before_fc:
            self.input_norm = Norm(shape.num_aux * width, eps)
        if shape.fc_norm:
            self.fc_norm = nn.ModuleList(Norm(width, eps) for _ in range(shape.num_aux))
        if shape.mask_token_id is not None:
            self.embed_tokens = nn.Embedding(shape.vocab_size, size)
            self.mask_hidden = nn.Parameter(torch.zeros(1, 1, shape.num_aux * width))

    def combine(self, aux: Tensor) -> Tensor:
        """Aux states combined to the head's width, [..., A * target width] -> [..., D]."""
        if self.shape.norm_before_fc:
            aux = self.input_norm(aux)
        if self.shape.fc_norm:
            parts = aux.split(self.shape.target_size, -1)
            pairs = zip(self.fc_norm, parts, strict=True)
            aux = torch.cat([norm(part) for norm, part in pairs], -1)
        out: Tensor = self.fc(aux)
        return out

    def first_state(self, target: TargetView) -> Tensor:
        """The target's aux states, combined to the head's width: [B, T, D]."""
        return self.combine(target.aux)

    def advance(self, run: Run, tokens: Tensor) -> Tensor:
        mask = self.shape.mask_token_id
        if mask is not None and run.step > 0:
            tokens = torch.full_like(tokens, mask)
            run.state = self.combine(self.mask_hidden).expand_as(run.state)
        table = run.target.table if mask is None else self.embed_tokens.weight
        first: Any = self.layers[0]
        positions = run.positions()
        h = first.fuse(F.embedding(tokens, table), run.state, positions, run.caches[0])
        for layer, cache in zip(list(self.layers)[1:], run.caches[1:], strict=True):
            h = layer(h, positions, cache)
        normed = self.norm(h)
        run.state = normed if self.shape.norm_output else h
        run.step += 1
        logits: Tensor = self.lm_head(normed)
        return logits


class Eagle1Head(DraftHead):
    """EAGLE (Li et al. 2024) as Mistral releases it: every norm kept, the normed state fed back."""

    def __init__(self, layer: LayerShape, num_layers: int) -> None:
        super().__init__()
        size = layer.hidden_size
        self.layer, self.num_layers = layer, num_layers
        self.fc = linear(2 * size, size)
        self.layers = nn.ModuleList(Layer(layer) for _ in range(num_layers))
        self.norm = Norm(size, layer.eps)

    def advance(self, run: Run, tokens: Tensor) -> Tensor:
        h = self.fc(torch.cat([F.embedding(tokens, run.target.table), run.state], -1))
        for layer, cache in zip(self.layers, run.caches, strict=True):
            h = layer(h, run.positions(), cache)
        run.state = self.norm(h)
        run.step += 1
        return F.linear(run.state, run.target.head)


class MTPHead(DraftHead):
    """DeepSeek-V3's multi-token-prediction layer (arXiv 2412.19437, section 2.2)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm = Norm(size, eps), Norm(size, eps)
        self.eh_proj = linear(2 * size, size)
        self.block = DeepseekV3DecoderLayer(config, config.num_hidden_layers)
        self.shared_head = nn.ModuleDict({"norm": Norm(size, eps)})
        self.rotary = DeepseekV3RotaryEmbedding(config)

    def advance(self, run: Run, tokens: Tensor) -> Tensor:
        positions = run.positions()
        e = F.embedding(tokens, run.target.table)
        e = e.masked_fill((positions == 0)[:, None], 0.0)
        h = self.eh_proj(torch.cat([self.enorm(e), self.hnorm(run.state)], -1))
        block: Any = self.block
        h = h + self._attention(block.input_layernorm(h), positions, run.caches[0])
        h = h + block.mlp(block.post_attention_layernorm(h))
        run.state = self.shared_head["norm"](h)
        run.step += 1
        return F.linear(run.state, run.target.head)

    def _attention(self, x: Tensor, positions: Tensor, cache: StepCache) -> Tensor:
        """Latent attention of the block over the cache of all steps, x [B, T, D] -> [B, T, D]."""
        inner: Any = self.block.self_attn
        sizes = [inner.qk_nope_head_dim, inner.qk_rope_head_dim]
        q = inner.q_b_proj(inner.q_a_layernorm(inner.q_a_proj(x)))
        q = q.unflatten(-1, (-1, inner.qk_head_dim)).transpose(1, 2)
        q_pass, q_turn = q.split(sizes, -1)
        latent, k_turn = inner.kv_a_proj_with_mqa(x).split([inner.kv_lora_rank, sizes[1]], -1)
        cos, sin = self.rotary(x, position_ids=positions[None])
        q_turn, k_turn = apply_rotary_pos_emb_interleave(q_turn, k_turn[:, None], cos, sin)
        key, value = inner.expand_kv(inner.kv_a_layernorm(latent)[:, None], k_turn)
        cache.keys.append(key)
        cache.values.append(value)
        query = torch.cat([q_pass, q_turn], -1).to(key.dtype)
        out: Tensor = inner.o_proj(attend(query, cache, inner.scaling).to(x.dtype))
        return out
