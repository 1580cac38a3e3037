"""Gemma 4's attention over a paged cache: normed heads, rotary positions, no score scale."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from hydraspec_kernels.attention import (
    AttentionPlan,
    Projection,
    QkvShape,
    attend_projection,
    paged_attention,
    write_qkv,
)
from hydraspec_kernels.linear import linear, linear_partials
from hydraspec_kernels.norms import unit_norm
from hydraspec_kernels.rope import apply_rope
from torch import Tensor

from hydraspec.models.gemma4.config import Gemma4Config, LayerShape
from hydraspec.models.layers import Norm, Place, Tensors


@dataclass(slots=True)
class GroupPass:
    """What the layers of one type share in one forward pass."""

    cos: Tensor  # [T, 1, H]
    sin: Tensor  # [T, 1, H], first half negated
    plan: AttentionPlan
    slots: Tensor  # [T] cache rows to write, -1 for rows that write none
    has_padding: bool = False  # host fact: there may be such rows
    _places: tuple[Tensor, Tensor] | None = None  # [T] where to write, and what stands for nobody

    def write(self, cache: Tensor, rows: Tensor) -> None:
        """Write rows [T, ...] into cache [num_rows, ...]. Padding writes zeros into row 0, which is
        the null block's and holds zeros.
        """
        if not self.has_padding:
            cache.index_copy_(0, self.slots, rows)
            return
        if self._places is None:
            self._places = (self.slots.clamp(min=0), self.slots < 0)
        places, is_padding = self._places
        shape = (-1, *(1,) * (rows.dim() - 1))
        cache.index_copy_(0, places, rows.masked_fill(is_padding.view(shape), 0.0))


def write_kv(
    x: Tensor, qkv: Tensor, bias: Tensor | None, shape: QkvShape, shared: GroupPass, cache: Tensor
) -> None:
    """x [T, D] normed: keys and values by the columns of `qkv` behind the queries', into cache."""
    first = shape.num_heads * shape.head_dim
    # The library's product: no kernel is compiled for columns that decoding never takes alone.
    kv = torch.nn.functional.linear(x, qkv[:, first:].t(), None if bias is None else bias[first:])
    projection = Projection(kv, shared.cos, shared.sin, shared.slots)
    write_qkv(projection, cache, replace(shape, num_heads=0))


