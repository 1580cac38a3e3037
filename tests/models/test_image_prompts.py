"""Prompts with images: merged embeddings, per-layer inputs and masks are transformers', whole and
in chunks; each of the ways to get them wrong shows.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from gemma4_oracle import PagedRun, final_hidden
from tiny_targets import load
from torch import Tensor
from vision_oracle import (
    ImagePrompt,
    encoded_rows,
    make_wrapper,
    oracle_image_logits,
    random_image_prompt,
    random_wrapper,
)

from hydraspec.types import EncodedRows

# Share of the logit range: float32 sums in another order, through tower and text model.
TOLERANCE = 1e-4
SEEDS = range(24)
Change = Callable[[EncodedRows], EncodedRows]


def chunks_of(prompt: ImagePrompt, seed: int) -> list[int]:
    """Borders of random chunks, which cut the images that may be cut."""
    draw, borders = random.Random(seed), [0]
    while borders[-1] < len(prompt.token_ids):
        stop = min(borders[-1] + draw.choice([1, 3, 5, 9]), len(prompt.token_ids))
        for span in prompt.spans:
            if span.start < stop < span.end and not span.may_be_cut:
                stop = span.end
        borders.append(stop)
    return borders


def logits_of(
    target: Any, prompt: ImagePrompt, borders: list[int], change: Change | None = None
) -> Tensor:
    """Logits [len, V] of a prompt that is read in these chunks."""
    run, found = PagedRun(target, 1, max_len=128), []
    for start, stop in pairwise(borders):
        batch = run.batch({0: prompt.token_ids[start:stop]})
        with torch.inference_mode():
            batch.encoded = encoded_rows(target, prompt, start, stop)
            if change is not None and batch.encoded is not None:
                batch.encoded = change(batch.encoded)
            hidden = final_hidden(target, batch, run.caches)  # type: ignore[arg-type]
            found.append(target.compute_logits(hidden))
    return torch.cat(found)


def error(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference as a share of the logit range."""
    return float((ours - theirs).abs().max() / (theirs.max() - theirs.min()))


@pytest.mark.parametrize("seed", SEEDS)
def test_logits_are_transformers(seed: int, tmp_path: Path) -> None:
    """One to three images; both towers and the 12B's projection, with and without per-layer inputs,
    bidirectional or not."""
    config = random_wrapper(seed)
    oracle = make_wrapper(config, seed)
    oracle.save_pretrained(tmp_path)
    target = load(tmp_path)
    prompt = random_image_prompt(config, seed, 1 + seed % 3)
    theirs = oracle_image_logits(oracle, prompt)
    assert error(logits_of(target, prompt, [0, len(prompt.token_ids)]), theirs) < TOLERANCE
    assert error(logits_of(target, prompt, chunks_of(prompt, seed)), theirs) < TOLERANCE


def test_the_random_wrappers_cover_every_combination() -> None:
    texts = [random_wrapper(seed) for seed in SEEDS]
    of_towers = [c["text_config"] for c in texts if c["model_type"] == "gemma4"]
    for sees_ahead in (None, "vision"):
        chosen = [t for t in of_towers if t["use_bidirectional_attention"] == sees_ahead]
        assert {bool(t["hidden_size_per_layer_input"]) for t in chosen} == {False, True}
        assert any(
            c["text_config"]["use_bidirectional_attention"] == sees_ahead
            for c in texts
            if c["model_type"] == "gemma4_unified"
        )


# ------------------------------------------------------------------ ways to get it wrong


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ImagePrompt, Tensor]:
    """A wrapper with per-layer inputs whose images see ahead, a prompt and its logits."""
    config = random_wrapper(
        4,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=96,
        use_bidirectional_attention="vision",
        sliding_window=8,
        final_logit_softcapping=None,
    )
    oracle = make_wrapper(config, 4)
    folder = tmp_path_factory.mktemp("wrapper")
    oracle.save_pretrained(folder)
    prompt = random_image_prompt(config, 4, 2)
    return load(folder), prompt, oracle_image_logits(oracle, prompt)


def wrong(world: tuple[Any, ImagePrompt, Tensor], change: Change) -> float:
    target, prompt, theirs = world
    whole = [0, len(prompt.token_ids)]
    assert error(logits_of(target, prompt, whole), theirs) < TOLERANCE
    return error(logits_of(target, prompt, whole, change), theirs)


MUTATIONS: dict[str, Change] = {
    "the scale of embeddings": lambda rows: replace(rows, states=rows.states * 32**0.5),
    "a causal image": lambda rows: replace(rows, sees_until=None),
    "one position less": lambda rows: replace(rows, sees_until=rows.sees_until - 1),
    "rows of an image in another order": lambda rows: replace(rows, states=rows.states.flip(0)),
    "placeholders for an image": lambda rows: replace(
        rows, rows=rows.rows[:0], states=rows.states[:0]
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_shows(name: str, world: tuple[Any, ImagePrompt, Tensor]) -> None:
    assert wrong(world, MUTATIONS[name]) > 10 * TOLERANCE


def test_an_image_that_is_cut_shows(world: tuple[Any, ImagePrompt, Tensor]) -> None:
    target, prompt, theirs = world
    border = prompt.spans[0].start + 1
    assert prompt.spans[0].length > 1
    cut = logits_of(target, prompt, [0, border, len(prompt.token_ids)])
    assert not error(cut, theirs) < 10 * TOLERANCE


def test_per_layer_inputs_of_the_image_token_show(
    world: tuple[Any, ImagePrompt, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, prompt, theirs = world
    monkeypatch.setattr(target, "config", replace(target.config, image_lookup_id=94))
    whole = [0, len(prompt.token_ids)]
    assert error(logits_of(target, prompt, whole), theirs) > 10 * TOLERANCE


def test_per_layer_inputs_project_the_merged_rows(
    world: tuple[Any, ImagePrompt, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, prompt, theirs = world

    def unmerged(rows: Any, embedded: Tensor | None) -> Tensor:
        ids = (
            rows.input_ids
            if rows.encoded is None
            else rows.input_ids.index_fill(0, rows.encoded.rows, 0)
        )
        return target.per_layer.forward(ids, target.embed(ids))

    monkeypatch.setattr(target, "layer_inputs", unmerged)
    whole = [0, len(prompt.token_ids)]
    assert error(logits_of(target, prompt, whole), theirs) > 10 * TOLERANCE
