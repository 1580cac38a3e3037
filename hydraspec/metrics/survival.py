"""Estimates of drafts' survival beside what the verifier accepted: is the drafter calibrated?"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypedDict

NUM_BINS = 10  # of equal width, over estimates from 0 to 1

SurvivalBin = TypedDict(  # "from" is a keyword
    "SurvivalBin",
    {
        "from": float,
        "to": float,
        "num_draft_tokens": int,
        "estimated": float,
        "accepted": float,
    },
)


class DraftSurvival(TypedDict):
    """The drafter's own estimates that drafts are accepted, beside what was accepted."""

    calibration_error: float
    bins: list[SurvivalBin]  # those with drafts


# By bin: drafts, accepted ones and the sum of estimates.
SurvivalBins = dict[int, list[float]]


def count(bins: SurvivalBins, survivals: Iterable[float], num_accepted: int) -> None:
    """Count the drafts of a verification; survivals are their estimates, by position."""
    for i, estimate in enumerate(survivals):
        found = bins.setdefault(min(int(estimate * NUM_BINS), NUM_BINS - 1), [0, 0, 0.0])
        found[0] += 1
        found[1] += num_accepted > i
        found[2] += estimate


def reliability(parts: Iterable[SurvivalBins]) -> DraftSurvival | None:
    """The drafts of `parts` by their estimates; None if no draft has one.

    `calibration_error` is the mean over drafts of the distance between a bin's mean estimate and
    its accepted share (expected calibration error; Guo et al., arXiv 1706.04599, section 2).
    """
    sums: SurvivalBins = {}
    for part in parts:
        for place, values in part.items():
            before = sums.get(place, [0, 0, 0.0])
            sums[place] = [a + b for a, b in zip(before, values, strict=True)]
    if not sums:
        return None
    total = sum(drafts for drafts, _, _ in sums.values())
    error = sum(abs(estimated - accepted) for _, accepted, estimated in sums.values())
    return {
        "calibration_error": error / total,
        "bins": [
            {
                "from": place / NUM_BINS,
                "to": (place + 1) / NUM_BINS,
                "num_draft_tokens": int(drafts),
                "estimated": estimated / drafts,
                "accepted": accepted / drafts,
            }
            for place, (drafts, accepted, estimated) in sorted(sums.items())
        ],
    }
