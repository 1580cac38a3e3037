"""Targets with EAGLE heads that are often right and often wrong, and the plain loop's drafts behind
every prefix of their texts.

A head is random but for its own output matrix, which is fitted (ridge regression) to the target's
texts: states of a wrong row or position then give other tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dense_oracle import small
from eagle_folders import (
    YARN,
    draw_weights,
    round_to_fp8,
    write,
    write_authors,
    write_consolidated,
    write_speculators,
)
from eagle_oracle import PlainEagle
from hydraspec_kernels.step_inputs.reference import slot_mapping_reference
from plain_loops import MAX_K, DraftedWorld
from scenarios import KNOWN_TOKENS, random_prompt, seeded, uncached_continuations
from tiny_targets import gemma4_config, load, write_folder
from torch import Tensor

from hydraspec.models.base import TargetModel
from hydraspec.types import EncodedRows, Rows, RowSegment

LENGTHS = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 47]  # of prompts
RIDGE = 0.02

LAYER: dict[str, Any] = {
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 100.0,
    "attention_bias": False,
    "mlp_bias": False,
}
SLIDING = {
    "layer_types": ["sliding_attention", "full_attention"],
    "num_hidden_layers": 2,
    "sliding_window": 6,
    "use_sliding_window": True,
}


@dataclass
class EagleWorld(DraftedWorld):
    """A world with its drafter's folder and definition."""

    plain: PlainEagle = field(default_factory=lambda: PlainEagle("eagle3", {}, {}))
    states: dict[tuple[int, ...], tuple[list[Tensor], Tensor]] = field(default_factory=dict)
    drafts: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    @property
    def method(self) -> str:
        """The plain head's."""
        return self.plain.method

    def target_states(self, text: tuple[int, ...]) -> tuple[list[Tensor], Tensor]:
        """Aux and final states of every token, from one fresh pass."""
        if text not in self.states:
            self.states[text] = fresh_states(self.target, text, self.plain.aux_layer_ids)
        return self.states[text]

    def expected_drafts(self, text: tuple[int, ...], length: int) -> list[int]:
        """By the plain loop over states of a fresh pass."""
        key = text[:length]
        if key not in self.drafts:
            aux, final = self.target_states(text)
            tokens = torch.tensor(key)
            cut = [x[: length - 1] for x in aux]
            found, _ = self.plain.draft(tokens, cut, final[: length - 1], MAX_K)
            self.drafts[key] = found.tolist()
        return self.drafts[key]


