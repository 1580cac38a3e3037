"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) over a compressed cache.

A token caches one latent of kv_rank numbers and one rotated key of rope_dim numbers, whatever the
number of heads. kv_b_proj never expands the cache: its key half moves to the queries and its value
half after the attention ("absorption"), which is the same sum in another order.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from hydraspec_kernels.attention import paged_attention
from hydraspec_kernels.rope import apply_rope
from torch import Tensor

from hydraspec.models.checkpoint.quantization import Scheme
from hydraspec.models.deepseek.config import DeepseekConfig
from hydraspec.models.kv_groups import GroupPass
from hydraspec.models.layers import Norm
from hydraspec.models.linear import Linear
from hydraspec.models.parts import Share, Tensors, Weights
from hydraspec.models.place import Place

# The norms inside the attention have their own eps in transformers, whatever rms_norm_eps says.
LATENT_EPS = 1e-6


class HeadLatents(Linear):
    """kv_b_proj of this rank's heads: latents [T, R] -> keys [T, Hq, n] and values [T, Hq, v].

    Both halves are absorbed, so that the cache is never expanded: the key half maps queries to the
    space of latents, the value half maps attended latents to values.
    """

    def __init__(self, config: DeepseekConfig, heads: Share, place: Place) -> None:
        n, v = config.nope_dim, config.value_dim
        outputs = {"kv_b_proj": heads.times(n + v)}
        super().__init__(place, config.kv_rank, outputs, as_stored=True, unpacked=True)
        self.num_heads, self.num_keys = heads.count, n
        self.view_halves()

    def view_halves(self) -> None:
        """Sets the two halves as views of the weight."""
        by_head = self.weight.t().unflatten(0, (self.num_heads, -1))
        self.keys = by_head[:, : self.num_keys]  # [Hq, n, R]
        self.values = by_head[:, self.num_keys :].transpose(1, 2)  # [Hq, R, v]

    def allocate(self, schemes: Mapping[str, Scheme]) -> None:
        """See Linear."""
        super().allocate(schemes)
        self.view_halves()

    def finish_quantised(self, where: str, prefix: str) -> None:
        """See Linear."""
        super().finish_quantised(where, prefix)
        self.view_halves()

    def absorb_keys(self, queries: Tensor) -> Tensor:
        """Queries [T, Hq, n] -> queries of latents [T, Hq, R]: products of both are scores."""
        return torch.bmm(queries.transpose(0, 1), self.keys).transpose(0, 1)

    def expand_values(self, latents: Tensor) -> Tensor:
        """Attended latents [T, Hq, R] -> values [T, Hq * v]."""
        return torch.bmm(latents.transpose(0, 1), self.values).transpose(0, 1).flatten(1)


def half_split(rows: Tensor, num_heads: int, kept: int) -> Tensor:
    """Rows [heads * H, ...] with the rows of each head from `kept` on reordered from interleaved to
    half-split RoPE: even ones first, then odd ones.

    Rotating i with i + r/2 then equals rotating neighbours before. Scores do not depend on the
    order, as long as queries and keys share it.
    """
    heads = rows.unflatten(0, (num_heads, -1))
    turned = heads[:, kept:]
    return torch.cat((heads[:, :kept], turned[:, 0::2], turned[:, 1::2]), 1).flatten(0, 1)


class LatentAttention(Weights):
    """Latent attention block. Letters: R kv_rank, r rope_dim, n nope_dim, v value_dim, Hq heads.

    `down` yields the query latent (or the queries), then the latent and the key that are cached.
    Ranks divide the heads, and their outputs add up to the block's; Hq are this rank's.
    """

    names: Mapping[str, str] = {
        "down": "",
        "q_norm": "q_a_layernorm.",
        "q_up": "",
        "kv_norm": "kv_a_layernorm.",
        "kv_up": "",
        "out": "",
    }

    def __init__(self, config: DeepseekConfig, place: Place) -> None:
        self.config, self.place, size = config, place, config.hidden_size
        self.heads = place.share(config.num_heads)
        self.num_heads = heads = self.heads.count
        # Columns of `down` before the cached ones.
        self.q_width = config.q_rank or heads * config.query_dim
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
            self.down.bias.zero_()  # checkpoints have no bias of q_proj
        self.kv_norm = Norm(config.kv_rank, LATENT_EPS, place)
        self.kv_up = HeadLatents(config, self.heads, place)
        values = self.heads.times(config.value_dim)
        self.out = Linear(place, values, {"o_proj": size}, bias=biased)

    def tensors(self) -> Tensors:
        """Weights by their names below `self_attn.`."""
        found = super().tensors()
        found.pop("q_proj.bias", None)  # not in checkpoints
        return found

    def finish(self) -> None:
        """Reorders rotary pairs into halves; call once after the weights are filled."""
        if not self.config.rope_interleaved:
            return
        queries = partial(half_split, num_heads=self.num_heads, kept=self.config.nope_dim)
        keys = partial(half_split, num_heads=1, kept=self.config.kv_rank)
        self.down = self.down.reordered("kv_a_proj_with_mqa", keys)
        if self.q_up is None:
            self.down = self.down.reordered("q_proj", queries)
        else:
            self.q_up = self.q_up.reordered("q_b_proj", queries)

    def partial_sums(self, x: Tensor, shared: GroupPass, cache: Tensor) -> Tensor:
        """Output [T, D] for x [T, D], normed, or its partial sums [S, T, D].

        Writes this layer's rows into cache [rows, 1, R + r] before the cache is read.
        """
        return self.out.partial_sums(self._attended(x, shared, cache))

    def _attended(self, x: Tensor, shared: GroupPass, cache: Tensor) -> Tensor:
        """Input [T, Hq * v] of the output projection for x [T, D], normed."""
        n, rank = self.config.nope_dim, self.config.kv_rank
        a = self.down.forward(x)
        self._cache_rows(a[:, self.q_width :], shared, cache)
        q = a[:, : self.q_width]
        if self.q_norm is not None and self.q_up is not None:
            q = self.q_up.forward(self.q_norm.forward(q))
        q = q.unflatten(1, (self.num_heads, self.config.query_dim))
        rotated = apply_rope(q[..., n:], shared.cos, shared.sin)
        query = torch.cat((self.kv_up.absorb_keys(q[..., :n]), rotated), -1)
        latent = paged_attention(query, cache, shared.plan).view(-1, self.num_heads, rank)
        return self.kv_up.expand_values(latent)

    def write_kv(self, x: Tensor, shared: GroupPass, cache: Tensor) -> None:
        """Writes this layer's rows of x [T, D], normed, into cache, without attention."""
        self._cache_rows(self.down.by_library(x, self.q_width), shared, cache)

    def _cache_rows(self, kv: Tensor, shared: GroupPass, cache: Tensor) -> None:
        """Caches the rows of raw kv [T, R + r]: the normed latent, then the rotated key."""
        rank = self.config.kv_rank
        key = apply_rope(kv[:, None, rank:], shared.cos, shared.sin)
        row = torch.cat((self.kv_norm.forward(kv[:, None, :rank]), key), -1)
        shared.write(cache, row)
