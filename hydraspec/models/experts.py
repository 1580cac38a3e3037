"""Gemma 4's mixture of experts, which runs beside the dense MLP of the same layer."""

from __future__ import annotations

import torch
from hydraspec_kernels.linear import linear
from hydraspec_kernels.moe import moe, route
from hydraspec_kernels.norms import rms_norm
from torch import Tensor

from hydraspec.models.gemma4.config import Gemma4Config
from hydraspec.models.layers import Norm, Place, Tensors, join


class Experts:
    """Router and experts; both read the residual stream, each through its own norm."""

    def __init__(self, config: Gemma4Config, place: Place) -> None:
        size, inner, count = config.hidden_size, config.moe_intermediate_size, config.num_experts
        self.top_k, self.eps, self.size = config.top_k_experts, config.rms_norm_eps, size
        self.router = place.matrix(size, count)
        self.router_scale = place.empty(size)
        self.wide = torch.promote_types(place.dtype, torch.float32)
        self.router_gain = self.router_scale  # once finished, of a model that is not folded
        self.expert_scale = place.empty(count)
        self.gate_up = place.matrix(count, size, 2 * inner)
        self.down = place.matrix(count, inner, size)
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
        else:  # the weight of one norm, wide: the product is rounded once
            self.router_gain = self.router_scale.to(self.wide) * self.size**-0.5
        self.pre_norm.fold_into(self.gate_up, stream_scale=stream_scale)
        self.dense_norm.fold_gain()
        self.post_norm.fold_gain()

    def __call__(self, normed: Tensor, dense: Tensor) -> Tensor:
        """Folded: the stream's weightless norm [T, D] and the dense MLP's output -> the sum of
        both branches, each normed.
        """
        mixed = self._mixed(torch.mm(normed, self.router), normed)
        return self.post_norm.add(self.dense_norm.scaled(dense), mixed)

    def advance(self, h: Tensor, dense: Tensor) -> Tensor:
        """Not folded: the same from the stream h [T, D] itself."""
        logits = linear(rms_norm(h, self.router_gain, self.eps), self.router)
        mixed = self._mixed(logits, self.pre_norm.scaled(h))
        total, _ = join(self.dense_norm.scaled(dense), mixed, post=self.post_norm, then=None)
        return total

    def _mixed(self, logits: Tensor, x: Tensor) -> Tensor:
        """Router logits [T, E] and what the experts read [T, D] -> their weighted sum [T, D]."""
        weights, experts = route(logits, self.top_k, self.expert_scale)
        return moe(x, weights, experts, self.gate_up, self.down)
