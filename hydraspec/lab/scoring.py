"""Exact match of an output's text, or of its final number, with the answer of its workload line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal

from hydraspec.metrics.files import Json
from hydraspec.metrics.statistics import ratio
from hydraspec.types import Completion, Request

MARKER = "answer is"


NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")


def score(text: str | None, answer: str | None) -> bool | None:
    """Whether the final answer in `text` is `answer`; null where either is missing.

    The final answer is what follows the last "answer is", or the whole text where that phrase is
    absent; both sides are compared without surrounding white space, to the letter.
    """
    if text is None or answer is None:
        return None
    return text.rpartition(MARKER)[2].strip() == answer.strip()


def score_number(text: str | None, answer: str | None) -> bool | None:
    """Whether the final number in `text` is that of `answer`; null where either is missing.

    The final number is the first one after the last "####", or else after the last "answer is", or
    else the last one of the text. 1,000 and 1000.0 are equal; signs of currency and units are no
    part of a number.
    """
    if text is None or answer is None:
        return None
    return final_number(text) == final_number(answer) is not None


def final_number(text: str) -> Decimal | None:
    """The number that `score_number` compares; None where there is none."""
    for marker in ("####", MARKER):
        _, found, after = text.rpartition(marker)
        if found and (first := NUMBER.search(after)) is not None:
            return Decimal(first[0].replace(",", ""))
    numbers = NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


def score_completion(request: Request, completion: Completion) -> bool | None:
    """Whether a request's output is right, as its `scoring` says; null for one that ended with an
    error."""
    if completion.finish_reason == "error":
        return None
    judge = score_number if request.scoring == "number" else score
    return judge(completion.text, request.answer)


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
