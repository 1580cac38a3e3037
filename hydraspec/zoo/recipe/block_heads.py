"""Plain definitions of the block drafters (DFlash, DSpark, DFlash2), over many blocks at once.

The block of anchor a holds token a and mask tokens, at positions a, a + 1, ...; it sees the context
features of positions below a, and itself. A row predicts the token at its own position, or with
`samples_anchor` the one after it.

Names are those of the published files, so that `state_dict` is the checkpoint.

Letters: B batch, T tokens of a text, A blocks of a text, R rows of a block, D hidden width,
N heads, H head size, V vocabulary, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hydraspec.zoo.recipe.draft_heads import GatedMLP, LayerShape, Norm, TargetView, linear

HeadKind = Literal["vanilla", "gated", "rnn"]


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """A block drafter's shape; without markov_rank and selector_rank it is DFlash."""

    layer: LayerShape
    target_size: int
    draft_vocab_size: int
    vocab_size: int
    mask_token_id: int
    block_size: int
    num_aux: int = 3
    num_layers: int = 2
    windows: tuple[int | None, ...] = (None, None)  # of the layers; with one, a layer is causal
    samples_anchor: bool = False
    own_tables: bool = False  # embedding and head are the drafter's own
    markov_rank: int = 0
    markov_kind: HeadKind = "vanilla"
    conv_taps: int = 0  # 0: no convolutions
    conv_group: int = 1  # columns that share a row's tap
    selector_rank: int = 0
    num_candidates: int = 0  # of a draft, for the selector

    @property
    def most_drafts(self) -> int:
        """Drafts of a whole block."""
        return self.block_size if self.samples_anchor else self.block_size - 1


@dataclass
class Places:
    """Positions of a text's tokens [T] and of its blocks' rows [B, A, R]."""

    text: Tensor
    rows: Tensor


