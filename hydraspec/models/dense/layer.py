"""Parts of a Llama-like decoder layer: attention, gated MLP, and the pre-norm layer they make.

Also what draft heads are built of: widths in and out of attention are free, and every part takes
the residual it adds to, so that a head can choose what it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from hydraspec_kernels.activation import gated_activation, gated_silu
from hydraspec_kernels.attention import (
    GroupShape,
    Projection,
    QkvShape,
    attend_projection,
    paged_attention,
    plan_attention,
)
from hydraspec_kernels.linear import Activation, gated_linear, linear, linear_partials
from hydraspec_kernels.norms import unit_norm_
from hydraspec_kernels.rope import Frequencies, apply_rope, mirrored
from torch import Tensor

from hydraspec.models.attention import GroupPass, write_kv
from hydraspec.models.dense.config import DenseConfig
from hydraspec.models.layers import Norm, Place, Tensors, join
from hydraspec.types import Rows


@dataclass(slots=True, frozen=True, kw_only=True)
class AttentionShape:
    """Sizes of one attention block."""

    input_size: int  # in_features of q, k and v
    output_size: int  # out_features of o
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    qk_norm: bool = False  # RMSNorm over each query and key head
    qkv_bias: bool = False
    out_bias: bool = False

    @classmethod
    def of(cls, config: DenseConfig, input_size: int | None = None) -> AttentionShape:
        """A config's attention. input_size is what q, k and v read, the hidden size if None (2 D in
        an EAGLE-3 head's first layer).
        """
        return cls(
            input_size=config.hidden_size if input_size is None else input_size,
            output_size=config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
            qk_norm=config.qk_norm,
            qkv_bias=config.qkv_bias,
            out_bias=config.out_bias,
        )


class DenseAttention:
    """Query heads first, then key heads, then value heads, in one projection.

    The score scale and the window are the KV group's (`GroupShape`), not this part's.
    """

    def __init__(self, shape: AttentionShape, place: Place) -> None:
        self.shape = shape
        self.num_rotated = shape.num_heads + shape.num_kv_heads
        self.heads = self.num_rotated + shape.num_kv_heads
        self.qkv = place.matrix(shape.input_size, self.heads * shape.head_dim)
        self.out = place.matrix(shape.num_heads * shape.head_dim, shape.output_size)
        self.qkv_bias = place.empty(self.qkv.shape[1]) if shape.qkv_bias else None
        self.out_bias = place.empty(shape.output_size) if shape.out_bias else None
        self.q_norm = place.empty(shape.head_dim) if shape.qk_norm else None
        self.k_norm = place.empty(shape.head_dim) if shape.qk_norm else None
        self.folded = place.folded
        self.floor = place.number(math.sqrt(shape.head_dim * shape.eps))
        self.head_weight: Tensor | None = None  # [Hq + Hkv, H] once folded, with head norms only
        self.heads_shape = QkvShape(
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            eps=shape.eps,
            q_weight=self.q_norm,
            k_weight=self.k_norm,
        )

    def tensors(self) -> Tensors:
        """Weights by their names below `self_attn.`."""
        dim = self.shape.head_dim
        found = {"o_proj.weight": self.out.t()}
        parts = {"q_proj": (0, self.shape.num_heads), "k_proj": (self.shape.num_heads, None)}
        parts["v_proj"] = (self.num_rotated, None)
        for name, (first, heads) in parts.items():
            count = self.shape.num_kv_heads if heads is None else heads
            columns = slice(first * dim, (first + count) * dim)
            found[f"{name}.weight"] = self.qkv[:, columns].t()
            if self.qkv_bias is not None:
                found[f"{name}.bias"] = self.qkv_bias[columns]
        if self.out_bias is not None:
            found["o_proj.bias"] = self.out_bias
        if self.q_norm is not None and self.k_norm is not None:
            found |= {"q_norm.weight": self.q_norm, "k_norm.weight": self.k_norm}
        return found

    def finish(self) -> None:
        """Spread the head norms' weights over the heads. Folding the norm before is the caller's:
        `norm.fold_into(attention.qkv, stream_scale=1)`, or rows of it.
        """
        if not self.folded or self.q_norm is None or self.k_norm is None:
            return
        self.head_weight = self.qkv.new_empty(self.num_rotated, self.shape.head_dim)
        self.head_weight[: self.shape.num_heads] = self.q_norm
        self.head_weight[self.shape.num_heads :] = self.k_norm
        self.head_weight.mul_(math.sqrt(self.shape.head_dim))

    def __call__(self, x: Tensor, residual: Tensor, shared: GroupPass, cache: Tensor) -> Tensor:
        """Folded: x [T, input_size] normed, residual [T, output_size] -> residual + attention.

        Writes this layer's keys and values into cache before reading it.
        """
        n, dim = self.shape.num_heads, self.shape.head_dim
        if self.qkv_bias is None:
            heads = torch.mm(x, self.qkv).view(-1, self.heads, dim)
        else:
            heads = torch.addmm(self.qkv_bias, x, self.qkv).view(-1, self.heads, dim)
        rotated = heads[:, : self.num_rotated]
        if self.head_weight is not None:
            unit_norm_(rotated, self.floor).mul_(self.head_weight)
        apply_rope(rotated, shared.cos, shared.sin)
        kv = heads[:, n:].view(-1, 2, self.shape.num_kv_heads, dim)
        shared.write(cache, kv)
        attended = paged_attention(heads[:, :n], cache, shared.plan)
        out = torch.addmm(residual, attended, self.out)
        return out if self.out_bias is None else out.add_(self.out_bias)

    def write(self, x: Tensor, shared: GroupPass, cache: Tensor) -> None:
        """x [T, input_size] normed: this layer's keys and values into cache, and nothing else."""
        write_kv(x, self.qkv, self.qkv_bias, self.heads_shape, shared, cache)

    def partials(self, x: Tensor, shared: GroupPass, cache: Tensor) -> Tensor:
        """The same for a model that is not folded, without the residual: [T, output_size] or
        partial sums of it.
        """
        qkv = linear(x, self.qkv, self.qkv_bias)
        projection = Projection(qkv, shared.cos, shared.sin, shared.slots)
        attended = attend_projection(projection, cache, shared.plan, self.heads_shape, writes=True)
        if self.out_bias is None:
            return linear_partials(attended, self.out)
        return linear(attended, self.out, self.out_bias)


