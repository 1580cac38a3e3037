"""One DeepSeek-V3 decoder layer: latent attention, then a gated MLP or a mixture of experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hydraspec_kernels.moe import moe, route_grouped
from torch import Tensor

from hydraspec.models.deepseek.attention import LatentAttention
from hydraspec.models.deepseek.config import DeepseekConfig, ExpertsShape
from hydraspec.models.dense.layer import DenseLayer
from hydraspec.models.kv_groups import FULL, GroupPass
from hydraspec.models.layers import GatedMLP, Norm, Place, add_and_norm, prefixed
from hydraspec.models.parts import Tensors


class Experts:
    """Routed experts in groups, beside shared ones that see every token. Ranks divide the inner
    width of every expert: what each returns adds up to the block's output.
    """

    def __init__(self, size: int, shape: ExpertsShape, place: Place) -> None:
        count, inner = shape.num_experts, shape.intermediate_size
        self.place, self.columns = place, place.share(inner)
        # Scores are taken in float32 or wider: near ties must not be decided by rounding.
        self.wide = place.wide
        self.shape = shape
        self.router = place.matrix(size, count, dtype=self.wide)
        self.bias = place.empty(count, dtype=self.wide)
        self.gate_up = place.matrix(count, size, 2 * self.columns.count)
        self.down = place.matrix(count, self.columns.count, size)
        self.shared = GatedMLP(size, inner * shape.num_shared, place, activation="silu")
        self.packed = True  # how `tensors` names the experts

    def tensors(self) -> Tensors:
        part, columns = self.place.part, self.columns
        found: Tensors = {"gate.weight": self.router.t(), "gate.e_score_correction_bias": self.bias}
        found |= prefixed("shared_experts.", self.shared.tensors())
        if self.packed:
            found["experts.gate_up_proj"] = part(self.gate_up.transpose(1, 2), 1, columns, 2)
            found["experts.down_proj"] = part(self.down.transpose(1, 2), 2, columns)
            return found
        inner = columns.count
        for i in range(self.shape.num_experts):
            gate, up = self.gate_up[i, :, :inner].t(), self.gate_up[i, :, inner:].t()
            found[f"experts.{i}.gate_proj.weight"] = part(gate, 0, columns)
            found[f"experts.{i}.up_proj.weight"] = part(up, 0, columns)
            found[f"experts.{i}.down_proj.weight"] = part(self.down[i].t(), 1, columns)
        return found

    def partial_sums(self, x: Tensor) -> Tensor:
        """x [T, D] normed -> [T, D]."""
        return self._mixed(x).add_(self.shared.forward(x))

    def _mixed(self, x: Tensor) -> Tensor:
        """The routed experts' weighted sum, [T, D]."""
        shape = self.shape
        logits = torch.mm(x.to(self.wide), self.router)
        weights, experts = route_grouped(
            logits, self.bias, shape.top_k, shape.num_groups, shape.kept_groups
        )
        if shape.renormalised:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return moe(x, weights * shape.scale, experts, self.gate_up, self.down, "silu")


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
            layer.mlp.packed = False
