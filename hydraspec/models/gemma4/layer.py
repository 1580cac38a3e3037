"""The Gemma 4 decoder layer: sandwich norms, attention, MLP, experts beside it, per-layer inputs,
layer scalar.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from hydraspec_kernels.attention import GroupShape
from hydraspec_kernels.moe import route
from hydraspec_kernels.norms import rms_norm
from hydraspec_kernels.quantised import RoundedRows
from hydraspec_kernels.rope import Frequencies, rope_table
from torch import Tensor

from hydraspec.models.attention import Attention, AttentionShape
from hydraspec.models.gemma4.config import Gemma4Config, LayerShape
from hydraspec.models.kv_groups import SLIDING, GroupPass, RopeTable
from hydraspec.models.layers import GatedMLP, Norm, add_and_norm
from hydraspec.models.linear import Linear
from hydraspec.models.moe import RoutedExperts
from hydraspec.models.parts import Weights
from hydraspec.models.place import Place
from hydraspec.parallel.group import SOLO


class Experts(Weights):
    """Router and experts; both read the residual stream, each through its own norm. Ranks divide
    the inner width of every expert.
    """

    names: Mapping[str, str] = {
        "router": "",
        "router_scale": "router.scale",
        "expert_scale": "router.per_expert_scale",
        "routed": "experts.",
        "pre_norm": "pre_feedforward_layernorm_2.",
        "dense_norm": "post_feedforward_layernorm_1.",
        "post_norm": "post_feedforward_layernorm_2.",
    }

    def __init__(self, config: Gemma4Config, place: Place) -> None:
        size, inner, count = config.hidden_size, config.moe_intermediate_size, config.num_experts
        self.group = place.group
        self.top_k, self.eps, self.wide = config.top_k_experts, config.rms_norm_eps, place.wide
        self.router = Linear(place, size, {"router.proj": count})
        self.router_scale = place.empty(size)
        # The weight of the router's norm, set by `finish`: wide, so that the product rounds once.
        self.router_gain = self.router_scale
        self.expert_scale = place.empty(count)
        self.routed = RoutedExperts(count, size, inner, place, activation="gelu_tanh")
        self.pre_norm = Norm(size, self.eps, place)  # before the experts
        self.dense_norm = Norm(size, self.eps, place)  # after the dense MLP
        self.post_norm = Norm(size, self.eps, place)  # after the experts

    def finish(self) -> None:
        """Computes the router's gain; call once after the weights are filled."""
        self.router_gain = self.router_scale.to(self.wide) * len(self.router_scale) ** -0.5

    def forward(self, h: Tensor, dense: Tensor) -> Tensor:
        """Sum [T, D] of the experts' output for the stream h [T, D] and of the dense MLP's output
        `dense` [T, D], each normed. dense is a rank's addend; the sum is whole on every rank.
        """
        logits = self.router.forward(rms_norm(h, self.router_gain, self.eps))
        weights, experts = route(logits, self.top_k, self.expert_scale)
        mixed = self.routed.forward(self.pre_norm.forward(h), weights, experts)
        if self.group.size > 1:  # one sum over ranks for both branches
            both = self.group.all_reduce(torch.stack((dense, mixed)))
            dense, mixed = both.unbind()
        total, _ = add_and_norm(
            self.dense_norm.forward(dense), mixed, post=self.post_norm, next_norm=None
        )
        return total


class PerLayerInput(Weights):
    """The part of a layer that mixes in its slice of the per-layer embeddings (PLE). Every rank
    holds it whole: reading its small matrices costs less than one more sum over ranks.
    """

    names: Mapping[str, str] = {"gate": "", "projection": "", "norm": "post_per_layer_input_norm."}

    def __init__(self, size: int, width: int, eps: float, place: Place) -> None:
        self.gate = Linear(place, size, {"per_layer_input_gate": width})
        self.projection = Linear(place, width, {"per_layer_projection": size})
        self.norm = Norm(size, eps, place)

    def partial_sums(self, h: Tensor, inputs: Tensor) -> Tensor:
        """Projection of this layer's inputs [T, width], gated by h [T, D], before `norm`: [T, D],
        or its partial sums [S, T, D].
        """
        return self.projection.partial_sums(self.gate.gelu_times(h, inputs))


