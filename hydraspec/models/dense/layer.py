"""The pre-norm decoder layer of Llama-like models, and of most draft heads."""

from __future__ import annotations

import torch
from hydraspec_kernels.attention import GroupShape
from hydraspec_kernels.rope import Frequencies, rope_table
from torch import Tensor

from hydraspec.models.attention import Attention, AttentionShape
from hydraspec.models.dense.config import DenseConfig
from hydraspec.models.kv_groups import FULL, KINDS, SLIDING, RopeTable
from hydraspec.models.layers import GatedMLP, PreNormLayer
from hydraspec.models.place import Place


class DenseLayer(PreNormLayer):
    """Pre-norm layer of multi-head attention and a gated MLP."""

    def __init__(
        self,
        config: DenseConfig,
        index: int,
        place: Place,
        *,
        input_size: int | None = None,
        has_input_norm: bool = True,
    ) -> None:
        """Builds layer `index` of a model with empty weights. Layers after the model's last one,
        which draft, have full attention. input_size is the width of the input of q, k and v; None:
        the hidden size (an EAGLE-3 head's first layer reads 2 D).
        """
        size = config.hidden_size
        shape = AttentionShape(
            input_size=size if input_size is None else input_size,
            output_size=size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
            qk_norm=config.qk_norm,
            qkv_bias=config.qkv_bias,
            out_bias=config.out_bias,
        )
        inner, act, bias = config.intermediate_size, config.activation, config.mlp_bias
        super().__init__(
            config.kinds[index] if index < config.num_layers else FULL,
            Attention(shape, place),
            GatedMLP(size, inner, place, activation=act, bias=bias),
            size=size,
            eps=config.rms_norm_eps,
            place=place,
            has_input_norm=has_input_norm,
        )

    def finish(self) -> None:
        """Lets norms round for the maps that read them; call once after the weights are filled."""
        if self.input_norm is not None:
            self.input_norm.rounding = self.attention.rounding_before
        self.post_attention_norm.rounding = self.mlp.rounding_before

    @staticmethod
    def group_shape(config: DenseConfig, kind: str, block_size: int, place: Place) -> GroupShape:
        """Attention shape of the KV group of a kind of layers, with this rank's heads."""
        queries, kv = place.heads(config.num_heads, config.num_kv_heads)
        return GroupShape(
            num_heads=queries.count,
            num_kv_heads=kv.count,
            head_dim=config.head_dim,
            block_size=block_size,
            window=config.sliding_window if kind == SLIDING else None,
            scale=config.score_scale,
        )

    @staticmethod
    def rope_tables(
        config: DenseConfig, theta: Frequencies, positions: Tensor, dtype: torch.dtype
    ) -> dict[str, RopeTable]:
        """A rotary table of positions [T], the same for all kinds of layers."""
        cos, sin = rope_table(positions, theta, dtype)
        table = RopeTable(cos, sin, config.rope.query_scale(positions, dtype))
        return dict.fromkeys(KINDS, table)
