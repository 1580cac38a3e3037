"""The acceptance length that a drafter should reach, and who says so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

CARD = "README.md"  # a model card; its front matter may hold measured results (`model-index`)
METRIC = "acceptance_length"


@dataclass(slots=True, frozen=True)
class Expected:
    """An acceptance length at the K that is examined, and its source in words."""

    acceptance_length: float
    source: str


def of_card(folder: Path, k: int) -> Expected | None:
    """What the model card in a drafter's folder says for K drafts, if anything.

    Read is the `model-index` of the Hugging Face hub: a metric of type `acceptance_length` whose
    `args` have `num_speculative_tokens`. A card that cannot be read says nothing.
    """
    for metric in _metrics(folder / CARD):
        args = metric.get("args")
        value = metric.get("value")
        fits = isinstance(args, dict) and args.get("num_speculative_tokens") == k
        if metric.get("type") == METRIC and fits and isinstance(value, int | float) and value >= 1:
            return Expected(float(value), f"the card in the drafter's folder ({CARD})")
    return None


def _metrics(card: Path) -> Iterator[dict[str, Any]]:
    try:
        _, front, _ = card.read_text(encoding="utf-8").split("---\n", 2)
        found = yaml.safe_load(front)
        for model in found["model-index"]:
            for result in model["results"]:
                yield from result["metrics"]
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return