class Gemma4Layer(Weights):
    """Gemma 4 decoder layer: (h + attention + MLP + per-layer input) * layer_scalar; each addend is
    computed from the sum before it.
    """

    names: Mapping[str, str] = {
        "attention": "self_attn.",
        "mlp": "mlp.",
        "experts": "",
        "per_layer": "",
        "input_norm": "input_layernorm.",
        "post_attention_norm": "post_attention_layernorm.",
        "pre_mlp_norm": "pre_feedforward_layernorm.",
        "post_mlp_norm": "post_feedforward_layernorm.",
        "layer_scalar": "layer_scalar",
    }

    def __init__(
        self, config: Gemma4Config, index: int, place: Place, *, input_size: int | None = None
    ) -> None:
        """Builds layer `index` with empty weights. input_size is the width of the input of q, k and
        v; None: the hidden size (an EAGLE-3 head's layer reads 2 D)."""
        layer = config.layers[index]
        size, eps, inner = config.hidden_size, config.rms_norm_eps, layer.intermediate_size
        self.kind, self.group = layer.kind, place.group
        shape = _attention_shape(config, layer, input_size or size)
        self.attention = Attention(shape, place)
        self.mlp = GatedMLP(size, inner, place, activation="gelu_tanh")
        self.experts = Experts(config, place) if config.num_experts else None
        self.per_layer: PerLayerInput | None = None
        if config.ple_size:
            self.per_layer = PerLayerInput(size, config.ple_size, eps, place)
        self.input_norm = Norm(size, eps, place)
        self.post_attention_norm = Norm(size, eps, place)
        self.pre_mlp_norm = Norm(size, eps, place)
        self.post_mlp_norm = Norm(size, eps, place)
        self.layer_scalar = place.empty(1)
        self.scale: float | None = None  # the scalar as a host number, set by `finish`; None: 1

    def finish(self) -> None:
        """Reads layer_scalar on the host, and lets norms round for the maps that alone read them;
        call once after the weights are filled.
        """
        scale = float(self.layer_scalar.double().item())
        self.scale = None if scale == 1.0 else scale
        self.input_norm.rounding = self.attention.rounding_before
        if self.experts is None:
            self.pre_mlp_norm.rounding = self.mlp.rounding_before
        else:
            self.experts.finish()

    def forward(
        self,
        h: Tensor,
        y: Tensor | RoundedRows,
        shared: GroupPass,
        cache: Tensor,
        next_norm: Norm,
        per_layer_input: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | RoundedRows]:
        """The stream after the layer, and its norm by `next_norm`, for the stream h [T, D] (changed
        in place) and y = input_norm(h).
        """
        attended = self.attention.partial_sums(y, shared, cache)
        post, group = self.post_attention_norm, self.group
        h, y = add_and_norm(h, attended, post=post, next_norm=self.pre_mlp_norm, group=group)
        if self.experts is None:
            m = self.mlp.partial_sums(y)
        else:
            m, group = self.experts.forward(h, self.mlp.forward(y)), SOLO
        post, scale = self.post_mlp_norm, self.scale
        if self.per_layer is None:
            return add_and_norm(h, m, post=post, next_norm=next_norm, scale=scale, group=group)
        assert per_layer_input is not None
        h, _ = add_and_norm(h, m, post=post, next_norm=None, group=group)
        p = self.per_layer.partial_sums(h, per_layer_input)
        return add_and_norm(h, p, post=self.per_layer.norm, next_norm=next_norm, scale=scale)

    @staticmethod
    def group_shape(config: Gemma4Config, kind: str, block_size: int, place: Place) -> GroupShape:
        """Attention shape of the KV group of a kind of layers, which all have one shape, with this
        rank's heads.
        """
        layer = next(layer for layer in config.layers if layer.kind == kind)
        queries, kv = place.heads(config.num_heads, layer.num_kv_heads)
        return GroupShape(
            num_heads=queries.count,
            num_kv_heads=kv.count,
            head_dim=layer.head_dim,
            block_size=block_size,
            window=config.sliding_window if kind == SLIDING else None,
        )

    @staticmethod
    def rope_tables(
        config: Gemma4Config, theta: dict[str, Frequencies], positions: Tensor, dtype: torch.dtype
    ) -> dict[str, RopeTable]:
        """A rotary table of positions [T] for each kind of layers."""
        return {kind: RopeTable(*rope_table(positions, theta[kind], dtype)) for kind in theta}


def _attention_shape(config: Gemma4Config, layer: LayerShape, input_size: int) -> AttentionShape:
    return AttentionShape(
        input_size=input_size,
        output_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        eps=config.rms_norm_eps,
        qk_norm=True,
        value_norm=True,
        shares_kv=layer.shares_kv,
        k_eq_v=layer.k_eq_v,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
    )