def fresh_states(
    target: TargetModel,
    text: tuple[int, ...],
    ids: tuple[int, ...],
    encoded: EncodedRows | None = None,
) -> tuple[list[Tensor], Tensor]:
    """One uncached pass over a text: states after `ids` layers, and final ones, [n, D] each."""
    block_size, n = target.block_size, len(text)
    groups = target.kv_groups(8)
    table = torch.arange(1, -(-n // 8) + 1)[None]
    positions = torch.arange(n)
    slots = slot_mapping_reference(table, torch.zeros_like(positions), positions, 8)
    caches: list[Tensor | None] = [None] * target.num_layers
    for group in groups:
        for layer in group.layers:
            shape = ((table.shape[1] + 1) * 8, *group.shape.page_row)
            caches[layer] = torch.zeros(shape, dtype=target.dtype)
    rows = Rows(
        segments=(RowSegment(0, 0, 1, n, n),),
        input_ids=torch.tensor(text),
        positions=positions,
        seq_lens=torch.tensor([n]),
        slot_mapping=[slots] * len(groups),
        block_tables=[table] * len(groups),
        query_start_loc=torch.tensor([0, n]),
        encoded=encoded,
    )
    with torch.inference_mode():
        final, aux = target.forward(rows, caches, ids)
    target.kv_groups(block_size)
    return [x.clone() for x in aux], final.clone()


@dataclass
class Prefixes:
    """Rows of a text, and those that drafting appends to each of its prefixes, which see their
    prefix and each other only: drafts behind all prefixes take a pass a step."""

    plain: PlainEagle
    tokens: Tensor  # [n], with the positions and states of the rows
    hidden: Tensor
    lengths: Tensor  # [P] of prefixes

    def __post_init__(self) -> None:
        self.positions = torch.arange(len(self.tokens))
        self.owner = torch.full_like(self.positions, -1)  # prefix that a row was appended to
        self.newest = self.positions  # row of the text that a row sees last
        self.last = self.lengths - 2  # each prefix's

    def append(self, tokens: Tensor, hidden: Tensor) -> None:
        """A row to each prefix: tokens [P], hidden [P, D]."""
        each = torch.arange(len(self.lengths))
        after = self.positions[self.last] + 1
        self.last = len(self.tokens) + each
        self.tokens = torch.cat((self.tokens, tokens))
        self.hidden = torch.cat((self.hidden, hidden))
        self.positions = torch.cat((self.positions, after))
        self.owner = torch.cat((self.owner, each))
        self.newest = torch.cat((self.newest, self.lengths - 2))

    def run(self) -> tuple[Tensor, Tensor]:
        """States of all rows, and those that are fed back."""
        of_text = (self.owner < 0) & (self.positions <= self.newest[:, None])
        apart = ~(of_text | (self.owner == self.owner[:, None]))
        return self.plain.run(self.tokens, self.hidden, self.positions, apart)


def states_of_prefixes(world: EagleWorld, text: tuple[int, ...], lengths: Tensor) -> Tensor:
    """States [P, MAX_K, D] that drafts behind prefixes come from where each step reads the text, as
    `PlainEagle.draft` has them prefix by prefix."""
    plain, tokens = world.plain, torch.tensor(text)
    rows = Prefixes(plain, tokens[1:], plain.combine(*world.target_states(text))[:-1], lengths)
    places, found = [rows.last], []
    if plain.method == "peagle":
        for _ in range(MAX_K - 1):
            masks = torch.full_like(lengths, plain.mask_token)
            rows.append(masks, plain.mask_state().expand(len(lengths), -1))
            places.append(rows.last)
        states, _ = rows.run()
        return torch.stack([states[place] for place in places], 1)
    for step in range(MAX_K):
        states, feedback = rows.run()
        found.append(states[rows.last])
        rows.append(tokens[lengths + step], feedback[rows.last])
    return torch.stack(found, 1)


def fit_head(world: EagleWorld, texts: list[tuple[int, ...]], first: dict[Any, int]) -> None:
    """Make the head's output matrix answer with the texts' own tokens where it can."""
    features, answers = [], []
    ids = world.plain.ids
    place = torch.full((world.vocab_size,), -1)
    place[torch.arange(world.vocab_size) if ids is None else ids] = torch.arange(
        world.vocab_size if ids is None else len(ids)
    )
    for text in texts:
        lengths = torch.arange(first[text], len(text) - MAX_K)
        ahead = torch.tensor(text)[lengths[:, None] + torch.arange(MAX_K)]
        states = states_of_prefixes(world, text, lengths)
        known = place[ahead] >= 0
        features.append(states[known])
        answers.append(place[ahead][known])
    x, y = torch.cat(features), torch.cat(answers)
    wanted = torch.nn.functional.one_hot(y, len(world.plain.weights["lm_head.weight"])).double()
    gram = x.T @ x + RIDGE * len(x) / x.shape[1] * torch.eye(x.shape[1])
    world.plain.weights["lm_head.weight"] = torch.linalg.solve(gram, x.T @ wanted).T.contiguous()


def make_target(folder: Path, name: str) -> TargetModel:
    configs: dict[str, dict[str, Any]] = {
        "gemma4": gemma4_config(tie_word_embeddings=False),
        "qwen3": small(model_type="qwen3", vocab_size=64, eos_token_id=1),
        "llama": small(model_type="llama", vocab_size=64, hidden_size=160, eos_token_id=1),
        "mistral": small(
            model_type="mistral", vocab_size=64, hidden_size=160, sliding_window=7, eos_token_id=1
        ),
        "ministral3": small(
            model_type="ministral3",
            vocab_size=64,
            hidden_size=160,
            rope_theta=100.0,
            rope_scaling=YARN,
            eos_token_id=1,
        ),
    }
    write_folder(folder, configs[name])
    return load(folder, torch.float64, weights="random", seed=7)


# name -> method, target, changes of the layer, flags, aux layers, width, tokens left out
WORLDS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], tuple[int, ...], int, int]] = {
    "eagle3 on gemma4": (
        *("eagle3", "gemma4", {"model_type": "llama"}),
        *({"norm_before_residual": True}, (0, 1, 3), 320, 9),
    ),
    "eagle3 on qwen3": (
        *("eagle3", "qwen3", {"model_type": "qwen3", **SLIDING}),
        *({"norm_before_residual": False, "norm_output": True, "fc_norm": True}, (1, 2), 192, 0),
    ),
    "peagle on gemma4": (
        *("peagle", "gemma4", {"model_type": "llama", "num_hidden_layers": 2}),
        *({"norm_before_fc": True}, (1, 2, 3), 640, 9),
    ),
    "peagle on qwen3": (
        *("peagle", "qwen3", {"model_type": "qwen3", **SLIDING}),
        *({"fc_norm": True, "norm_output": True}, (0, 2), 128, 0),
    ),
    "eagle on mistral": (
        *("eagle", "mistral", {"model_type": "mistral", "sliding_window": None}),
        *({"is_mistral": True}, (), 160, 0),
    ),
    "eagle in fp8 on ministral3": (
        *("eagle", "ministral3", {"model_type": "ministral3", "rope_scaling": YARN}),
        *({"is_mistral": True, "fp8": True}, (), 160, 0),
    ),
    "eagle on llama": ("eagle", "llama", {"model_type": "llama"}, {}, (), 160, 0),
}


