"""The pre-norm decoder layer of Llama-like models, and of most draft heads."""

from __future__ import annotations

from hydraspec_kernels.attention import GroupShape
from torch import Tensor

from hydraspec.models.attention import Attention, AttentionShape
from hydraspec.models.dense.config import DenseConfig
from hydraspec.models.kv_groups import SLIDING, GroupPass
from hydraspec.models.layers import GatedMLP, Norm, add_and_norm, prefixed
from hydraspec.models.parts import Tensors
from hydraspec.models.place import Place


def dense_attention(config: DenseConfig, place: Place, input_size: int | None = None) -> Attention:
    """A config's attention. input_size is what q, k and v read, the hidden size if None (2 D in an
    EAGLE-3 head's first layer).
    """
    shape = AttentionShape(
        input_size=config.hidden_size if input_size is None else input_size,
        output_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        eps=config.rms_norm_eps,
        qk_norm=config.qk_norm,
        qkv_bias=config.qkv_bias,
        out_bias=config.out_bias,
    )
    return Attention(shape, place)


def dense_mlp(config: DenseConfig, place: Place) -> GatedMLP:
    """A config's MLP."""
    size, inner = config.hidden_size, config.intermediate_size
    return GatedMLP(size, inner, place, activation=config.activation, bias=config.mlp_bias)


def dense_group(config: DenseConfig, kind: str, block_size: int, place: Place) -> GroupShape:
    """The attention of the KV group of a kind of layers, with this rank's heads."""
    queries, kv = place.heads(config.num_heads, config.num_kv_heads)
    return GroupShape(
        num_heads=queries.count,
        num_kv_heads=kv.count,
        head_dim=config.head_dim,
        block_size=block_size,
        window=config.sliding_window if kind == SLIDING else None,
        scale=config.score_scale,
    )


class DenseLayer:
    """h -> h + attention(norm(h)), then h -> h + MLP(norm(h)).

    has_input_norm False leaves the first norm out (EAGLE-1's Llama heads).
    """

    def __init__(
        self, config: DenseConfig, kind: str, place: Place, *, has_input_norm: bool = True
    ) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        self.kind, self.group = kind, place.group
        self.attention = dense_attention(config, place)
        self.mlp = dense_mlp(config, place)
        self.input_norm = Norm(size, eps, place) if has_input_norm else None
        self.post_attention_norm = Norm(size, eps, place)

    def tensors(self) -> Tensors:
        """Weights by their names below `layers.N.`."""
        found: Tensors = {"post_attention_layernorm.weight": self.post_attention_norm.weight}
        if self.input_norm is not None:
            found["input_layernorm.weight"] = self.input_norm.weight
        found |= prefixed("self_attn.", self.attention.tensors())
        return found | prefixed("mlp.", self.mlp.tensors())

    def finish(self) -> None:
        """Call once after the weights are filled; there is nothing to prepare."""

    def forward(
        self, h: Tensor, y: Tensor, shared: GroupPass, cache: Tensor, next_norm: Norm | None
    ) -> tuple[Tensor, Tensor]:
        """The stream h [T, D] (changed in place) and y = input_norm(h) -> the stream after the
        layer, and its norm by `next_norm`.
        """
        attended = self.attention.partial_sums(y, shared, cache)
        norm, group = self.post_attention_norm, self.group
        h, y = add_and_norm(h, attended, post=None, next_norm=norm, group=group)
        m = self.mlp.partial_sums(y)
        return add_and_norm(h, m, post=None, next_norm=next_norm, group=group)
