"""Targets with block drafters that are often right and often wrong, and the definition's drafts
behind every prefix of their texts.

A head is random but for its output matrix, which is fitted (ridge regression) to the target's
texts: states of a wrong row or position then give other tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from block_folders import draw_block_weights, write_block
from block_oracle import PlainBlock
from eagle_worlds import LAYER, RIDGE, SLIDING, fresh_states, known_texts, make_target
from plain_loops import MAX_K, DraftedWorld
from scenarios import seeded
from torch import Tensor

FITTED_K = (1, 3, 4, 8)  # blocks of as many drafts, whose states are fitted


@dataclass
class BlockWorld(DraftedWorld):
    """A world with its drafter's folder and definition."""

    plain: PlainBlock = field(default_factory=lambda: PlainBlock("dflash", {}, {}))
    states: dict[tuple[int, ...], list[Tensor]] = field(default_factory=dict)
    drafts: dict[tuple[tuple[int, ...], int], list[int]] = field(default_factory=dict)

    @property
    def method(self) -> str:
        """The plain head's."""
        return self.plain.method

    def aux(self, text: tuple[int, ...], length: int) -> list[Tensor]:
        """Aux states of all tokens before the newest of the first `length`, from a fresh pass."""
        if text not in self.states:
            self.states[text], _ = fresh_states(self.target, text, self.plain.aux_layer_ids)
        return [x[: length - 1] for x in self.states[text]]

    def expected_drafts(self, text: tuple[int, ...], length: int) -> list[int]:
        """By the definition, for a block of `num_drafts`: its rows see each other."""
        key = text[:length], self.num_drafts
        if key not in self.drafts:
            tokens, aux = torch.tensor(text[:length]), self.aux(text, length)
            found, _ = self.plain.draft(tokens, aux, aux[0], self.num_drafts)
            self.drafts[key] = found.tolist()
        return self.drafts[key]


def fit_head(world: BlockWorld, texts: list[tuple[int, ...]], first: dict[Any, int]) -> None:
    """Make the head's output matrix answer with the texts' own tokens where it can."""
    features, answers = [], []
    plain, ids = world.plain, world.plain.ids
    place = torch.full((world.vocab_size,), -1)
    kept = torch.arange(world.vocab_size) if ids is None else ids
    place[kept] = torch.arange(len(kept))
    for text in texts:
        tokens = torch.tensor(text)
        for length in range(first[text], len(text) - MAX_K):
            for k in FITTED_K:
                ahead = tokens[length : length + k]
                states = plain.block_states(tokens[:length], world.aux(text, length), k)
                known = place[ahead] >= 0
                features.append(states[known])
                answers.append(place[ahead][known])
    x, y = torch.cat(features), torch.cat(answers)
    wanted = torch.nn.functional.one_hot(y, len(plain.weights["lm_head.weight"])).double()
    gram = x.T @ x + RIDGE * len(x) / x.shape[1] * torch.eye(x.shape[1])
    plain.weights["lm_head.weight"] = torch.linalg.solve(gram, x.T @ wanted).T.contiguous()


DSPARK = {"markov_rank": 8, "enable_confidence_head": True, "confidence_head_with_markov": True}
SELECTOR = {
    **{"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 8, "selector_top_k": 4},
    **{"final_logit_softcapping": None, "output_multiplier": 1.0},
}
RNN, GATED = ({**DSPARK, "markov_head_type": kind} for kind in ("rnn", "gated"))

# name -> target, changes of the layer, fields, format, width, tokens left out
WORLDS: dict[str, tuple[str, dict[str, Any], dict[str, Any], str, int, int]] = {
    "dflash on qwen3": (
        *("qwen3", {**SLIDING, "num_hidden_layers": 2}),
        *({"aux_layer_ids": (1, 2), "causal": {"sliding_attention": True}}, "speculators", 192, 9),
    ),
    "dflash on gemma4": (
        *("gemma4", {"num_hidden_layers": 2}),
        *({"aux_layer_ids": (0, 1, 3), "samples_anchor": True}, "deepseek-ai", 320, 0),
    ),
    "dspark on qwen3": (
        *("qwen3", {**SLIDING, "num_hidden_layers": 2}),
        {
            "aux_layer_ids": (1, 2),
            "method": "dspark",
            "flags": RNN,
        },
        *("speculators", 192, 9),
    ),
    "dspark on gemma4": (
        *("gemma4", {"num_hidden_layers": 2}),
        {
            "aux_layer_ids": (0, 1, 3),
            "samples_anchor": True,
            "method": "dspark",
            "flags": GATED,
        },
        *("deepseek-ai", 320, 0),
    ),
    "dflash2 on qwen3": (
        *("qwen3", {**SLIDING, "num_hidden_layers": 2}),
        {"aux_layer_ids": (1, 2), "method": "dflash2", "flags": SELECTOR},
        *("speculators", 192, 0),
    ),
    "dflash with a short window on llama": (
        *("llama", {**SLIDING, "sliding_window": 3}),
        *({"aux_layer_ids": (1, 2)}, "speculators", 160, 0),
    ),
}


def make_world(folder: Path, name: str, num_prompts: int, sharpness: float = 1.0) -> BlockWorld:
    """A named world. sharpness: factor of the fitted logits, which lie between 0 and 1."""
    kind, changes, fields, form, width, left_out = WORLDS[name]
    target = make_target(folder / "target", kind)
    layer = LAYER | {"vocab_size": target.vocab_size, "hidden_size": width} | changes
    layer |= {"model_type": "qwen3"}
    rng = seeded(17)
    given = {"method": "dflash", "mask_token": target.vocab_size - 1, "block_size": MAX_K + 1}
    plain = PlainBlock(layer=layer, weights={}, **given | fields)
    rows = target.vocab_size - left_out
    if left_out:
        plain.ids = torch.from_numpy(rng.permutation(target.vocab_size)[:rows]).sort().values
    draw_block_weights(rng, plain, target, rows=rows)
    if plain.method == "dflash2":  # its scores change some of the best tokens, not most
        plain.weights["candidate_selector.successor_codebook"] *= 0.01
    world = BlockWorld(folder=str(folder / "target"), target=target, plain=plain)
    fit_head(world, *known_texts(world, rng, num_prompts))
    plain.weights["lm_head.weight"] *= sharpness
    world.drafter = str(write_block(folder / "drafter", plain, target, form))
    return world
