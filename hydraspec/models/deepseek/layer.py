"""One DeepSeek-V3 decoder layer: latent attention, then a gated MLP or a mixture of experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hydraspec_kernels.activation import gated_silu
from hydraspec_kernels.moe import moe, route_grouped
from torch import Tensor

from hydraspec.models.attention import GroupPass
from hydraspec.models.deepseek.attention import LatentAttention
from hydraspec.models.deepseek.config import DeepseekConfig, ExpertsShape
from hydraspec.models.dense.layer import DenseMLP
from hydraspec.models.gemma4.config import FULL
from hydraspec.models.layers import Norm, Place, Tensors, join


class Experts:
    """Routed experts in groups, beside shared ones that see every token."""

    def __init__(self, size: int, shape: ExpertsShape, place: Place) -> None:
        count, inner = shape.num_experts, shape.intermediate_size
        # Scores are taken in float32 or wider: near ties must not be decided by rounding.
        self.wide = torch.promote_types(place.dtype, torch.float32)
        self.shape = shape
        self.router = place.matrix(size, count, dtype=self.wide)
        self.bias = place.empty(count, dtype=self.wide)
        self.gate_up = place.matrix(count, size, 2 * inner)
        self.down = place.matrix(count, inner, size)
        self.shared = DenseMLP(size, inner * shape.num_shared, place)
        self.packed = True  # how `tensors` names the experts

    def tensors(self) -> Tensors:
        found = {"gate.weight": self.router.t(), "gate.e_score_correction_bias": self.bias}
        found |= {f"shared_experts.{name}": part for name, part in self.shared.tensors().items()}
        if self.packed:
            found["experts.gate_up_proj"] = self.gate_up.transpose(1, 2)
            found["experts.down_proj"] = self.down.transpose(1, 2)
            return found
        inner = self.shape.intermediate_size
        for i in range(self.shape.num_experts):
            found[f"experts.{i}.gate_proj.weight"] = self.gate_up[i, :, :inner].t()
            found[f"experts.{i}.up_proj.weight"] = self.gate_up[i, :, inner:].t()
            found[f"experts.{i}.down_proj.weight"] = self.down[i].t()
        return found

    @property
    def readers(self) -> tuple[Tensor, ...]:
        """Matrices that read the normed stream."""
        return self.router, self.gate_up, self.shared.gate_up

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """Folded: x [T, D] normed and residual [T, D] -> [T, D]."""
        return self._mixed(x).add_(self.shared(x, residual))

    def partials(self, x: Tensor) -> Tensor:
        """x [T, D] normed -> what it adds to the residual, [T, D]."""
        return self._mixed(x).add_(self.shared.whole(x))

    def _mixed(self, x: Tensor) -> Tensor:
        """The routed experts' weighted sum, [T, D]."""
        shape = self.shape
        logits = torch.mm(x.to(self.wide), self.router)
        weights, experts = route_grouped(
            logits, self.bias, shape.top_k, shape.num_groups, shape.kept_groups
        )
        if shape.renormalised:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return moe(x, weights * shape.scale, experts, self.gate_up, self.down, gated_silu)


class DeepseekLayer:
    """h -> h + attention(norm(h)) -> h + mlp(norm(h))."""

    kind = FULL

    def __init__(self, config: DeepseekConfig, index: int, place: Place) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        self.attention = LatentAttention(config, place)
        self.input_norm = Norm(size, eps, place)
        self.post_attention_norm = Norm(size, eps, place)
        self.mlp: DenseMLP | Experts
        if index < config.num_dense_layers or config.experts is None:
            self.mlp = DenseMLP(size, config.intermediate_size, place)
        else:
            self.mlp = Experts(size, config.experts, place)

    def tensors(self) -> Tensors:
        found = {
            "input_layernorm.weight": self.input_norm.weight,
            "post_attention_layernorm.weight": self.post_attention_norm.weight,
        }
        found |= {f"self_attn.{name}": tensor for name, tensor in self.attention.tensors().items()}
        return found | {f"mlp.{name}": tensor for name, tensor in self.mlp.tensors().items()}

    def finish(self) -> None:
        """Fold the norms; call once after the weights are filled."""
        self.attention.finish(self.input_norm)
        readers = self.mlp.readers if isinstance(self.mlp, Experts) else (self.mlp.gate_up,)
        self.post_attention_norm.fold_into(*readers, stream_scale=1.0)

    def __call__(self, h: Tensor, shared: GroupPass, cache: Tensor) -> Tensor:
        """Folded: h [T, D] -> [T, D], a new tensor; writes and reads cache."""
        h = self.attention(self.input_norm.normed(h), h, shared, cache)
        return self.mlp(self.post_attention_norm.normed(h), h)

    def enter(self, h: Tensor) -> Tensor:
        """What attention reads of a stream h [T, D] that comes from elsewhere."""
        return self.input_norm.scaled(h)

    def advance(
        self, h: Tensor, y: Tensor, shared: GroupPass, cache: Tensor, then: Norm
    ) -> tuple[Tensor, Tensor]:
        """Not folded: the stream h [T, D] (changed in place) and y = enter(h) -> the stream behind
        the layer, and its norm by `then`.
        """
        attended = self.attention.partials(y, shared, cache)
        h, y = join(h, attended, post=None, then=self.post_attention_norm)
        return join(h, self.mlp.partials(y), post=None, then=then)


def unpack_experts(layers: Sequence[DeepseekLayer]) -> None:
    """Make `tensors` name every expert by itself, as released files do."""
    for layer in layers:
        if isinstance(layer.mlp, Experts):
            layer.mlp.packed = False
