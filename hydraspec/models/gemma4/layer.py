"""One Gemma 4 decoder layer: sandwich norms, attention, MLP, experts, per-layer inputs, layer
scalar.
"""

from __future__ import annotations

from torch import Tensor

from hydraspec.models.attention import Attention, AttentionShape
from hydraspec.models.gemma4.config import Gemma4Config, LayerShape
from hydraspec.models.gemma4.experts import Experts
from hydraspec.models.kv_groups import GroupPass
from hydraspec.models.layers import GatedMLP, Norm, add_and_norm, prefixed
from hydraspec.models.linear import Linear
from hydraspec.models.parts import Tensors
from hydraspec.models.place import Place
from hydraspec.parallel.group import SOLO


class PerLayerInput:
    """The part of a layer that mixes in its slice of the per-layer embeddings (PLE). Every rank
    holds it whole: its matrices are small beside what one more sum over ranks costs.
    """

    def __init__(self, size: int, width: int, eps: float, place: Place) -> None:
        self.gate = Linear(place, size, {"per_layer_input_gate": width})
        self.projection = Linear(place, width, {"per_layer_projection": size})
        self.norm = Norm(size, eps, place)

    def tensors(self) -> Tensors:
        """Weights by their names below `layers.N.`."""
        found = self.gate.tensors() | self.projection.tensors()
        return found | {"post_per_layer_input_norm.weight": self.norm.weight}

    def partial_sums(self, h: Tensor, inputs: Tensor) -> Tensor:
        """h [T, D] and this layer's inputs [T, width] -> what `norm` reads, [S, T, D]."""
        return self.projection.partial_sums(self.gate.gelu_times(h, inputs))


class Gemma4Layer:
    """h -> (h + attention, + MLP, + per-layer input) * layer_scalar."""

    def __init__(self, config: Gemma4Config, layer: LayerShape, place: Place) -> None:
        size, eps, inner = config.hidden_size, config.rms_norm_eps, layer.intermediate_size
        self.kind, self.group = layer.kind, place.group
        self.attention = Attention(_attention_shape(config, layer), place)
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

    def tensors(self) -> Tensors:
        """Weights by their names below `layers.N.`."""
        found: Tensors = {
            "input_layernorm.weight": self.input_norm.weight,
            "post_attention_layernorm.weight": self.post_attention_norm.weight,
            "pre_feedforward_layernorm.weight": self.pre_mlp_norm.weight,
            "post_feedforward_layernorm.weight": self.post_mlp_norm.weight,
            "layer_scalar": self.layer_scalar,
        }
        found |= prefixed("self_attn.", self.attention.tensors())
        found |= prefixed("mlp.", self.mlp.tensors())
        for part in (self.experts, self.per_layer):
            if part is not None:
                found |= part.tensors()
        return found

    def finish(self) -> None:
        """Call once after the weights are filled."""
        scale = float(self.layer_scalar.double().item())
        self.scale = None if scale == 1.0 else scale
        if self.experts is not None:
            self.experts.finish()

    def forward(
        self,
        h: Tensor,
        y: Tensor,
        shared: GroupPass,
        cache: Tensor,
        next_norm: Norm,
        per_layer_input: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The stream h [T, D] (changed in place) and y = input_norm(h) -> the stream after the
        layer, and its norm by `next_norm`.
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


def _attention_shape(config: Gemma4Config, layer: LayerShape) -> AttentionShape:
    return AttentionShape(
        input_size=config.hidden_size,
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