class BlockAttention(nn.Module):
    """Qwen3's attention of blocks to the context before them, and to themselves."""

    def __init__(self, shape: LayerShape, window: int | None) -> None:
        super().__init__()
        self.shape, self.window = shape, window
        size = shape.hidden_size
        self.q_proj = linear(size, shape.num_heads * shape.head_dim)
        self.k_proj = linear(size, shape.num_kv_heads * shape.head_dim)
        self.v_proj = linear(size, shape.num_kv_heads * shape.head_dim)
        self.o_proj = linear(shape.num_heads * shape.head_dim, size)
        self.q_norm = Norm(shape.head_dim, shape.eps)
        self.k_norm = Norm(shape.head_dim, shape.eps)

    def _turned(self, x: Tensor, norm: Norm, positions: Tensor) -> Tensor:
        """Normed and rotated heads [..., N, rows, H] of a projection x [..., rows, N * H]."""
        heads = norm(x.unflatten(-1, (-1, self.shape.head_dim)))
        return _rotate(heads.transpose(-2, -3), positions, self.shape.rope_theta)

    def forward(self, x: Tensor, context: Tensor, places: Places) -> Tensor:
        """Output [B, A, R, D] for rows x [B, A, R, D] and context features [B, T, D]."""
        shape, rounds = self.shape, self.shape.num_heads // self.shape.num_kv_heads
        q = self._turned(self.q_proj(x), self.q_norm, places.rows.unsqueeze(2))  # [B, A, N, R, H]
        k_own = self._turned(self.k_proj(x), self.k_norm, places.rows.unsqueeze(2))
        k = self._turned(self.k_proj(context), self.k_norm, places.text)  # [B, N', T, H]
        v_own = self.v_proj(x).unflatten(-1, (-1, shape.head_dim)).transpose(2, 3)
        v = self.v_proj(context).unflatten(-1, (-1, shape.head_dim)).transpose(1, 2)
        k, v = (part.repeat_interleave(rounds, 1) for part in (k, v))
        k_own, v_own = (part.repeat_interleave(rounds, 2) for part in (k_own, v_own))
        before = torch.einsum("banrh,bnth->banrt", q, k)
        anchor = places.rows[..., :1]  # [B, A, 1]
        hidden = places.text >= anchor  # [B, A, T]
        own = torch.einsum("banrh,bansh->banrs", q, k_own)
        if self.window is not None:
            hidden = hidden | (places.text < anchor - self.window)
            later = torch.ones(own.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
            own = own.masked_fill(later, float("-inf"))
        before = before.masked_fill(hidden[:, :, None, None], float("-inf"))
        weights = (torch.cat([before, own], -1).float() * shape.head_dim**-0.5).softmax(-1)
        first, second = weights.to(v.dtype).split([before.shape[-1], own.shape[-1]], -1)
        mixed = torch.einsum("banrt,bnth->banrh", first, v)
        mixed = mixed + torch.einsum("banrs,bansh->banrh", second, v_own)
        out: Tensor = self.o_proj(mixed.transpose(2, 3).flatten(3))
        return out


def _rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding of x [..., rows, H] at positions [..., rows], as `draft_heads.rotate`."""
    half = x.shape[-1] // 2
    places = torch.arange(half, device=x.device, dtype=torch.float32)
    angles = positions[..., None] * theta ** (-places / half)
    cos, sin = angles.cos(), angles.sin()
    first, second = x.float().split(half, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


class Convolutions(nn.Module):
    """DFlash2's convolutions over a block's rows, before and after a part of a layer. Each row's
    taps are a base plus what the part's input gives."""

    def __init__(self, size: int, taps: int, group: int) -> None:
        super().__init__()
        self.sizes = (2, taps, size // group, 1)
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, size))
        self.kernel_projection = linear(size, 2 * taps * (size // group))

    def taps(self, x: Tensor) -> Tensor:
        """The taps [..., R, 2, taps, D] of rows x [..., R, D]."""
        added = self.kernel_projection(x).unflatten(-1, self.sizes)
        size = x.shape[-1] // self.sizes[2]
        out: Tensor = self.base_kernel + added.expand(*added.shape[:-1], size).flatten(-2)
        return out

    def forward(self, x: Tensor, taps: Tensor) -> Tensor:
        """Convolved rows of x [..., R, D], from one side's taps [..., R, taps, D]."""
        out = taps[..., 0, :] * x
        for tap in range(1, taps.shape[-2]):
            out = out + taps[..., tap, :] * F.pad(x[..., :-tap, :], (0, 0, tap, 0))
        return out


class BlockLayer(nn.Module):
    """Qwen3's decoder layer over blocks, with DFlash2's convolutions where the shape has them."""

    def __init__(self, block: BlockShape, window: int | None) -> None:
        super().__init__()
        shape = block.layer
        self.self_attn = BlockAttention(shape, window)
        self.mlp = GatedMLP(shape)
        self.input_layernorm = Norm(shape.hidden_size, shape.eps)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.eps)
        self.attention_conv = self.mlp_conv = None
        if block.conv_taps:
            sizes = (shape.hidden_size, block.conv_taps, block.conv_group)
            self.attention_conv, self.mlp_conv = Convolutions(*sizes), Convolutions(*sizes)

    def forward(self, h: Tensor, context: Tensor, places: Places) -> Tensor:
        """The layer's output [B, A, R, D]; the context enters without the input norm."""
        x = self.input_layernorm(h)
        h = h + _around(self.attention_conv, x, lambda x: self.self_attn(x, context, places))
        out: Tensor = h + _around(self.mlp_conv, self.post_attention_layernorm(h), self.mlp)
        return out


def _around(conv: Convolutions | None, x: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
    """A part's output for x, with convolutions before and after it."""
    if conv is None:
        return part(x)
    taps = conv.taps(x)
    out: Tensor = conv(part(conv(x, taps[..., 0, :, :])), taps[..., 1, :, :])
    return out


class MarkovHead(nn.Module):
    """DSpark's sequential head: a bias of the logits from the token before, of low rank."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        rank, size = shape.markov_rank, shape.layer.hidden_size
        self.kind = shape.markov_kind
        self.markov_w1 = nn.Embedding(shape.vocab_size, rank)
        self.markov_w2 = linear(rank, shape.draft_vocab_size)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(size + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + size, 3 * rank)

    def step(self, token: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """The bias [..., W] after tokens [...] at rows of hidden [..., D], and the next state."""
        e = self.markov_w1(token)
        state = torch.zeros_like(e) if state is None else state
        if self.kind == "gated":
            gate = torch.sigmoid(self.gate_proj(torch.cat([hidden, e], -1)))
            return self.markov_w2(gate * e), state
        if self.kind == "rnn":
            joint = self.joint_proj(torch.cat([state, e, hidden], -1))
            gate, candidate, out = joint.chunk(3, -1)
            gate = torch.sigmoid(gate)
            state = gate * state + (1 - gate) * torch.tanh(candidate)
            return self.markov_w2(torch.tanh(out)), state
        return self.markov_w2(e), state


class ConfidenceHead(nn.Module):
    """DSpark's estimate of whether a draft is accepted where those before it were."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.proj = nn.Linear(inputs, 1)

    def forward(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Log odds [...] from a row's state and the embedding of the token before."""
        out: Tensor = self.proj(torch.cat([hidden, previous], -1)).squeeze(-1)
        return out


class CandidateSelector(nn.Module):
    """DFlash2's score of a candidate c after token p at a row h: <A[p] * (W h), B[c]>."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        rank, size = shape.selector_rank, shape.layer.hidden_size
        self.predecessor_codebook = nn.Parameter(torch.zeros(shape.vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(shape.vocab_size, rank))
        self.hidden_projection = linear(size, rank)

    def forward(self, hidden: Tensor, previous: Tensor, candidates: Tensor) -> Tensor:
        """Scores [..., C] of candidates [..., C] after tokens [...] at rows hidden [..., D]."""
        latent = F.embedding(previous, self.predecessor_codebook) * self.hidden_projection(hidden)
        after = F.embedding(candidates, self.successor_codebook)
        out: Tensor = (after * latent.unsqueeze(-2)).sum(-1)
        return out


class BlockHead(nn.Module):
    """DFlash (arXiv 2602.06036); with a Markov rank, DSpark; with a selector, DFlash2."""

    token_ids: Tensor | None = None  # [W] target ids of the draft vocabulary; None: all

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        size, eps = shape.layer.hidden_size, shape.layer.eps
        self.shape = shape
        self.fc = linear(shape.num_aux * shape.target_size, size)
        self.hidden_norm, self.norm = Norm(size, eps), Norm(size, eps)
        self.layers = nn.ModuleList(BlockLayer(shape, w) for w in shape.windows)
        self.lm_head = self.embed_tokens = None
        if shape.own_tables:
            self.lm_head = linear(size, shape.draft_vocab_size)
            self.embed_tokens = nn.Embedding(shape.vocab_size, size)
        self.markov_head = self.confidence_head = None
        if shape.markov_rank:
            self.markov_head = MarkovHead(shape)
            self.confidence_head = ConfidenceHead(size + shape.markov_rank)
        self.candidate_selector = CandidateSelector(shape) if shape.selector_rank else None

    def states(self, target: TargetView, tokens: Tensor, anchors: Tensor, num_rows: int) -> Tensor:
        """States [B, A, R, D] of the blocks at `anchors` [B, A] of texts [B, T]."""
        context = self.hidden_norm(self.fc(target.aux))
        row = torch.arange(num_rows, device=tokens.device)
        places = Places(
            torch.arange(tokens.shape[1], device=tokens.device), anchors[..., None] + row
        )
        ids = tokens.gather(1, anchors)[..., None].where(row == 0, self.shape.mask_token_id)
        table = target.table if self.embed_tokens is None else self.embed_tokens.weight
        h = F.embedding(ids, table)
        for layer in self.layers:
            h = layer(h, context, places)
        out: Tensor = self.norm(h)
        return out if self.shape.samples_anchor else out[..., 1:, :]

    def logits(self, target: TargetView, states: Tensor) -> Tensor:
        """Logits [..., W] of states [..., D], without the Markov head."""
        head = target.head if self.lm_head is None else self.lm_head.weight
        return F.linear(states, head)

    def forced(self, states: Tensor, logits: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B, A, K, W] with the biases after given tokens `previous` [B, A, K], and log odds
        of acceptance [B, A, K]."""
        assert self.markov_head is not None
        assert self.confidence_head is not None
        biases, state = [], None
        for i in range(states.shape[2]):
            bias, state = self.markov_head.step(previous[:, :, i], states[:, :, i], state)
            biases.append(bias)
        embedded = self.markov_head.markov_w1(previous)
        odds = self.confidence_head(states.detach(), embedded.detach())
        return logits + torch.stack(biases, 2), odds

    def drafts(self, target: TargetView, tokens: Tensor, anchors: Tensor, k: int) -> Tensor:
        """Greedy drafts [B, A, K] after the anchors of texts [B, T]."""
        states = self.states(target, tokens, anchors, k + (not self.shape.samples_anchor))
        logits = self.logits(target, states)
        token, state, found = tokens.gather(1, anchors), None, []
        for i in range(k):
            scores = logits[:, :, i]
            if self.markov_head is not None:
                bias, state = self.markov_head.step(token, states[:, :, i], state)
                scores = scores + bias
            if self.candidate_selector is not None:
                best = scores.topk(self.shape.num_candidates)
                added = self.candidate_selector(states[:, :, i], token, best.indices)
                place = (best.values + added).argmax(-1, keepdim=True)
                token = best.indices.gather(-1, place).squeeze(-1)
            else:
                token = scores.argmax(-1)
            token = token if self.token_ids is None else self.token_ids[token]
            found.append(token)
        return torch.stack(found, -1)
