"""Targets that read images, prompts with images and what the target says after them, and drafters
whose definition says what they draft there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from block_folders import draw_block_weights, write_block
from block_oracle import PlainBlock
from block_worlds import BlockWorld
from block_worlds import fit_head as fit_block
from eagle_folders import draw_weights, write_authors, write_speculators
from eagle_oracle import PlainEagle
from eagle_worlds import LAYER, EagleWorld, fit_head, fresh_states
from plain_loops import MAX_K, DraftedWorld, Plant, run
from scenarios import (
    KNOWN_TOKENS,
    Outcome,
    World,
    draw_scenario,
    make_engine,
    seeded,
)
from tiny_targets import edit_config, gemma4_config, load, run_config, write_folder
from torch import Tensor
from vision_oracle import BOI, EOI, IMAGE, ImagePrompt, encoded_rows, image_prompt, random_image

from hydraspec.speculators.none import NoSpeculator
from hydraspec.types import Completion, EncodedRows, Image, Request, SamplingParams

TOWER = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "patch_size": 2},
    **{"pooling_kernel_size": 2, "position_embedding_size": 16},
}
UNIFIED = {
    **{"patch_size": 2, "pooling_kernel_size": 2, "mm_embed_dim": 16, "output_proj_dims": 16},
    "mm_posemb_size": 16,
}
PER_LAYER = {
    **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96},
    **{"attention_k_eq_v": False, "num_hidden_layers": 4, "num_kv_shared_layers": 2},
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
# name -> model_type, changes of the text, vision_config
FLAVOURS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "E4B": (
        *("gemma4", {**PER_LAYER, "use_bidirectional_attention": None}),
        TOWER | {"use_clipped_linears": True},
    ),
    "31B": (
        *("gemma4", {"use_bidirectional_attention": "vision"}),
        TOWER | {"standardize": True},
    ),
    "12B": ("gemma4_unified", {"use_bidirectional_attention": "vision"}, UNIFIED),
}
UNIFIED_HAS_NO = ("hidden_size_per_layer_input", "vocab_size_per_layer_input", "enable_moe_block")
SHAPES = ((2, 2), (3, 1), (3, 3), (1, 1), (4, 2))  # columns and rows of tokens


def wrapper_config(name: str, **changes: Any) -> dict[str, Any]:
    """The config.json of a flavour; changes: of the text."""
    kind, of_text, vision = FLAVOURS[name]
    text = gemma4_config(vocab_size=96, tie_word_embeddings=False, **(of_text | changes))
    if kind == "gemma4_unified":
        text = {k: v for k, v in text.items() if k not in UNIFIED_HAS_NO}
        text["model_type"] = "gemma4_unified_text"
    return {
        **{"model_type": kind, "text_config": text, "vision_config": vision},
        **{"boi_token_id": BOI, "image_token_id": IMAGE, "eoi_token_id": EOI},
        "tie_word_embeddings": False,
    }


def draw_prompts(rng: np.random.Generator, config: dict[str, Any], count: int) -> list[ImagePrompt]:
    """Prompts with none to three images, which some of them share; texts all differ."""
    images = [random_image(shape, config, 7 + i) for i, shape in enumerate(SHAPES)]
    found = []
    for number in range(count):
        parts: list[Any] = [[2 + number, *rng.integers(2, 90, rng.integers(0, 6)).tolist()]]
        names = []
        for _ in range((2, 1, 3, 0)[number % 4]):
            chosen = int(rng.integers(len(images)))
            names.append(f"{chosen:02x}")
            parts += [images[chosen], rng.integers(2, 90, rng.integers(0, 5)).tolist()]
        parts.append(rng.integers(2, 90, 1 + number % 3).tolist())
        found.append(image_prompt(parts, config, names))
    return found


def request_of(prompt: ImagePrompt, index: int, sampling: SamplingParams) -> Request:
    return Request(
        index=index,
        id=str(index),
        sampling=sampling,
        prompt_token_ids=list(prompt.token_ids),
        spans=prompt.spans,
        images=prompt.images,
    )


def uncached(target: Any, prompts: Sequence[ImagePrompt], length: int) -> list[list[int]]:
    """Greedy tokens after each prompt, each from a fresh prefill of everything before it."""
    config = run_config("unused", max_num_batched_tokens=4096, max_num_seqs=len(prompts))
    config.engine.prefix_caching = False
    engine = make_engine(config, target, NoSpeculator(config))
    one = SamplingParams(max_tokens=1, ignore_eos=True)
    texts = [list(prompt.token_ids) for prompt in prompts]
    for _ in range(length):
        requests = [
            replace(request_of(prompt, i, one), prompt_token_ids=list(texts[i]))
            for i, prompt in enumerate(prompts)
        ]
        for event in engine.run(requests, concurrency=None):
            if isinstance(event, Completion):
                texts[event.index] += event.output_token_ids
    return [text[len(p.token_ids) :] for p, text in zip(prompts, texts, strict=True)]


@dataclass
class Pictured(World):
    """The part of a world that knows which images a text begins with."""

    prompts: dict[tuple[int, ...], ImagePrompt] = field(default_factory=dict)

    def prompt_of(self, text: tuple[int, ...]) -> ImagePrompt:
        """The prompt of a text."""
        found = (ids for ids in self.prompts if text[: len(ids)] == ids)
        return self.prompts[max(found, key=len)]

    def encoded(self, text: tuple[int, ...]) -> EncodedRows | None:
        """Encoder outputs of a whole text's rows."""
        with torch.inference_mode():
            return encoded_rows(self.target, self.prompt_of(text), 0, len(text))


