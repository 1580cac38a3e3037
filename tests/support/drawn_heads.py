"""Whole drafters drawn by chance: trained too little, and harmless ones (as they are, with other
rounding, tuned a little, trained from another seed).
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from drawn_faults import Files
from torch import Tensor

from hydraspec.models.checkpoint.reader import resolve_folder
from hydraspec.zoo.recipe import (
    assistant_recipes,
    draft_files,
    modeling,
    recipes,
    train_assistant,
    train_drafter,
)
from hydraspec.zoo.recipe.batches import Sequences, generate_sequences
from hydraspec.zoo.recipe.make import ASSISTANT_DATA_SEED, ASSISTANT_EXAMPLES
from hydraspec.zoo.recipe.training import train

EXAMPLES, BATCH = 512, 16
OTHER_SEEDS = (11, 12)  # of whole training; few, so that trained files can be kept
CPU_EXAMPLES, CPU_BATCH = 2048, 32  # of whole training without a GPU: some minutes a head
HARMLESS = (
    "as it is",
    "noise of 1 % of a deviation",
    "FP8",
    "tuned",
    "FP8 by row",
    "another rounding to bf16",
    "another seed",
    "a field nothing reads",
)
HARMLESS_A_ROUND = len(HARMLESS) // 2
HARMLESS_FIELDS = ("initializer_range", "attention_dropout", "max_position_embeddings", "_comment")
LARGEST_FP8 = 448.0
TUNING_RATE = 0.05  # of the learning rate of training


@dataclass(slots=True, eq=False)
class School:
    """A target, and texts to train its drafters on."""

    folder: Path
    target: Any
    data: Sequences

    @classmethod
    @cache
    def of(cls, target: str, examples: int = EXAMPLES, device: str = "cpu") -> School:
        folder = resolve_folder(f"zoo:{target}")
        data = generate_sequences(folder, examples, ASSISTANT_DATA_SEED, workers=1)
        target_model = modeling.load_target(folder, device)
        return cls(folder, target_model, data.to(torch.device(device)))

    def train(self, drafter: str, folder: Path, *, seed: int, tunes: bool, **changed: int) -> None:
        """Write a drafter with new tensors: trained from scratch, or the zoo's trained on, by the
        zoo's recipe with fields `changed`. `folder` is a copy of the zoo's.
        """
        logging.getLogger("hydraspec.zoo").setLevel(logging.WARNING)
        recipe: Any = recipe_of(drafter)
        rate = recipe.learning_rate * (TUNING_RATE if tunes else 1)
        recipe = replace(
            recipe, **{"batch_size": BATCH, "seed": seed, "learning_rate": rate} | changed
        )
        with torch.inference_mode(False), torch.enable_grad():
            if drafter.endswith("-assistant"):
                self._assistant(folder, recipe, tunes)
            else:
                self._head(folder, recipe, tunes)

    def _assistant(
        self, folder: Path, recipe: assistant_recipes.AssistantRecipe, tunes: bool
    ) -> None:
        if not tunes:
            model = train_assistant.train_assistant(recipe, self.target, self.data, title="")
        else:
            self.target.requires_grad_(False)
            model = modeling.load_assistant(folder)

            def loss_of(batch: Sequences) -> Tensor:
                return train_assistant.unrolled_loss(recipe, model, self.target, batch)

            train(model.requires_grad_(True), loss_of, self.data, recipe, "")
        modeling.save_checkpoint(model, folder, [1, 5])

    def _head(self, folder: Path, recipe: recipes.DraftRecipe, tunes: bool) -> None:
        kept = states_of(self, recipe.aux_layer_ids)
        if not tunes:
            head = train_drafter.train_drafter(recipe, self.target, self.data, title="", kept=kept)
        else:
            self.target.requires_grad_(False)
            head = draft_files.load_head(folder, recipe, self.target)

            def loss_of(batch: Sequences) -> Tensor:
                view = kept.view(self.target, batch.index)
                return train_drafter.unrolled_loss(head, recipe, self.target, view, batch)

            train(head, loss_of, self.data, recipe, "")
        draft_files.save_head(head, recipe, self.target, folder)


@cache
def states_of(school: School, aux_layer_ids: tuple[int, ...]) -> train_drafter.KeptStates:
    """The target's states over a school's texts."""
    return train_drafter.keep_states(school.target, school.data, aux_layer_ids)


def recipe_of(drafter: str) -> assistant_recipes.AssistantRecipe | recipes.DraftRecipe:
    """The zoo's recipe of a drafter."""
    target = drafter.removesuffix("-assistant")
    return assistant_recipes.ASSISTANTS[target] if target != drafter else recipes.DRAFTERS[drafter]


def train_from(seed: int, drafter: str, folder: Path) -> None:
    """Write a drafter trained from another seed by the zoo's recipe; without a GPU, by its steps on
    fewer texts and in smaller batches. `folder` is a copy of the zoo's. Trained files are kept
    outside the tree: train them on a GPU once, and the trial's machine needs none.
    """
    kept = Path(tempfile.gettempdir()) / f"hydraspec-heads-{os.getuid()}" / f"{drafter}-{seed}"
    if not kept.exists():
        target, batch = drafter.split("-")[0], recipe_of(drafter).batch_size
        if torch.cuda.is_available():
            school = School.of(target, ASSISTANT_EXAMPLES, "cuda")
        else:
            school, batch = School.of(target, CPU_EXAMPLES), CPU_BATCH
        school.train(drafter, folder, seed=seed, tunes=False, batch_size=batch)
        kept.parent.mkdir(exist_ok=True)
        part = Path(tempfile.mkdtemp(dir=kept.parent))
        for file in folder.glob("*.safetensors"):
            shutil.copy(file, part)
        part.rename(kept)
    shutil.copytree(kept, folder, dirs_exist_ok=True)


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
    """Write a drafter with nothing wrong, of each kind in turn: the seed ends with the round, the
    number of the family and that of the draw.
    """
    rng = np.random.default_rng([43, *seed])
    kind = HARMLESS[(HARMLESS_A_ROUND * seed[-3] + seed[-1]) % len(HARMLESS)]
    draw = torch.Generator().manual_seed(int(rng.integers(2**31)))
    for name in files.drafters_weights():
        w = files.tensors[name].float()
        if kind.startswith("noise"):
            w = w + torch.randn(w.shape, generator=draw) * w.std() * 0.01
        elif kind.startswith("FP8") and w.dim() > 1:
            most = w.abs().amax(1, keepdim=True) if kind == "FP8 by row" else w.abs().max()
            scale = most.clamp(min=1e-12) / LARGEST_FP8
            w = (w / scale).to(torch.float8_e4m3fn).float() * scale
        elif kind == "another rounding to bf16":  # of float32 weights within one unit of these
            w = w * (1 + (torch.rand(w.shape, generator=draw) - 0.5) / 64)
        files.tensors[name] = w.to(files.tensors[name].dtype)
    if kind == "a field nothing reads":
        files.config[HARMLESS_FIELDS[rng.integers(len(HARMLESS_FIELDS))]] = 4096
    files.write(folder)
    if kind == "tuned":
        steps, number = int(rng.choice([10, 30])), int(rng.integers(1 << 16))
        school = School.of(drafter.split("-")[0])
        school.train(drafter, folder, steps=steps, seed=number, tunes=True)
        return f"{kind} by {steps} steps"
    if kind == "another seed":
        number = int(rng.choice(OTHER_SEEDS))
        train_from(number, drafter, folder)
        return f"{kind} ({number})"
    return kind
