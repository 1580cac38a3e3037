"""Gemma 4's mixture of experts, which runs beside the dense MLP of the same layer."""

from __future__ import annotations

import torch
from hydraspec_kernels.linear import linear
from hydraspec_kernels.moe import moe, route
from hydraspec_kernels.norms import rms_norm
from torch import Tensor

from hydraspec.models.gemma4.config import Gemma4Config
from hydraspec.models.layers import Norm, Place, add_and_norm
from hydraspec.models.parts import Tensors


class Experts:
    """Router and experts; both read the residual stream, each through its own norm. Ranks divide
    the inner width of every expert.
    """

    def __init__(self, config: Gemma4Config, place: Place) -> None:
        size, inner, count = config.hidden_size, config.moe_intermediate_size, config.num_experts
        self.place, self.columns = place, place.share(inner)
        inner = self.columns.count
        self.top_k, self.eps, self.wide = config.top_k_experts, config.rms_norm_eps, place.wide
        self.router = place.matrix(size, count)
        self.router_scale = place.empty(size)
        # The weight of the router's norm, set by `finish`: wide, so that the product rounds once.
        self.router_gain = self.router_scale
        self.expert_scale = place.empty(count)
        self.gate_up = place.matrix(count, size, 2 * inner)
        self.down = place.matrix(count, inner, size)
        self.pre_norm = Norm(size, self.eps, place)  # before the experts
        self.dense_norm = Norm(size, self.eps, place)  # after the dense MLP
        self.post_norm = Norm(size, self.eps, place)  # after the experts

    def tensors(self) -> Tensors:
        """Weights by their names below `layers.N.`."""
        part, columns = self.place.part, self.columns
        return {
            "router.proj.weight": self.router.t(),
            "router.scale": self.router_scale,
            "router.per_expert_scale": self.expert_scale,
            "experts.gate_up_proj": part(self.gate_up.transpose(1, 2), 1, columns, repeats=2),
            "experts.down_proj": part(self.down.transpose(1, 2), 2, columns),
            "pre_feedforward_layernorm_2.weight": self.pre_norm.weight,
            "post_feedforward_layernorm_1.weight": self.dense_norm.weight,
            "post_feedforward_layernorm_2.weight": self.post_norm.weight,
        }

    def finish(self) -> None:
        """Call once after the weights are filled."""
        self.router_gain = self.router_scale.to(self.wide) * len(self.router_scale) ** -0.5

    def forward(self, h: Tensor, dense: Tensor) -> Tensor:
        """The stream h [T, D] and the dense MLP's output -> the sum of both branches, each
        normed. dense is a rank's addend; what is returned is whole on every rank.
        """
        logits = linear(rms_norm(h, self.router_gain, self.eps), self.router)
        weights, experts = route(logits, self.top_k, self.expert_scale)
        mixed = moe(self.pre_norm.forward(h), weights, experts, self.gate_up, self.down)
        if self.place.group.size > 1:  # one sum over ranks for both branches
            both = self.place.group.all_reduce(torch.stack((dense, mixed)))
            dense, mixed = both.unbind()
        total, _ = add_and_norm(
            self.dense_norm.forward(dense), mixed, post=self.post_norm, next_norm=None
        )
        return total