def known_texts(
    world: DraftedWorld, rng: np.random.Generator, num_prompts: int
) -> tuple[list[tuple[int, ...]], dict[Any, int]]:
    """Texts of some prompts and what the target says after them, which the world then knows; and by
    text the length up to the first token said."""
    texts, first = [], {}
    lengths = rng.permutation(LENGTHS)[:num_prompts]
    prompts = [random_prompt(rng, int(length), world.target.vocab_size) for length in lengths]
    world.continuations |= uncached_continuations(world.target, prompts, KNOWN_TOKENS)
    for prompt in prompts:
        texts.append((*prompt, *world.continuations[prompt]))
        first[texts[-1]] = len(prompt) + 1
    return texts, first


def make_world(folder: Path, name: str, num_prompts: int) -> EagleWorld:
    method, kind, changes, flags, aux, width, left_out = WORLDS[name]
    target = make_target(folder / "target", kind)
    layer = LAYER | {"vocab_size": target.vocab_size, "hidden_size": width} | changes
    rng = seeded(17)
    mask = target.vocab_size - 1 if method == "peagle" else None
    plain = PlainEagle(method, layer, {}, flags, aux, None, mask)
    rows = target.vocab_size - left_out
    if left_out:
        kept = rng.permutation(target.vocab_size)[:rows]
        plain.ids = torch.from_numpy(kept).sort().values
    plain.weights = draw_weights(rng, plain, target, rows=rows)
    if plain.flag("fp8"):
        round_to_fp8(plain)
    world = EagleWorld(folder=str(folder / "target"), target=target, plain=plain)
    if method == "eagle":
        plain.weights["embed_tokens.weight"] = target.table.weight
    fit_head(world, *known_texts(world, rng, num_prompts))
    world.drafter = str(write_drafter(folder / "drafter", plain))
    return world


def write_drafter(folder: Path, plain: PlainEagle) -> Path:
    """In the format that such a head is published in."""
    if plain.flag("is_mistral"):
        return write_consolidated(folder, plain, without=("embed_tokens.weight",))
    if plain.method == "eagle":
        config = {**plain.layer, "architectures": ["EagleLlamaForCausalLM"]}
        return write(folder, config, {n: t.contiguous() for n, t in plain.weights.items()})
    if plain.layer["num_hidden_layers"] == 1:
        return write_authors(folder, plain)
    return write_speculators(folder, plain)
