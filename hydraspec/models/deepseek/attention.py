"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) over a compressed cache.

A token caches one latent of kv_rank numbers and one rotated key of rope_dim numbers, whatever the
number of heads. kv_b_proj never expands the cache: its key half moves to the queries and its value
half after the attention ("absorption"), which is the same sum in another order.
"""

from __future__ import annotations

import torch
from hydraspec_kernels.attention import GroupShape, paged_attention
from hydraspec_kernels.linear import linear, linear_partials
from hydraspec_kernels.rope import Frequencies, apply_rope, rope_table
from torch import Tensor

from hydraspec.models.deepseek.config import DeepseekConfig
from hydraspec.models.kv_groups import GroupPass, RopeTable
from hydraspec.models.layers import Norm, Place
from hydraspec.models.parts import Tensors

# The norms inside the attention have their own eps in transformers, whatever rms_norm_eps says.
LATENT_EPS = 1e-6


def latent_group(config: DeepseekConfig, block_size: int, place: Place) -> GroupShape:
    """The attention of a KV group of such layers, with this rank's heads. Every rank caches whole
    rows.
    """
    return GroupShape(
        num_heads=place.share(config.num_heads).count,
        num_kv_heads=1,
        head_dim=config.row_size,
        block_size=block_size,
        window=None,
        scale=config.score_scale,
        latent_dim=config.kv_rank,
    )


def latent_rope_table(
    config: DeepseekConfig, theta: Frequencies, positions: Tensor, dtype: torch.dtype
) -> RopeTable:
    """Cosines and sines with YaRN's gain, rounded once."""
    cos, sin = rope_table(positions, theta, theta.cos.dtype)
    if config.rope.gain != 1.0:
        cos, sin = cos.mul_(config.rope.gain), sin.mul_(config.rope.gain)
    return cos.to(dtype), sin.to(dtype)


def half_split(matrix: Tensor) -> None:
    """Reorder the last dimension [..., r] in place: even entries first, then odd ones.

    Rotating i with i + r/2 then is what rotating neighbours was. Scores do not see the order, as
    long as queries and keys share it.
    """
    matrix.copy_(torch.cat((matrix[..., 0::2], matrix[..., 1::2]), -1))


