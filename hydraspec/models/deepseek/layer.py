"""The DeepSeek-V3 decoder layer: latent attention, then a gated MLP or a mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from hydraspec_kernels.attention import GroupShape
from hydraspec_kernels.moe import route_grouped
from hydraspec_kernels.rope import Frequencies, rope_table
from torch import Tensor

from hydraspec.models.deepseek.attention import LatentAttention
from hydraspec.models.deepseek.config import DeepseekConfig, ExpertsShape
from hydraspec.models.kv_groups import FULL, RopeTable
from hydraspec.models.layers import GatedMLP, PreNormLayer
from hydraspec.models.linear import Linear
from hydraspec.models.moe import RoutedExperts
from hydraspec.models.parts import Weights
from hydraspec.models.place import Place


class Experts(Weights):
    """Routed experts in groups, beside shared ones that see every token. Ranks divide the inner
    width of every expert, and their outputs add up to the block's output.
    """

    names: Mapping[str, str] = {
        "router": "",
        "bias": "gate.e_score_correction_bias",
        "routed": "experts.",
        "shared": "shared_experts.",
    }

    def __init__(self, size: int, shape: ExpertsShape, place: Place) -> None:
        count, inner = shape.num_experts, shape.intermediate_size
        # Scores are taken in float32 or wider: near ties must not be decided by rounding.
        self.wide = place.wide
        self.shape = shape
        self.router = Linear(place, size, {"gate": count}, dtype=self.wide)
        self.bias = place.empty(count, dtype=self.wide)
        self.routed = RoutedExperts(count, size, inner, place, activation="silu")
        self.shared = GatedMLP(size, inner * shape.num_shared, place, activation="silu")

    def partial_sums(self, x: Tensor) -> Tensor:
        """Sum of routed and shared experts, x [T, D] normed -> [T, D]."""
        return self._mixed(x).add_(self.shared.forward(x))

    def _mixed(self, x: Tensor) -> Tensor:
        """Weighted sum [T, D] of the routed experts for x [T, D], normed."""
        shape = self.shape
        logits = self.router.by_library(x.to(self.wide))
        weights, experts = route_grouped(
            logits, self.bias, shape.top_k, shape.num_groups, shape.kept_groups
        )
        if shape.renormalised:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return self.routed.forward(x, weights * shape.scale, experts)


class DeepseekLayer(PreNormLayer):
    """Pre-norm layer of latent attention, and a gated MLP or experts."""

    def __init__(self, config: DeepseekConfig, index: int, place: Place) -> None:
        size = config.hidden_size
        if index < config.num_dense_layers or config.experts is None:
            mlp: GatedMLP | Experts = GatedMLP(
                size, config.intermediate_size, place, activation="silu"
            )
        else:
            mlp = Experts(size, config.experts, place)
        super().__init__(
            FULL,
            LatentAttention(config, place),
            mlp,
            size=size,
            eps=config.rms_norm_eps,
            place=place,
        )

    def finish(self) -> None:
        """Reorders rotary weights; call once after the weights are filled."""
        self.attention.finish()

    @staticmethod
    def group_shape(config: DeepseekConfig, kind: str, block_size: int, place: Place) -> GroupShape:
        """Attention shape of all layers, over rows [1, kv_rank + rope_dim] of the cache, with this
        rank's heads. Every rank caches whole rows.
        """
        return GroupShape(
            num_heads=place.share(config.num_heads).count,
            num_kv_heads=1,
            head_dim=config.row_size,
            block_size=block_size,
            window=None,
            scale=config.score_scale,
            latent_dim=config.kv_rank,
        )

    @staticmethod
    def rope_tables(
        config: DeepseekConfig, theta: Frequencies, positions: Tensor, dtype: torch.dtype
    ) -> dict[str, RopeTable]:
        """Cosines and sines [T, 1, r] of positions [T], with YaRN's gain, rounded once."""
        cos, sin = rope_table(positions, theta, theta.cos.dtype)
        if config.rope.gain != 1.0:
            cos, sin = cos.mul_(config.rope.gain), sin.mul_(config.rope.gain)
        return {FULL: RopeTable(cos.to(dtype), sin.to(dtype))}
