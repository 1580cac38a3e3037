"""The acceptance length that a drafter should reach, and the source of that figure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

CARD = "README.md"  # a model card; its front matter may hold measured results (`model-index`)
METRIC = "acceptance_length"
SHORT = 0.9  # least share of its own figure that a healthy drafter reaches
SHORT_OF_USUAL = 0.93  # least share of the method's usual figure, a mean over several drafters
CERTAIN = 0.99  # least mean probability of the target's best token on texts to which RATES apply
# Probability that draft 1, 2, 3 is accepted if all drafts before it are; mean over the zoo's heads
# of the method (hydraspec/zoo/README.md, "conditional rate per position"). Later drafts are taken
# to have the last rate.
RATES = {
    "eagle": (0.836, 0.876, 0.784),
    "eagle3": (0.854, 0.859, 0.835),
    "peagle": (0.754, 0.662, 0.680),
    "mtp": (0.919, 0.911, 0.886),
    "gemma4_mtp": (0.816, 0.845, 0.793),
}


@dataclass(slots=True, frozen=True)
class Expected:
    """The acceptance length that a drafter should reach with the examined number of drafts, K.

    Attributes:
        source: who says so, as the end of a sentence: "3.2 that {source}".
        is_own: the figure was measured with this drafter; False: with others of its method.
    """

    acceptance_length: float
    source: str
    is_own: bool = True

    @property
    def least(self) -> float:
        """The least acceptance length of a healthy drafter."""
        return self.acceptance_length * (SHORT if self.is_own else SHORT_OF_USUAL)


def of_card(folder: Path, k: int) -> Expected | None:
    """The acceptance length with K drafts according to the model card in a drafter's folder, from
    the `model-index` of the Hugging Face hub: a metric of type `acceptance_length` whose `args`
    hold `num_speculative_tokens`. None if the card has none for this K, or cannot be read.
    """
    for metric in _metrics(folder / CARD):
        args = metric.get("args")
        value = metric.get("value")
        fits = isinstance(args, dict) and args.get("num_speculative_tokens") == k
        if metric.get("type") == METRIC and fits and isinstance(value, int | float) and value >= 1:
            return Expected(float(value), f"the card in the drafter's folder ({CARD}) says")
    return None


def usual(method: str, k: int, certainty: float) -> Expected | None:
    """The acceptance length that heads of a method usually reach with K drafts; None if no figure
    is known for the method, or for texts with this `certainty`.

    certainty: mean probability of the target's most likely token on the texts.
    """
    rates = RATES.get(method)
    if rates is None or certainty < CERTAIN:
        return None
    length = right = 1.0
    for place in range(k):
        right *= rates[min(place, len(rates) - 1)]
        length += right
    return Expected(length, f"the zoo's {method} heads reach on text as certain", False)


def _metrics(card: Path) -> Iterator[dict[str, Any]]:
    try:
        _, front, _ = card.read_text(encoding="utf-8").split("---\n", 2)
        found = yaml.safe_load(front)
        for model in found["model-index"]:
            for result in model["results"]:
                yield from result["metrics"]
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return
