"""Calibrates static scales of inputs: the largest input of every matrix over training texts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hydraspec.models.checkpoint.twins import INPUT_SCALES
from hydraspec.zoo.recipe.batches import Sequences
from hydraspec.zoo.recipe.draft_heads import DraftHead
from hydraspec.zoo.recipe.train_drafter import draft_rows

NUM_DRAFTS = 3
DIGITS = 6
LARGEST = torch.finfo(torch.float8_e4m3fn).max  # number of the format


@contextmanager
def largest_inputs(model: nn.Module, prefix: str = "") -> Iterator[dict[str, float]]:
    """Records the largest magnitude of the inputs of each linear map, by module."""
    found: dict[str, float] = {}

    def watch(name: str) -> Any:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            found[name] = max(found.get(name, 0.0), float(inputs[0].abs().max()))

        return hook

    maps = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    handles = [m.register_forward_pre_hook(watch(prefix + name)) for name, m in maps.items()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def calibrate(target: PreTrainedModel, head: DraftHead, data: Sequences) -> list[dict[str, float]]:
    """Scales of the inputs of a target's and of a head's matrices, by module: the largest that the
    tokens of a text and their drafts give, by 448."""
    with largest_inputs(target) as of_target, largest_inputs(head, "model.") as of_head:
        for tokens, length in zip(data.tokens, data.length, strict=True):
            draft_rows(target, head, tokens[None, : int(length)].long(), (), NUM_DRAFTS)
    return [
        {name: float(f"{largest / LARGEST:.{DIGITS}g}") for name, largest in sorted(of.items())}
        for of in (of_target, of_head)
    ]


def save_scales(scales: dict[str, dict[str, float]]) -> None:
    """Replace the scales of some checkpoints, by name, in the file that ships."""
    kept = json.loads(INPUT_SCALES.read_text(encoding="utf-8")) if INPUT_SCALES.exists() else {}
    text = json.dumps(kept | scales, indent=1, sort_keys=True)
    INPUT_SCALES.write_text(text + "\n", encoding="utf-8")