class Attention:
    """Query heads first, then key heads, then value heads, in one projection.

    A layer that shares KV has query heads only. With k_eq_v the values are the key projection,
    normed without weight and not rotated.
    """

    def __init__(self, config: Gemma4Config, layer: LayerShape, place: Place) -> None:
        self.num_heads, self.head_dim, self.eps = (
            config.num_heads,
            layer.head_dim,
            config.rms_norm_eps,
        )
        self.num_kv = layer.num_kv_heads
        self.writes_kv, self.k_eq_v = not layer.shares_kv, layer.k_eq_v
        self.num_rotated = self.num_heads + (self.num_kv if self.writes_kv else 0)
        own_values = self.writes_kv and not self.k_eq_v
        self.heads = self.num_rotated + (self.num_kv if own_values else 0)
        self.qkv = place.matrix(config.hidden_size, self.heads * self.head_dim)
        self.out = place.matrix(self.num_heads * self.head_dim, config.hidden_size)
        self.qkv_bias = place.empty(self.qkv.shape[1]) if config.attention_bias else None
        self.out_bias = place.empty(config.hidden_size) if config.attention_bias else None
        self.q_norm = place.empty(self.head_dim)
        self.k_norm = place.empty(self.head_dim) if self.writes_kv else None
        self.folded, self.root = place.folded, math.sqrt(self.head_dim)
        self.floor = place.number(math.sqrt(self.head_dim * self.eps))
        self.head_weight = self.q_norm
        self.shape = QkvShape(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv,
            head_dim=self.head_dim,
            eps=self.eps,
            q_weight=self.q_norm,
            k_weight=self.k_norm,
            value_norm=True,
            k_eq_v=self.k_eq_v,
        )

    def tensors(self) -> Tensors:
        parts = {"q_proj": (0, self.num_heads)}
        if self.writes_kv:
            parts["k_proj"] = (self.num_heads, self.num_kv)
            if not self.k_eq_v:
                parts["v_proj"] = (self.num_rotated, self.num_kv)
        found = {"o_proj.weight": self.out.t(), "q_norm.weight": self.q_norm}
        if self.k_norm is not None:
            found["k_norm.weight"] = self.k_norm
        for name, (first, count) in parts.items():
            columns = slice(first * self.head_dim, (first + count) * self.head_dim)
            found[f"{name}.weight"] = self.qkv[:, columns].t()
            if self.qkv_bias is not None:
                found[f"{name}.bias"] = self.qkv_bias[columns]
        if self.out_bias is not None:
            found["o_proj.bias"] = self.out_bias
        return found

    def finish(self, norm: Norm, stream_scale: float) -> None:
        """Fold the norm before; spread the head norms over the heads (values have weight 1)."""
        if not self.folded:
            return
        norm.fold_into(self.qkv, stream_scale=stream_scale)
        self.head_weight = self.qkv.new_ones(self.heads, self.head_dim)
        self.head_weight[: self.num_heads] = self.q_norm
        if self.k_norm is not None:
            self.head_weight[self.num_heads : self.num_rotated] = self.k_norm
        self.head_weight.mul_(self.root)

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [T, D] -> rotated queries [T, Hq, H] of a layer without KV of its own."""
        return apply_rope(self._normed_heads(self._project(x)), cos, sin)

    def output(self, attended: Tensor) -> Tensor:
        """[T, Hq * H] -> [T, D]."""
        if self.out_bias is None:
            return torch.mm(attended, self.out)
        return torch.addmm(self.out_bias, attended, self.out)

    def __call__(self, x: Tensor, shared: GroupPass, cache: Tensor) -> Tensor:
        """Folded: x [T, D] normed -> [T, D]; writes this layer's keys and values into cache before
        reading it.
        """
        if not self.writes_kv:
            heads = self.queries(x, shared.cos, shared.sin)
            return self.output(paged_attention(heads, cache, shared.plan))
        raw = self._project(x)
        heads = self._normed_heads(raw)
        n = self.num_heads
        if self.k_eq_v:
            apply_rope(heads, shared.cos, shared.sin)
            kv = torch.stack((heads[:, n:], self._weightless(raw[:, n:])), 1)
        else:
            apply_rope(heads[:, : self.num_rotated], shared.cos, shared.sin)
            kv = heads[:, n:].view(-1, 2, self.num_kv, self.head_dim)
        shared.write(cache, kv)
        return self.output(paged_attention(heads[:, :n], cache, shared.plan))

    def write(self, x: Tensor, shared: GroupPass, cache: Tensor) -> None:
        """x [T, D] normed: this layer's keys and values into cache, and nothing else."""
        write_kv(x, self.qkv, self.qkv_bias, self.shape, shared, cache)

    def _project(self, x: Tensor) -> Tensor:
        if self.qkv_bias is None:
            return torch.mm(x, self.qkv).view(-1, self.heads, self.head_dim)
        return torch.addmm(self.qkv_bias, x, self.qkv).view(-1, self.heads, self.head_dim)

    def _normed_heads(self, heads: Tensor) -> Tensor:
        return unit_norm(heads, self.floor).mul_(self.head_weight)

    def _weightless(self, heads: Tensor) -> Tensor:
        return unit_norm(heads, self.floor).mul_(self.root)

    def partials(self, x: Tensor, shared: GroupPass, cache: Tensor) -> Tensor:
        """The same for a model that is not folded: x [T, D] normed -> [S, T, D] to add up."""
        qkv = linear(x, self.qkv, self.qkv_bias)
        projection = Projection(qkv, shared.cos, shared.sin, shared.slots)
        attended = attend_projection(
            projection, cache, shared.plan, self.shape, writes=self.writes_kv
        )
        if self.out_bias is None:
            return linear_partials(attended, self.out)
        return linear(attended, self.out, self.out_bias)
