"""One Gemma 4 decoder layer: sandwich norms, attention, MLP, experts, per-layer inputs, layer
scalar.
"""

from __future__ import annotations

from torch import Tensor

from hydraspec.models.attention import Attention, GroupPass
from hydraspec.models.experts import Experts
from hydraspec.models.gemma4.config import Gemma4Config, LayerShape
from hydraspec.models.layers import GatedMLP, Norm, PerLayerInput, Place, Tensors, join

# Layer scalars are kept out of the stream while their product stays within these bounds of 1.
LARGEST_STREAM_SCALE = 64.0


class DecoderLayer:
    """h -> (h + attention, + MLP, + per-layer input) * layer_scalar.

    When folded, the stream is held as h / c: instead of multiplying by layer_scalar, c takes it
    up, and the parts that read or write the stream are rescaled once at load. `scalar` is what is
    left to multiply by, or None.
    """

    def __init__(self, config: Gemma4Config, layer: LayerShape, place: Place) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        self.kind = layer.kind
        self.attention = Attention(config, layer, place)
        self.mlp = GatedMLP(size, layer.intermediate_size, place)
        self.experts = Experts(config, place) if config.num_experts else None
        self.per_layer = (
            PerLayerInput(size, config.ple_size, eps, place) if config.ple_size else None
        )
        self.input_norm = Norm(size, eps, place)
        self.post_attention_norm = Norm(size, eps, place)
        self.pre_mlp_norm = Norm(size, eps, place)
        self.post_mlp_norm = Norm(size, eps, place)
        self.layer_scalar = place.empty(1)
        self.folded = place.folded
        self.scalar: float | None = None

    def tensors(self) -> Tensors:
        found = {
            "input_layernorm.weight": self.input_norm.weight,
            "post_attention_layernorm.weight": self.post_attention_norm.weight,
            "pre_feedforward_layernorm.weight": self.pre_mlp_norm.weight,
            "post_feedforward_layernorm.weight": self.post_mlp_norm.weight,
            "layer_scalar": self.layer_scalar,
        }
        found |= {f"self_attn.{name}": tensor for name, tensor in self.attention.tensors().items()}
        found |= {f"mlp.{name}": tensor for name, tensor in self.mlp.tensors().items()}
        for part in (self.experts, self.per_layer):
            if part is not None:
                found |= part.tensors()
        return found

    def finish(self, stream_scale: float) -> float:
        """Fold what can be; takes the stream's scale c before the layer and returns it after."""
        self.attention.finish(self.input_norm, stream_scale)
        self.post_attention_norm.fold_gain(stream_out=stream_scale)
        self.pre_mlp_norm.fold_into(self.mlp.gate_up, stream_scale=stream_scale)
        self.post_mlp_norm.fold_gain(stream_out=stream_scale)
        if self.experts is not None:
            self.experts.finish(stream_scale)
        if self.per_layer is not None:
            self.per_layer.finish(stream_scale)
        scale = stream_scale * float(self.layer_scalar.double().item())
        if self.folded and 1 / LARGEST_STREAM_SCALE <= scale <= LARGEST_STREAM_SCALE:
            return scale
        self.scalar = None if scale == 1.0 else scale
        return 1.0

    def __call__(
        self, h: Tensor, shared: GroupPass, cache: Tensor, per_layer_input: Tensor | None
    ) -> Tensor:
        """Folded: h [T, D] -> [T, D]; cache is what it reads, and writes unless it shares KV."""
        attended = self.attention(self.input_norm.normed(h), shared, cache)
        return self.after_attention(h, attended, per_layer_input)

    def after_attention(
        self, h: Tensor, attended: Tensor, per_layer_input: Tensor | None
    ) -> Tensor:
        """The rest of the folded layer, from the attention block's output [T, D] on."""
        h = self.post_attention_norm.add(h, attended)
        x = self.pre_mlp_norm.normed(h)
        m = self.mlp(x)
        if self.experts is not None:
            m = self.experts(x, m)
        h = self.post_mlp_norm.add(h, m)
        if self.per_layer is not None:
            assert per_layer_input is not None
            h = self.per_layer(h, per_layer_input)
        return h if self.scalar is None else h.mul_(self.scalar)

    def advance(
        self,
        h: Tensor,
        y: Tensor,
        shared: GroupPass,
        cache: Tensor,
        per_layer_input: Tensor | None,
        then: Norm,
    ) -> tuple[Tensor, Tensor]:
        """Not folded: the stream h [T, D] (changed in place) and y = input_norm(h) -> the stream
        behind the layer, and its norm by `then`.
        """
        attended = self.attention.partials(y, shared, cache)
        h, y = join(h, attended, post=self.post_attention_norm, then=self.pre_mlp_norm)
        if self.experts is None:
            m = self.mlp.partials(y)
        else:
            m = self.experts.advance(h, self.mlp.whole(y))
        if self.per_layer is None:
            return join(h, m, post=self.post_mlp_norm, then=then, scale=self.scalar)
        assert per_layer_input is not None
        h, _ = join(h, m, post=self.post_mlp_norm, then=None)
        p = self.per_layer.partials(h, per_layer_input)
        return join(h, p, post=self.per_layer.norm, then=then, scale=self.scalar)
