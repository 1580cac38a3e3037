"""Attention over a paged cache: one projection for queries, keys and values, optional head norms,
rotary positions.

Used by Gemma 4, by Llama-like decoders and by draft heads; DeepSeek's latent attention is in
deepseek/.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from hydraspec_kernels.attention import (
    Projection,
    QkvShape,
    attend_projection,
    with_gain,
    write_qkv,
)
from hydraspec_kernels.linear import linear, linear_partials
from torch import Tensor

from hydraspec.models.kv_groups import GroupPass
from hydraspec.models.layers import Place
from hydraspec.models.parts import Tensors


@dataclass(slots=True, frozen=True, kw_only=True)
class AttentionShape:
    """Sizes and options of one attention block. Score scale and window are the KV group's."""

    input_size: int  # in_features of q, k and v
    output_size: int  # out_features of o
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    qk_norm: bool = False  # RMSNorm over each query and key head
    value_norm: bool = False  # the same over each value head, without weight
    shares_kv: bool = False  # query heads only: keys and values are another layer's
    k_eq_v: bool = False  # values are the key projection, neither weighted nor rotated
    qkv_bias: bool = False
    out_bias: bool = False


class Attention:
    """Query heads first, then key heads, then value heads, in one projection. Ranks divide the
    heads: what each returns adds up to the block's output.
    """

    def __init__(self, shape: AttentionShape, place: Place) -> None:
        self.place, self.uses_cpu_norms = place, place.uses_cpu_norms
        self.queries, self.kv = place.heads(shape.num_heads, shape.num_kv_heads)
        shape = replace(shape, num_heads=self.queries.count, num_kv_heads=self.kv.count)
        self.shape = shape  # with this rank's heads
        size, kv = shape.head_dim, 0 if shape.shares_kv else shape.num_kv_heads
        self.num_key_heads, self.num_value_heads = kv, 0 if shape.k_eq_v else kv
        columns = (shape.num_heads + self.num_key_heads + self.num_value_heads) * size
        self.qkv = place.matrix(shape.input_size, columns)
        self.out = place.matrix(shape.num_heads * size, shape.output_size)
        self.qkv_bias = place.empty(columns) if shape.qkv_bias else None
        self.out_bias = place.empty(shape.output_size) if shape.out_bias else None
        self.q_norm = place.empty(size) if shape.qk_norm else None
        self.k_norm = place.empty(size) if shape.qk_norm and kv else None

    def tensors(self) -> Tensors:
        """Weights by their names below `self_attn.`."""
        part, size = self.place.part, self.shape.head_dim
        found: Tensors = {"o_proj.weight": part(self.out.t(), 1, self.queries.times(size))}
        if self.out_bias is not None:
            found["o_proj.bias"] = self.out_bias
        for name, norm in (("q_norm", self.q_norm), ("k_norm", self.k_norm)):
            if norm is not None:
                found[f"{name}.weight"] = norm
        shares = {
            "q_proj": self.queries,
            "k_proj": self.kv if self.num_key_heads else None,
            "v_proj": self.kv if self.num_value_heads else None,
        }
        first = 0
        for name, heads in shares.items():
            if heads is None:
                continue
            columns = slice(first, first + heads.count * size)
            first, rows = columns.stop, heads.times(size)
            found[f"{name}.weight"] = part(self.qkv[:, columns].t(), 0, rows)
            if self.qkv_bias is not None:
                found[f"{name}.bias"] = part(self.qkv_bias[columns], 0, rows)
        return found

    @cached_property
    def heads(self) -> QkvShape:
        """The kernels' record of the projection's heads; made at the first use, once weights are
        filled.
        """
        shape = self.shape
        heads = QkvShape(
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            eps=shape.eps,
            q_weight=self.q_norm,
            k_weight=self.k_norm,
            value_norm=shape.value_norm,
            k_eq_v=shape.k_eq_v,
        )
        return with_gain(heads) if self.uses_cpu_norms else heads

    def partial_sums(self, x: Tensor, shared: GroupPass, cache: Tensor) -> Tensor:
        """x [T, input_size] normed -> [T, output_size], or partial sums of it [S, T, output_size].

        Writes this layer's keys and values into cache before reading it.
        """
        qkv = linear(x, self.qkv, self.qkv_bias)
        attended = attend_projection(
            Projection(qkv, shared.cos, shared.sin, shared.cache_rows, shared.has_padding),
            cache,
            shared.plan,
            self.heads,
            writes=not self.shape.shares_kv,
        )
        if self.out_bias is None:
            return linear_partials(attended, self.out)
        return linear(attended, self.out, self.place.once(self.out_bias))

    def write_kv(self, x: Tensor, shared: GroupPass, cache: Tensor) -> None:
        """x [T, input_size] normed: this layer's keys and values into cache, and nothing else."""
        first = self.shape.num_heads * self.shape.head_dim
        bias = None if self.qkv_bias is None else self.qkv_bias[first:]
        # The library's product: no kernel is compiled for columns that decoding never takes alone.
        kv = torch.nn.functional.linear(x, self.qkv[:, first:].t(), bias)
        projection = Projection(kv, shared.cos, shared.sin, shared.cache_rows)
        write_qkv(projection, cache, replace(self.heads, num_heads=0, gain=None))
