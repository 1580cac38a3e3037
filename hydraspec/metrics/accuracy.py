"""The share of correct outputs, and its name: no "pass rate", since the checks run no code."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

from hydraspec.metrics.summary import Accuracy, CategoryAccuracy
from hydraspec.types import Request

NAMES = {"text": "exact match", "number": "exact match", "defines": "parses and defines"}
OTHER = "correct"  # name for several scorings, or one that this version does not know


def accuracy(requests: Sequence[Request], marks: Sequence[bool | None]) -> Accuracy | None:
    """The share of requests that are marked correct among those with a mark, over all and by
    category, and the `scoring` that marked them; None if no request has a mark.
    """
    marked = [(r, mark) for r, mark in zip(requests, marks, strict=True) if mark is not None]
    if not marked:
        return None
    groups: dict[str, list[bool]] = {}
    for request, mark in marked:
        if request.category is not None:
            groups.setdefault(request.category, []).append(mark)
    found = {
        **_share([mark for _, mark in marked]),
        "scoring": marked[0][0].scoring,
        "by_category": {name: _share(members) for name, members in groups.items()},
    }
    return cast(Accuracy, found)


def _share(marks: Sequence[bool]) -> CategoryAccuracy:
    return {"exact_match": sum(marks) / len(marks), "num_scored": len(marks)}


def accuracy_name(accuracies: Iterable[Accuracy | None]) -> str:
    """The name of the share of correct outputs of runs, by the `scoring` of their accuracies."""
    scorings = [each.get("scoring", "text") for each in accuracies if each]
    names = {NAMES.get(scoring, OTHER) for scoring in scorings} or {NAMES["text"]}
    return names.pop() if len(names) == 1 else OTHER
