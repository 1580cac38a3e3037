"""One DeepSeek-V3 decoder layer: latent attention, then a gated MLP or a mixture of experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from hydraspec_kernels.moe import route_grouped
from torch import Tensor

from hydraspec.models.deepseek.attention import LatentAttention
from hydraspec.models.deepseek.config import DeepseekConfig, ExpertsShape
from hydraspec.models.dense.layer import DenseLayer
from hydraspec.models.kv_groups import FULL, GroupPass
from hydraspec.models.layers import GatedMLP, Norm, add_and_norm, prefixed
from hydraspec.models.linear import Linear
from hydraspec.models.moe import RoutedExperts
from hydraspec.models.parts import Tensors
from hydraspec.models.place import Place


class Experts:
    """Routed experts in groups, beside shared ones that see every token. Ranks divide the inner
    width of every expert: what each returns adds up to the block's output.
    """

    def __init__(self, size: int, shape: ExpertsShape, place: Place) -> None:
        count, inner = shape.num_experts, shape.intermediate_size
        # Scores are taken in float32 or wider: near ties must not be decided by rounding.
        self.wide = place.wide
        self.shape = shape
        self.router = Linear(replace(place, dtype=self.wide), size, {"gate": count})
        self.bias = place.empty(count, dtype=self.wide)
        self.routed = RoutedExperts(count, size, inner, place, activation="silu")
        self.shared = GatedMLP(size, inner * shape.num_shared, place, activation="silu")

    def tensors(self) -> Tensors:
        found: Tensors = {"gate.e_score_correction_bias": self.bias, **self.router.tensors()}
        found |= prefixed("shared_experts.", self.shared.tensors())
        return found | prefixed("experts.", self.routed.tensors())

    def partial_sums(self, x: Tensor) -> Tensor:
        """x [T, D] normed -> [T, D]."""
        return self._mixed(x).add_(self.shared.forward(x))

    def _mixed(self, x: Tensor) -> Tensor:
        """The routed experts' weighted sum, [T, D]."""
        shape = self.shape
        logits = torch.mm(x.to(self.wide), self.router.weight)
        weights, experts = route_grouped(
            logits, self.bias, shape.top_k, shape.num_groups, shape.kept_groups
        )
        if shape.renormalised:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return self.routed.forward(x, weights * shape.scale, experts)


class DeepseekLayer:
    """h -> h + attention(norm(h)) -> h + mlp(norm(h))."""

    kind = FULL

    def __init__(self, config: DeepseekConfig, index: int, place: Place) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        self.group = place.group
        self.attention = LatentAttention(config, place)
        self.input_norm = Norm(size, eps, place)
        self.post_attention_norm = Norm(size, eps, place)
        self.mlp: GatedMLP | Experts
        if index < config.num_dense_layers or config.experts is None:
            self.mlp = GatedMLP(size, config.intermediate_size, place, activation="silu")
        else:
            self.mlp = Experts(size, config.experts, place)

    def tensors(self) -> Tensors:
        found: Tensors = {
            "input_layernorm.weight": self.input_norm.weight,
            "post_attention_layernorm.weight": self.post_attention_norm.weight,
        }
        found |= prefixed("self_attn.", self.attention.tensors())
        return found | prefixed("mlp.", self.mlp.tensors())

    def finish(self) -> None:
        """Call once after the weights are filled."""
        self.attention.finish()

    def forward(
        self, h: Tensor, y: Tensor, shared: GroupPass, cache: Tensor, next_norm: Norm
    ) -> tuple[Tensor, Tensor]:
        """The stream h [T, D] (changed in place) and y = input_norm(h) -> the stream after the
        layer, and its norm by `next_norm`.
        """
        attended = self.attention.partial_sums(y, shared, cache)
        norm, group = self.post_attention_norm, self.group
        h, y = add_and_norm(h, attended, post=None, next_norm=norm, group=group)
        m = self.mlp.partial_sums(y)
        return add_and_norm(h, m, post=None, next_norm=next_norm, group=group)


def unpack_experts(layers: Sequence[DeepseekLayer | DenseLayer]) -> None:
    """Make `tensors` name every expert by itself, as released files do; MTP layers may be dense."""
    for layer in layers:
        if isinstance(layer.mlp, Experts):
            layer.mlp.routed.packed = False