class LatentAttention:
    """Letters: R kv_rank, r rope_dim, n nope_dim, v value_dim, Hq heads.

    `down` yields the query latent (or the queries) and, after it, the cached latent and key. Ranks
    divide the heads; Hq are this rank's.
    """

    def __init__(self, config: DeepseekConfig, place: Place) -> None:
        self.config, self.place, size = config, place, config.hidden_size
        self.heads = place.share(config.num_heads)
        self.num_heads = heads = self.heads.count
        self.query_width = heads * config.query_dim
        self.q_width = config.q_rank or self.query_width  # columns of `down` before the cached ones
        self.down = place.matrix(size, self.q_width + config.row_size)
        self.down_bias = self.out_bias = None
        if config.attention_bias:
            self.down_bias = place.empty(self.down.shape[1]).zero_()  # q_proj has none
            self.out_bias = place.empty(size)
        self.q_norm, self.q_up = None, self.down[:, : self.q_width]
        if config.q_rank is not None:
            self.q_norm = Norm(config.q_rank, LATENT_EPS, place)
            self.q_up = place.matrix(config.q_rank, self.query_width)
        self.kv_norm = Norm(config.kv_rank, LATENT_EPS, place)
        self.kv_up = place.empty(heads, config.nope_dim + config.value_dim, config.kv_rank)
        self.key_up = self.kv_up[:, : config.nope_dim]  # [Hq, n, R]
        self.value_up = self.kv_up[:, config.nope_dim :].transpose(1, 2)  # [Hq, R, v]
        self.out = place.matrix(heads * config.value_dim, size)

    def tensors(self) -> Tensors:
        config, q, part, heads = self.config, self.q_width, self.place.part, self.heads
        queries, values = heads.times(config.query_dim), heads.times(config.value_dim)
        expanded = heads.times(config.nope_dim + config.value_dim)
        found: Tensors = {
            "kv_a_proj_with_mqa.weight": self.down[:, q:].t(),
            "kv_a_layernorm.weight": self.kv_norm.weight,
            "kv_b_proj.weight": part(self.kv_up.view(-1, config.kv_rank), 0, expanded),
            "o_proj.weight": part(self.out.t(), 1, values),
        }
        if self.q_norm is None:
            found["q_proj.weight"] = part(self.down[:, :q].t(), 0, queries)
        else:
            found["q_a_proj.weight"] = self.down[:, :q].t()
            found["q_a_layernorm.weight"] = self.q_norm.weight
            found["q_b_proj.weight"] = part(self.q_up.t(), 0, queries)
        if self.down_bias is not None and self.out_bias is not None:
            found["kv_a_proj_with_mqa.bias"] = self.down_bias[q:]
            found["o_proj.bias"] = self.out_bias
            if self.q_norm is not None:
                found["q_a_proj.bias"] = self.down_bias[:q]
        return found

    def finish(self) -> None:
        """Split rotary pairs into halves; call once after the weights are filled."""
        config = self.config
        if config.rope_interleaved:
            heads = self.q_up.unflatten(1, (self.num_heads, config.query_dim))
            half_split(heads[..., config.nope_dim :])
            half_split(self.down[:, self.q_width + config.kv_rank :])
            if self.down_bias is not None:
                half_split(self.down_bias[self.q_width + config.kv_rank :])

    def partial_sums(self, x: Tensor, shared: GroupPass, cache: Tensor) -> Tensor:
        """x [T, D] normed -> [T, D], or partial sums of it [S, T, D].

        Writes this layer's rows into cache [rows, 1, R + r] before reading it.
        """
        values = self._attended(x, shared, cache)
        if self.out_bias is None:
            return linear_partials(values, self.out)
        return linear(values, self.out, self.place.once(self.out_bias))

    def _attended(self, x: Tensor, shared: GroupPass, cache: Tensor) -> Tensor:
        """x [T, D] normed -> what the output projection reads, [T, Hq * v]."""
        n, rank = self.config.nope_dim, self.config.kv_rank
        a = linear(x, self.down, self.down_bias)
        self._cache_rows(a[:, self.q_width :], shared, cache)
        q = a[:, : self.q_width]
        if self.q_norm is not None:
            q = linear(self.q_norm.forward(q), self.q_up)
        q = q.unflatten(1, (self.num_heads, self.config.query_dim))
        rotated = apply_rope(q[..., n:], shared.cos, shared.sin)
        absorbed = torch.bmm(q[..., :n].transpose(0, 1), self.key_up).transpose(0, 1)
        query = torch.cat((absorbed, rotated), -1)
        latent = paged_attention(query, cache, shared.plan).view(-1, self.num_heads, rank)
        return torch.bmm(latent.transpose(0, 1), self.value_up).transpose(0, 1).flatten(1)

    def write_kv(self, x: Tensor, shared: GroupPass, cache: Tensor) -> None:
        """x [T, D] normed: this layer's rows into cache, and nothing else."""
        bias = None if self.down_bias is None else self.down_bias[self.q_width :]
        kv = torch.nn.functional.linear(x, self.down[:, self.q_width :].t(), bias)
        self._cache_rows(kv, shared, cache)

    def _cache_rows(self, kv: Tensor, shared: GroupPass, cache: Tensor) -> None:
        """kv [T, R + r], raw -> cached rows: the normed latent, then the rotated key."""
        rank = self.config.kv_rank
        key = apply_rope(kv[:, None, rank:], shared.cos, shared.sin)
        row = torch.cat((self.kv_norm.forward(kv[:, None, :rank]), key), -1)
        shared.write(cache, row)
