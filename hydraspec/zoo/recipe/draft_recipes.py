"""Shapes, flags and training settings of the drafters with KV of their own, by folder name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hydraspec.zoo.recipe.draft_layers import LayerShape

Kind = Literal["eagle3", "peagle", "eagle", "mtp"]


@dataclass(frozen=True, kw_only=True)
class DraftRecipe:
    """A drafter. Fields that a kind does not have stay at their defaults."""

    kind: Kind
    target: str
    layer: LayerShape | None = None  # None: the target's own block (MTP)
    num_layers: int = 1
    aux_layer_ids: tuple[int, ...] = ()
    draft_vocab_size: int | None = None  # None: the target's
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    steps: int  # few on purpose, see README.md
    batch_size: int = 128
    learning_rate: float = 3e-3
    weight_decay: float = 0.01
    step_weights: tuple[float, ...] = field(default=(1.0, 0.8, 0.6, 0.4))
    seed: int = 3


DRAFTERS: dict[str, DraftRecipe] = {
    # The whole vocabulary, the normed state as residual.
    "tiny_qwen3-eagle3": DraftRecipe(
        kind="eagle3",
        target="tiny_qwen3",
        layer=LayerShape(hidden_size=80, intermediate_size=224),
        aux_layer_ids=(2, 9, 15),
        norm_before_residual=True,
        steps=330,
    ),
    # Half the vocabulary, a norm before fc, the raw state as residual.
    "tiny_gemma4-eagle3": DraftRecipe(
        kind="eagle3",
        target="tiny_gemma4",
        layer=LayerShape(hidden_size=160, intermediate_size=160, num_kv_heads=1),
        aux_layer_ids=(2, 8, 13),
        draft_vocab_size=384,
        norm_before_fc=True,
        steps=200,
    ),
    "tiny_qwen3-peagle": DraftRecipe(
        kind="peagle",
        target="tiny_qwen3",
        layer=LayerShape(hidden_size=80, intermediate_size=160, num_kv_heads=1),
        num_layers=2,
        aux_layer_ids=(2, 9, 15),
        norm_before_residual=True,
        steps=300,
    ),
    # Narrower than its target, norms on every aux state.
    "tiny_gemma4-peagle": DraftRecipe(
        kind="peagle",
        target="tiny_gemma4",
        layer=LayerShape(hidden_size=80, intermediate_size=192, num_kv_heads=1),
        num_layers=2,
        aux_layer_ids=(2, 8, 13),
        draft_vocab_size=384,
        fc_norm=True,
        steps=300,
    ),
    "tiny_mistral-eagle": DraftRecipe(
        kind="eagle",
        target="tiny_mistral",
        layer=LayerShape(hidden_size=80, intermediate_size=200, rope_theta=1e6),
        num_layers=2,
        steps=400,
    ),
    # Goes into its target's own folder.
    "tiny_deepseek-mtp": DraftRecipe(
        kind="mtp", target="tiny_deepseek", step_weights=(1.0, 0.5, 0.3), steps=1000
    ),
}
