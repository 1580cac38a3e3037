"""Makes the target that reads pictures, its assistant and its EAGLE-3 head, and says how many
held-out questions the target answers."""

from __future__ import annotations

import itertools
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from hydraspec.workloads import drawn
from hydraspec.zoo.recipe import draft_files, modeling, pictured, pictured_texts, train_pictured
from hydraspec.zoo.recipe.pictured_recipes import (
    EAGLE3,
    NAME,
    NUM_DRAFTER_TEXTS,
    NUM_SCENES,
    NUM_TEXTS,
    PARTS,
)
from hydraspec.zoo.recipe.pictured_texts import LENGTHS, QUESTION_SEED, TWO_PICTURES

TARGET_DATA_SEED, DRAFTER_DATA_SEED = 1, 2
HELD_OUT = 400  # questions of the evaluation
STOP_TOKENS = [1, 5]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def make(out: Path, device: torch.device) -> dict[str, float]:
    """Write the three folders below `out`; returns `accuracy` of what was written."""
    folder = out / NAME
    pictured.save_tokenizer(folder)
    scenes = pictured_texts.make_scenes(NUM_SCENES).to(device)
    data = pictured_texts.make_mixture(folder, NUM_TEXTS, TARGET_DATA_SEED, PARTS).to(device)
    tokens = PreTrainedTokenizerFast.from_pretrained(str(folder))
    words = {
        word: tokens(f" {word}", add_special_tokens=False)["input_ids"]
        for group in train_pictured.SEEN
        for word in group
    }
    wrapper = train_pictured.train_target(scenes, data, words, NAME)
    pictured.save_target(wrapper, folder, STOP_TOKENS)
    make_drafters(out, device)
    return accuracy(pictured.load(folder, device), folder)


def make_drafters(out: Path, device: torch.device) -> None:
    """Write the folders of the assistant and the head, for a target that has been made."""
    folder, draft = out / NAME, out / f"{NAME}-assistant"
    wrapper = pictured.load(folder, device)
    texts = pictured_texts.make_mixture(folder, NUM_DRAFTER_TEXTS, DRAFTER_DATA_SEED, PARTS)
    data = texts.to(device)
    assistant = train_pictured.train_assistant_of(wrapper, data, draft.name)
    modeling.save_checkpoint(assistant, draft, STOP_TOKENS)
    for name in TOKENIZER_FILES:
        shutil.copy(folder / name, draft / name)
    head = train_pictured.train_eagle3(wrapper, data, f"{NAME}-eagle3")
    text: Any = pictured.text_of(wrapper)
    draft_files.save_head(head, EAGLE3, text, out / f"{NAME}-eagle3")


def accuracy(wrapper: Any, folder: Path) -> dict[str, float]:
    """Share of held-out questions of each category that the target answers right, greedily."""
    tokens = PreTrainedTokenizerFast.from_pretrained(str(folder))
    found: dict[str, list[drawn.Question]] = defaultdict(list)
    asked = pictured_texts.questions(QUESTION_SEED, held_out=True)
    for one in itertools.islice(asked, HELD_OUT):
        found[one.category].append(one)
    result = {}
    for category, ones in sorted(found.items()):
        length = LENGTHS[2 if category in TWO_PICTURES else 1]
        texts = pictured_texts.make_texts(tokens, ones, length).to(wrapper.device)
        right: Tensor = train_pictured.is_right(wrapper, texts)
        result[category] = round(right.float().mean().item(), 3)
    return result
