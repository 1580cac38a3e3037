"""Whole drafters drawn by chance: trained too little, and harmless ones (as they are, tuned a
little, stored in fewer bits).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from drawn_faults import Files
from torch import Tensor

from hydraspec.models.checkpoint.reader import resolve_folder
from hydraspec.zoo.recipe import draft_files, modeling, recipes, train_assistant, train_drafter
from hydraspec.zoo.recipe.batches import Sequences, generate_sequences
from hydraspec.zoo.recipe.training import train

EXAMPLES, BATCH, DATA_SEED = 512, 16, 7
HARMLESS = ("as it is", "noise of 1 % of a deviation", "FP8", "tuned", "a field nothing reads")
HARMLESS_FIELDS = ("initializer_range", "attention_dropout", "max_position_embeddings", "_comment")
LARGEST_FP8 = 448.0


@dataclass(slots=True)
class School:
    """A target, and texts to train its drafters on."""

    folder: Path
    target: Any
    data: Sequences

    @classmethod
    @cache
    def of(cls, target: str) -> School:
        folder = resolve_folder(f"zoo:{target}")
        data = generate_sequences(folder, EXAMPLES, DATA_SEED, workers=1)
        return cls(folder, modeling.load_target(folder), data)

    def train(self, drafter: str, folder: Path, *, steps: int, seed: int, tunes: bool) -> None:
        """Write a drafter with new tensors: trained from scratch for some steps, or the zoo's
        trained on. `folder` is a copy of the zoo's.
        """
        logging.getLogger("hydraspec.zoo").setLevel(logging.WARNING)
        share = 0.02 if tunes else 1.0
        with torch.inference_mode(False), torch.enable_grad():
            if drafter.endswith("-assistant"):
                self._assistant(folder, steps, seed, share)
            else:
                self._head(drafter, folder, steps, seed, share)

    def _assistant(self, folder: Path, steps: int, seed: int, share: float) -> None:
        recipe = recipes.ASSISTANTS[self.folder.name]
        recipe = replace(recipe, steps=steps, seed=seed, batch_size=BATCH)
        recipe = replace(recipe, learning_rate=recipe.learning_rate * share)
        if share == 1.0:
            model = train_assistant.train_assistant(recipe, self.target, self.data, title="")
        else:
            self.target.requires_grad_(False)
            model = modeling.load_assistant(folder)

            def loss_of(batch: Sequences) -> Tensor:
                return train_assistant.unrolled_loss(recipe, model, self.target, batch)

            train(model.requires_grad_(True), loss_of, self.data, recipe, "")
        modeling.save_checkpoint(model, folder, [1, 5])

    def _head(self, drafter: str, folder: Path, steps: int, seed: int, share: float) -> None:
        recipe = recipes.DRAFTERS[drafter]
        recipe = replace(recipe, steps=steps, seed=seed, batch_size=BATCH)
        recipe = replace(recipe, learning_rate=recipe.learning_rate * share)
        kept = train_drafter.keep_states(self.target, self.data, recipe.aux_layer_ids)
        if share == 1.0:
            head = train_drafter.train_drafter(recipe, self.target, self.data, title="", kept=kept)
        else:
            self.target.requires_grad_(False)
            head = draft_files.load_head(folder, recipe, self.target)

            def loss_of(batch: Sequences) -> Tensor:
                view = kept.view(self.target, batch.index)
                return train_drafter.unrolled_loss(head, recipe, self.target, view, batch)

            train(head, loss_of, self.data, recipe, "")
        draft_files.save_head(head, recipe, self.target, folder)


def draw_undertrained(files: Files, drafter: str, folder: Path, seed: tuple[int, ...]) -> str:
    """Write a drafter that was trained for a few steps."""
    rng = np.random.default_rng([41, *seed])
    steps = int(rng.choice([20, 40, 80]))
    files.write(folder)
    School.of(drafter.split("-")[0]).train(
        drafter, folder, steps=steps, seed=int(rng.integers(1 << 16)), tunes=False
    )
    return f"{steps} steps of {BATCH}"


def draw_harmless(files: Files, drafter: str, folder: Path, seed: tuple[int, ...]) -> str:
    """Write a drafter with nothing wrong, by the last number of the seed."""
    rng = np.random.default_rng([43, *seed])
    kind = HARMLESS[seed[-1] % len(HARMLESS)]
    draw = torch.Generator().manual_seed(int(rng.integers(2**31)))
    for name in files.drafters_weights():
        w = files.tensors[name].float()
        if kind.startswith("noise"):
            w = w + torch.randn(w.shape, generator=draw) * w.std() * 0.01
        elif kind == "FP8" and w.dim() > 1:
            scale = w.abs().max() / LARGEST_FP8
            w = (w / scale).to(torch.float8_e4m3fn).float() * scale
        files.tensors[name] = w.to(files.tensors[name].dtype)
    if kind == "a field nothing reads":
        files.config[HARMLESS_FIELDS[rng.integers(len(HARMLESS_FIELDS))]] = 4096
    files.write(folder)
    if kind == "tuned":
        steps, number = int(rng.choice([5, 10])), int(rng.integers(1 << 16))
        School.of(drafter.split("-")[0]).train(
            drafter, folder, steps=steps, seed=number, tunes=True
        )
    return kind
