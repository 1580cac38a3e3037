"""Gemma 4's mixture of experts, which runs beside the dense MLP of the same layer."""

from __future__ import annotations

import torch
from hydraspec_kernels.moe import route
from hydraspec_kernels.norms import rms_norm
from torch import Tensor

from hydraspec.models.gemma4.config import Gemma4Config
from hydraspec.models.layers import Norm, add_and_norm, prefixed
from hydraspec.models.linear import Linear
from hydraspec.models.moe import RoutedExperts
from hydraspec.models.parts import Tensors
from hydraspec.models.place import Place


class Experts:
    """Router and experts; both read the residual stream, each through its own norm. Ranks divide
    the inner width of every expert.
    """

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

    def tensors(self) -> Tensors:
        """Weights by their names below `layers.N.`."""
        found: Tensors = {
            "router.scale": self.router_scale,
            "router.per_expert_scale": self.expert_scale,
            "pre_feedforward_layernorm_2.weight": self.pre_norm.weight,
            "post_feedforward_layernorm_1.weight": self.dense_norm.weight,
            "post_feedforward_layernorm_2.weight": self.post_norm.weight,
        }
        return found | self.router.tensors() | prefixed("experts.", self.routed.tensors())

    def finish(self) -> None:
        """Call once after the weights are filled."""
        self.router_gain = self.router_scale.to(self.wide) * len(self.router_scale) ** -0.5

    def forward(self, h: Tensor, dense: Tensor) -> Tensor:
        """The stream h [T, D] and the dense MLP's output -> the sum of both branches, each
        normed. dense is a rank's addend; what is returned is whole on every rank.
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