class DenseMLP:
    """residual + down(act(gate(x)) * up(x))."""

    def __init__(
        self,
        size: int,
        inner: int,
        place: Place,
        *,
        bias: bool = False,
        activation: Activation = "silu",
    ) -> None:
        self.inner = inner
        self.activation = activation
        self.gate_up = place.matrix(size, 2 * inner)
        self.down = place.matrix(inner, size)
        self.gate_up_bias = place.empty(2 * inner) if bias else None
        self.down_bias = place.empty(size) if bias else None

    @classmethod
    def of(cls, config: DenseConfig, place: Place) -> DenseMLP:
        """A config's MLP."""
        return cls(
            config.hidden_size,
            config.intermediate_size,
            place,
            bias=config.mlp_bias,
            activation=config.activation,
        )

    def tensors(self) -> Tensors:
        """Weights by their names below `mlp.`."""
        found = {
            "gate_proj.weight": self.gate_up[:, : self.inner].t(),
            "up_proj.weight": self.gate_up[:, self.inner :].t(),
            "down_proj.weight": self.down.t(),
        }
        if self.gate_up_bias is not None and self.down_bias is not None:
            found["gate_proj.bias"] = self.gate_up_bias[: self.inner]
            found["up_proj.bias"] = self.gate_up_bias[self.inner :]
            found["down_proj.bias"] = self.down_bias
        return found

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """Folded: x [T, D] normed and residual [T, D] -> [T, D]."""
        if self.gate_up_bias is None:
            inner = torch.mm(x, self.gate_up)
        else:
            inner = torch.addmm(self.gate_up_bias, x, self.gate_up)
        inner = gated_silu(inner) if self.activation == "silu" else gated_activation(inner)
        out = torch.addmm(residual, inner, self.down)
        return out if self.down_bias is None else out.add_(self.down_bias)

    def whole(self, x: Tensor) -> Tensor:
        """x [T, D] -> what it adds to the residual, [T, D]."""
        inner = gated_linear(x, self.gate_up, self.gate_up_bias, activation=self.activation)
        return linear(inner, self.down, self.down_bias)

    def partials(self, x: Tensor) -> Tensor:
        """The same, or partial sums of it."""
        if self.down_bias is not None:
            return self.whole(x)
        inner = gated_linear(x, self.gate_up, self.gate_up_bias, activation=self.activation)
        return linear_partials(inner, self.down)


