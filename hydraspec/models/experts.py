"""Gemma 4's mixture of experts, which runs beside the dense MLP of the same layer."""

from __future__ import annotations

import torch
from hydraspec_kernels.moe import moe, route
from hydraspec_kernels.rms_norm import rms_norm
from torch import Tensor

from hydraspec.models.gemma4_config import Gemma4Config
from hydraspec.models.layers import Norm, Place, Tensors


class Experts:
    """Router and experts; both read the residual stream, each through its own norm."""

    def __init__(self, config: Gemma4Config, place: Place) -> None:
        size, inner, count = config.hidden_size, config.moe_intermediate_size, config.num_experts
        self.top_k, self.eps, self.size = config.top_k_experts, config.rms_norm_eps, size
        self.router = place.empty(size, count)
        self.router_scale = place.empty(size)
        self.expert_scale = place.empty(count)
        self.gate_up = place.empty(count, size, 2 * inner)
        self.down = place.empty(count, inner, size)
        self.pre_norm = Norm(size, self.eps, place)  # before the experts
        self.dense_norm = Norm(size, self.eps, place)  # after the dense MLP
        self.post_norm = Norm(size, self.eps, place)  # after the experts
        self.folded = place.folded

    def tensors(self) -> Tensors:
        return {
            "router.proj.weight": self.router.t(),
            "router.scale": self.router_scale,
            "router.per_expert_scale": self.expert_scale,
            "experts.gate_up_proj": self.gate_up.transpose(1, 2),
            "experts.down_proj": self.down.transpose(1, 2),
            "pre_feedforward_layernorm_2.weight": self.pre_norm.weight,
            "post_feedforward_layernorm_1.weight": self.dense_norm.weight,
            "post_feedforward_layernorm_2.weight": self.post_norm.weight,
        }

    def finish(self, stream_scale: float) -> None:
        if self.folded:
            # unit_norm lacks sqrt(D), and the router multiplies by D^-0.5: they cancel.
            self.router.mul_(self.router_scale[:, None])
        self.pre_norm.fold_into(self.gate_up, stream_scale=stream_scale)
        self.dense_norm.fold_gain()
        self.post_norm.fold_gain()

    def __call__(self, h: Tensor, normed: Tensor, dense: Tensor) -> Tensor:
        """Stream h [T, D], its weightless norm (used when folded) and the dense MLP's output ->
        their sum, normed.
        """
        if self.folded:
            logits, x = torch.mm(normed, self.router), normed
        else:
            scaled = rms_norm(h, None, self.eps) * self.router_scale * self.size**-0.5
            logits, x = torch.mm(scaled, self.router), self.pre_norm.normed(h)
        weights, experts = route(logits, self.top_k, self.expert_scale)
        mixed = moe(x, weights, experts, self.gate_up, self.down)
        return self.post_norm.add(self.dense_norm.scaled(dense), mixed)
