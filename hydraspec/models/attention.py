"""Attention over a paged cache: one projection for queries, keys and values, optional head norms,
rotary positions.

Used by Gemma 4, by Llama-like decoders and by draft heads; DeepSeek's latent attention is in
deepseek/.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from hydraspec_kernels.attention import (
    Projection,
    QkvShape,
    attend_projection,
    with_gain,
    write_qkv,
)
from hydraspec_kernels.quantised import RoundedRows, Rounding
from torch import Tensor

from hydraspec.models.kv_groups import GroupPass
from hydraspec.models.linear import Linear
from hydraspec.models.parts import Weights
from hydraspec.models.place import Place


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


class Attention(Weights):
    """Attention block with one projection for query heads, then key heads, then value heads. Ranks
    divide the heads, and their outputs add up to the block's output.
    """

    names: Mapping[str, str] = {
        "qkv": "",
        "out": "",
        "q_norm": "q_norm.weight",
        "k_norm": "k_norm.weight",
    }

    def __init__(self, shape: AttentionShape, place: Place) -> None:
        self.uses_cpu_norms = place.uses_cpu_norms
        self.queries, self.kv = place.heads(shape.num_heads, shape.num_kv_heads)
        shape = replace(shape, num_heads=self.queries.count, num_kv_heads=self.kv.count)
        self.shape = shape  # with this rank's heads
        size, kv = shape.head_dim, 0 if shape.shares_kv else shape.num_kv_heads
        self.num_key_heads, self.num_value_heads = kv, 0 if shape.k_eq_v else kv
        shares = {"q_proj": self.queries.times(size)}
        if self.num_key_heads:
            shares["k_proj"] = self.kv.times(size)
        if self.num_value_heads:
            shares["v_proj"] = self.kv.times(size)
        self.qkv = Linear(place, shape.input_size, shares, bias=shape.qkv_bias)
        self.out = Linear(
            place, shares["q_proj"], {"o_proj": shape.output_size}, bias=shape.out_bias
        )
        self.q_norm = place.empty(size) if shape.qk_norm else None
        self.k_norm = place.empty(size) if shape.qk_norm and kv else None
        self.kv_scales: Tensor | None = None  # [2, Hkv] float32, of an e4m3 cache

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
            kv_scales=self.kv_scales,
        )
        return with_gain(heads) if self.uses_cpu_norms else heads

    def use_kv_scales(self, scales: Tensor | None) -> None:
        """Takes the scales [2, Hkv] of an e4m3 cache, this layer's or that which it reads; None:
        the cache rounds nothing."""
        self.kv_scales = scales
        self.__dict__.pop("heads", None)

    @property
    def num_query_columns(self) -> int:
        """Number of this rank's query columns, which come first in the projection."""
        return self.shape.num_heads * self.shape.head_dim

    @property
    def rounding_before(self) -> Rounding | None:
        """See `Linear.rounding_before`."""
        return self.qkv.rounding_before

    def partial_sums(self, x: Tensor | RoundedRows, shared: GroupPass, cache: Tensor) -> Tensor:
        """Output [T, output_size] for x [T, input_size], normed, or its partial sums
        [S, T, output_size].

        A layer with its own KV writes keys and values into cache before the cache is read.
        """
        qkv = self.qkv.forward(x)
        if shared.query_scale is not None:
            qkv[:, : self.num_query_columns].mul_(shared.query_scale)
        heads = self.heads
        if shared.kv_scales is not None:
            heads = replace(heads, kv_scales=shared.kv_scales)
        attended = attend_projection(
            Projection(qkv, shared.cos, shared.sin, shared.cache_rows, shared.has_padding),
            cache,
            shared.plan,
            heads,
            writes=not self.shape.shares_kv,
            rounding=self.out.rounding_before,
        )
        return self.out.partial_sums(attended)

    def write_kv(self, x: Tensor | RoundedRows, shared: GroupPass, cache: Tensor) -> None:
        """Writes keys and values of x [T, input_size], normed, into cache, without attention."""
        self.write_projected(self.project_kv(x), shared, cache)

    def project_kv(self, x: Tensor | RoundedRows) -> Tensor:
        """Key and value columns [T, n] of x [T, input_size], normed."""
        return self.qkv.by_library(x, self.num_query_columns)

    def write_projected(self, kv: Tensor, shared: GroupPass, cache: Tensor) -> None:
        """Writes the keys and values of their columns kv [T, n] into cache, without attention."""
        projection = Projection(kv, shared.cos, shared.sin, shared.cache_rows)
        write_qkv(projection, cache, replace(self.heads, num_heads=0, gain=None))