class DenseLayer:
    """h -> h + attention(norm(h)), then h -> h + MLP(norm(h)).

    has_input_norm False leaves the first norm out (EAGLE-1's Llama heads).
    """

    def __init__(
        self, config: DenseConfig, kind: str, place: Place, *, has_input_norm: bool = True
    ) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        self.kind = kind
        self.attention = DenseAttention(AttentionShape.of(config), place)
        self.mlp = DenseMLP.of(config, place)
        self.input_norm = Norm(size, eps, place) if has_input_norm else None
        self.post_attention_norm = Norm(size, eps, place)

    def tensors(self) -> Tensors:
        """Weights by their names below `layers.N.`."""
        found = {"post_attention_layernorm.weight": self.post_attention_norm.weight}
        if self.input_norm is not None:
            found["input_layernorm.weight"] = self.input_norm.weight
        found |= {f"self_attn.{name}": part for name, part in self.attention.tensors().items()}
        return found | {f"mlp.{name}": part for name, part in self.mlp.tensors().items()}

    def finish(self) -> None:
        """Fold what can be, once the weights are filled."""
        if self.input_norm is not None:
            self.input_norm.fold_into(self.attention.qkv, stream_scale=1.0)
        self.attention.finish()
        self.post_attention_norm.fold_into(self.mlp.gate_up, stream_scale=1.0)

    def __call__(self, h: Tensor, shared: GroupPass, cache: Tensor) -> Tensor:
        """Folded: h [T, D] -> [T, D], a new tensor; writes and reads cache."""
        x = h if self.input_norm is None else self.input_norm.normed(h)
        h = self.attention(x, h, shared, cache)
        return self.mlp(self.post_attention_norm.normed(h), h)

    def enter(self, h: Tensor) -> Tensor:
        """What attention reads of a stream h [T, D] that comes from elsewhere."""
        return h if self.input_norm is None else self.input_norm.scaled(h)

    def advance(
        self, h: Tensor, y: Tensor, shared: GroupPass, cache: Tensor, then: Norm | None
    ) -> tuple[Tensor, Tensor]:
        """Not folded: the stream h [T, D] (changed in place) and y = enter(h) -> the stream behind
        the layer, and its norm by `then`.
        """
        attended = self.attention.partials(y, shared, cache)
        h, y = join(h, attended, post=None, then=self.post_attention_norm)
        return join(h, self.mlp.partials(y), post=None, then=then)


def dense_frequencies(config: DenseConfig, place: Place) -> Frequencies:
    """Rotary frequencies where the model lives, in float32 (float64 for a float64 model)."""
    wide = torch.promote_types(place.dtype, torch.float32)
    return mirrored(config.rope.theta.to(place.device, wide))


def dense_group(config: DenseConfig, block_size: int, window: int | None) -> GroupShape:
    """The attention shape of a KV group of such layers."""
    return GroupShape(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=block_size,
        window=window,
        scale=config.score_scale,
    )


def group_pass(
    shape: GroupShape, rows: Rows, group: int, table: tuple[Tensor, Tensor], dtype: torch.dtype
) -> GroupPass:
    """What the layers of one KV group share in a pass; table is `rope_table` of rows.positions."""
    plan = plan_attention(
        shape,
        rows.segments,
        rows.block_tables[group],
        rows.seq_lens,
        rows.positions,
        dtype,
        rows.query_start_loc,
    )
    return GroupPass(*table, plan, rows.slot_mapping[group], rows.has_padding)
