"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) over a compressed cache.

A token caches one latent of kv_rank numbers and one rotated key of rope_dim numbers, whatever the
number of heads. kv_b_proj never expands the cache: its key half moves to the queries and its value
half after the attention ("absorption"), which is the same sum in another order.
"""

from __future__ import annotations

import torch
from hydraspec_kernels.attention import GroupShape, paged_attention
from hydraspec_kernels.rope import Frequencies, apply_rope, rope_table
from torch import Tensor

from hydraspec.models.deepseek.config import DeepseekConfig
from hydraspec.models.kv_groups import GroupPass, RopeTable
from hydraspec.models.layers import Norm
from hydraspec.models.linear import Linear
from hydraspec.models.parts import Share, Tensors
from hydraspec.models.place import Place

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
        queries, biased = self.heads.times(config.query_dim), config.attention_bias
        entry: dict[str, int | Share] = {"q_proj": queries}
        if config.q_rank is not None:
            entry = {"q_a_proj": config.q_rank}
        entry["kv_a_proj_with_mqa"] = config.row_size
        self.down = Linear(place, size, entry, bias=biased)
        self.q_norm: Norm | None = None
        self.q_up: Linear | None = None
        if config.q_rank is not None:
            self.q_norm = Norm(config.q_rank, LATENT_EPS, place)
            self.q_up = Linear(place, config.q_rank, {"q_b_proj": queries})
        elif self.down.bias is not None:
            self.down.bias.zero_()  # q_proj has none
        self.kv_norm = Norm(config.kv_rank, LATENT_EPS, place)
        self.kv_up = place.empty(heads, config.nope_dim + config.value_dim, config.kv_rank)
        self.key_up = self.kv_up[:, : config.nope_dim]  # [Hq, n, R]
        self.value_up = self.kv_up[:, config.nope_dim :].transpose(1, 2)  # [Hq, R, v]
        values = self.heads.times(config.value_dim)
        self.out = Linear(place, values, {"o_proj": size}, bias=biased)

    def tensors(self) -> Tensors:
        config = self.config
        expanded = self.heads.times(config.nope_dim + config.value_dim)
        up = self.place.part(self.kv_up.view(-1, config.kv_rank), 0, expanded)
        found: Tensors = {"kv_b_proj.weight": up, "kv_a_layernorm.weight": self.kv_norm.weight}
        found |= self.down.tensors() | self.out.tensors()
        found.pop("q_proj.bias", None)  # no file has one
        if self.q_norm is not None and self.q_up is not None:
            found |= {"q_a_layernorm.weight": self.q_norm.weight, **self.q_up.tensors()}
        return found

    def finish(self) -> None:
        """Split rotary pairs into halves; call once after the weights are filled."""
        config = self.config
        if config.rope_interleaved:
            queries = self.down.weight[:, : self.q_width] if self.q_up is None else self.q_up.weight
            heads = queries.unflatten(1, (self.num_heads, config.query_dim))
            half_split(heads[..., config.nope_dim :])
            half_split(self.down.weight[:, self.q_width + config.kv_rank :])
            if self.down.bias is not None:
                half_split(self.down.bias[self.q_width + config.kv_rank :])

    def partial_sums(self, x: Tensor, shared: GroupPass, cache: Tensor) -> Tensor:
        """x [T, D] normed -> [T, D], or partial sums of it [S, T, D].

        Writes this layer's rows into cache [rows, 1, R + r] before reading it.
        """
        return self.out.partial_sums(self._attended(x, shared, cache))

    def _attended(self, x: Tensor, shared: GroupPass, cache: Tensor) -> Tensor:
        """x [T, D] normed -> what the output projection reads, [T, Hq * v]."""
        n, rank = self.config.nope_dim, self.config.kv_rank
        a = self.down.forward(x)
        self._cache_rows(a[:, self.q_width :], shared, cache)
        q = a[:, : self.q_width]
        if self.q_norm is not None and self.q_up is not None:
            q = self.q_up.forward(self.q_norm.forward(q))
        q = q.unflatten(1, (self.num_heads, self.config.query_dim))
        rotated = apply_rope(q[..., n:], shared.cos, shared.sin)
        absorbed = torch.bmm(q[..., :n].transpose(0, 1), self.key_up).transpose(0, 1)
        query = torch.cat((absorbed, rotated), -1)
        latent = paged_attention(query, cache, shared.plan).view(-1, self.num_heads, rank)
        return torch.bmm(latent.transpose(0, 1), self.value_up).transpose(0, 1).flatten(1)

    def write_kv(self, x: Tensor, shared: GroupPass, cache: Tensor) -> None:
        """x [T, D] normed: this layer's rows into cache, and nothing else."""
        self._cache_rows(self.down.columns_from(x, self.q_width), shared, cache)

    def _cache_rows(self, kv: Tensor, shared: GroupPass, cache: Tensor) -> None:
        """kv [T, R + r], raw -> cached rows: the normed latent, then the rotated key."""
        rank = self.config.kv_rank
        key = apply_rope(kv[:, None, rank:], shared.cos, shared.sin)
        row = torch.cat((self.kv_norm.forward(kv[:, None, :rank]), key), -1)
        shared.write(cache, row)
