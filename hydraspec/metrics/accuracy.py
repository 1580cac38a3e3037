"""What the share of correct outputs is called: a check that runs no code is no pass rate."""

from __future__ import annotations

from collections.abc import Iterable

from hydraspec.metrics.summary import Accuracy

NAMES = {"text": "exact match", "number": "exact match", "defines": "parses and defines"}
OTHER = "correct"  # of several kinds, or of one that this version does not know


def accuracy_name(accuracies: Iterable[Accuracy | None]) -> str:
    """What correct outputs are called, by the `scoring` of runs' accuracies."""
    scorings = [each.get("scoring", "text") for each in accuracies if each]
    names = {NAMES.get(scoring, OTHER) for scoring in scorings} or {NAMES["text"]}
    return names.pop() if len(names) == 1 else OTHER
