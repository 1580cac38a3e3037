"""Exact match of an output's text with the answer of its workload line."""

from __future__ import annotations

from collections.abc import Sequence

from hydraspec.metrics.files import Json
from hydraspec.metrics.statistics import ratio
from hydraspec.types import Completion, Request

MARKER = "answer is"


def score(text: str | None, answer: str | None) -> bool | None:
    """Whether the final answer in `text` is `answer`; null where either is missing.

    The final answer is what follows the last "answer is", or the whole text where that phrase is
    absent; both sides are compared without surrounding white space, to the letter.
    """
    if text is None or answer is None:
        return None
    return text.rpartition(MARKER)[2].strip() == answer.strip()


def score_completion(request: Request, completion: Completion) -> bool | None:
    """`score` of a request's output; null for one that ended with an error."""
    if completion.finish_reason == "error":
        return None
    return score(completion.text, request.answer)


def accuracy(requests: Sequence[Request], scores: Sequence[bool | None]) -> Json:
    """exact_match: share of scored requests that are correct, also by category; null if none
    was.
    """
    scored = [(r.category, s) for r, s in zip(requests, scores, strict=True) if s is not None]
    if not scored:
        return None
    categories = dict.fromkeys(category for category, _ in scored if category is not None)
    by_category = {name: [s for c, s in scored if c == name] for name in categories}
    return {
        "exact_match": ratio(sum(s for _, s in scored), len(scored)),
        "num_scored": len(scored),
        "by_category": {
            name: {"exact_match": ratio(sum(marks), len(marks)), "num_scored": len(marks)}
            for name, marks in by_category.items()
        },
    }