def learn(world: Pictured, prompts: Sequence[ImagePrompt]) -> None:
    """Take prompts and what the target says after each."""
    for prompt, more in zip(prompts, uncached(world.target, prompts, KNOWN_TOKENS), strict=True):
        world.prompts[tuple(prompt.token_ids)] = prompt
        world.continuations[tuple(prompt.token_ids)] = more


@dataclass
class MergedEagle(PlainEagle):
    """A head that reads the encoder's outputs in place of placeholders, if it asks for them."""

    encoded: EncodedRows | None = None  # of the text's rows

    def embed(self, tokens: Tensor) -> Tensor:
        e = super().embed(tokens).clone()
        if self.encoded is not None and self.flag("supports_mm_inputs"):
            rows = self.encoded.rows - 1  # the text's first token is none that a row reads
            inside = (rows >= 0) & (rows < len(tokens))
            e[rows[inside]] = self.encoded.states[inside]
        return e


@dataclass
class ImageEagleWorld(Pictured, EagleWorld):
    """Prompts with images, and an EAGLE-3 or P-EAGLE head."""

    def target_states(self, text: tuple[int, ...]) -> tuple[list[Tensor], Tensor]:
        encoded = self.encoded(text)
        self.plain.encoded = encoded  # type: ignore[attr-defined]
        if text not in self.states:
            ids = self.plain.aux_layer_ids
            self.states[text] = fresh_states(self.target, text, ids, encoded)
        return self.states[text]


@dataclass
class ImageBlockWorld(Pictured, BlockWorld):
    """Prompts with images, and a block drafter."""

    def aux(self, text: tuple[int, ...], length: int) -> list[Tensor]:
        if text not in self.states:
            ids, encoded = self.plain.aux_layer_ids, self.encoded(text)
            self.states[text], _ = fresh_states(self.target, text, ids, encoded)
        return super().aux(text, length)


# name -> flavour, method, whether the head reads images
WORLDS = {
    "eagle3 reads images": ("31B", "eagle3", True),
    "eagle3 reads placeholders": ("E4B", "eagle3", False),
    "eagle3 reads images of the 12B": ("12B", "eagle3", True),
    "peagle reads images": ("E4B", "peagle", True),
    "peagle reads placeholders": ("31B", "peagle", False),
    "dflash": ("31B", "dflash", False),
    "dflash on per-layer inputs": ("E4B", "dflash", False),
}


def make_target(folder: Path, name: str, **changes: Any) -> Any:
    """A flavour's target with random weights, in float64."""
    write_folder(folder, wrapper_config(name, **changes))
    return load(folder, torch.float64, weights="random", seed=7)


def make_world(folder: Path, name: str, num_prompts: int = 5) -> DraftedWorld:
    flavour, method, reads = WORLDS[name]
    target = make_target(folder / "target", flavour, hidden_size=96)
    rng = seeded(23)
    layer = LAYER | {"vocab_size": 96, "hidden_size": target.hidden_size, "model_type": "llama"}
    given = {"folder": str(folder / "target"), "target": target}
    world: Any
    if method == "dflash":
        layer |= {"model_type": "qwen3", "num_hidden_layers": 2}
        block = PlainBlock(
            **{"layer": layer, "weights": {}, "method": method, "mask_token": 92},
            **{"block_size": MAX_K + 1, "aux_layer_ids": (1, 2, 3)},
        )
        draw_block_weights(rng, block, target, rows=96)
        world = ImageBlockWorld(**given, plain=block)
    else:
        flags = {"norm_before_residual": True, "supports_mm_inputs": reads}
        mask = 92 if method == "peagle" else None
        plain = MergedEagle(method, layer, {}, flags, (1, 2, 3), None, mask)
        plain.weights = draw_weights(rng, plain, target, rows=96)
        world = ImageEagleWorld(**given, plain=plain)
    config = wrapper_config(flavour)
    learn(world, draw_prompts(rng, config, num_prompts))
    texts = [(*ids, *more) for ids, more in world.continuations.items()]
    first = {(*ids, *more): len(ids) + 1 for ids, more in world.continuations.items()}
    fit: Callable[..., None] = fit_block if method == "dflash" else fit_head
    fit(world, texts, first)
    if method == "dflash":
        world.drafter = str(write_block(folder / "drafter", world.plain, target, "speculators"))
        return world
    write = write_authors if method == "eagle3" else write_speculators
    world.drafter = str(write(folder / "drafter", world.plain))
    if reads:
        edit_config(folder / "drafter", supports_mm_inputs=True)
    return world


def run_scenarios(
    world: Any, count: int, seed: int, outcome: Outcome, plant: Plant | None = None
) -> Outcome:
    """As `plain_loops.run_scenarios`, over prompts with images: outputs, drafts and accepted counts
    are those of the definition."""
    longest = max(span.length for p in world.prompts.values() for span in p.spans)
    for number in range(count):
        rng = np.random.default_rng([seed, number])
        scenario = draw_scenario(world, rng, world.draft_counts[number % len(world.draft_counts)])
        for request in scenario.requests:
            prompt = world.prompts[tuple(request.prompt_token_ids or ())]
            request.spans, request.images = prompt.spans, prompt.images
        engine = scenario.config.engine
        engine.max_num_batched_tokens = max(engine.max_num_batched_tokens, longest)
        run(world, scenario, outcome, plant)
    return outcome


def with_other_image(prompt: ImagePrompt, other: Image, digest: str) -> ImagePrompt:
    """The same text with another first image of the same size."""
    first, *rest = prompt.spans
    assert other.num_tokens == first.length
    spans = (replace(first, digest=digest), *rest)
    return ImagePrompt(prompt.token_ids, spans, (other, *prompt.images[1:]))
