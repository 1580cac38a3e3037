"""The shapes and training settings of the zoo's block drafters, by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hydraspec.zoo.recipe.draft_heads import LayerShape
from hydraspec.zoo.recipe.recipes import Training


@dataclass(frozen=True, kw_only=True)
class BlockRecipe(Training):
    """Shape and training settings of a block drafter. It sees the texts that heads of the other
    kinds see, as many of them as the target's EAGLE-3 head, see README.md."""

    kind: Literal["dflash", "dspark", "dflash2"]
    format: Literal["z-lab", "speculators", "deepseek-ai"]
    target: str
    layer: LayerShape
    aux_layer_ids: tuple[int, ...]
    windows: tuple[int | None, ...] = (None, None)  # of the layers
    block_size: int = 8
    draft_vocab_size: int | None = None  # None: the target's
    own_tables: bool = False
    markov_rank: int = 0
    markov_kind: Literal["vanilla", "gated", "rnn"] = "vanilla"
    conv_taps: int = 0
    conv_group: int = 16
    selector_rank: int = 0
    num_candidates: int = 16
    num_texts: int = 50_000
    num_anchors: int = 24  # blocks of a text and step
    batch_size: int = 24
    learning_rate: float = 3e-3
    weight_decay: float = 0.01
    seed: int = 3


BLOCK_DRAFTERS: dict[str, BlockRecipe] = {
    # The target's embedding and head, whole blocks of eight.
    "tiny_qwen3-dflash": BlockRecipe(
        kind="dflash",
        format="z-lab",
        target="tiny_qwen3",
        layer=LayerShape(hidden_size=80, intermediate_size=192, num_kv_heads=1),
        aux_layer_ids=(2, 9, 15),
        steps=1760,
    ),
    # Tables of its own, blocks of seven that all draft, the plain Markov head.
    "tiny_qwen3-dspark": BlockRecipe(
        kind="dspark",
        format="deepseek-ai",
        target="tiny_qwen3",
        layer=LayerShape(hidden_size=80, intermediate_size=192, num_kv_heads=1),
        aux_layer_ids=(2, 9, 15),
        block_size=7,
        own_tables=True,
        markov_rank=32,
        steps=1760,
    ),
    # As tiny_qwen3-dflash, with convolutions and a selector.
    "tiny_qwen3-dflash2": BlockRecipe(
        kind="dflash2",
        format="z-lab",
        target="tiny_qwen3",
        layer=LayerShape(hidden_size=80, intermediate_size=192, num_kv_heads=1),
        aux_layer_ids=(2, 9, 15),
        conv_taps=2,
        selector_rank=32,
        steps=1760,
    ),
    # A sliding layer, causal, then a full one; half the vocabulary.
    "tiny_gemma4-dflash": BlockRecipe(
        kind="dflash",
        format="speculators",
        target="tiny_gemma4",
        layer=LayerShape(hidden_size=160, intermediate_size=192, num_kv_heads=1),
        aux_layer_ids=(2, 8, 13),
        windows=(32, None),
        draft_vocab_size=384,
        own_tables=True,
        steps=1067,
    ),
    # The same with DSpark's heads, the Markov head gated.
    "tiny_gemma4-dspark": BlockRecipe(
        kind="dspark",
        format="speculators",
        target="tiny_gemma4",
        layer=LayerShape(hidden_size=160, intermediate_size=192, num_kv_heads=1),
        aux_layer_ids=(2, 8, 13),
        windows=(32, None),
        block_size=7,
        draft_vocab_size=384,
        own_tables=True,
        markov_rank=32,
        markov_kind="gated",
        steps=1067,
    ),
}
