"""Whether a method is worth it: a sentence, from a run's paired speedup over all and by category.

Figures by category and by place in the output are defined here too. Computes from meters only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Literal

import numpy as np

from hydraspec.metrics.meter import (
    FIRST_PLACES,
    Meter,
    Pair,
    RequestCounters,
    finished_pairs,
    speedup,
)
from hydraspec.metrics.paired import LEVEL, PairedRatio, holm, paired_ratio
from hydraspec.metrics.statistics import (
    MIN_REQUESTS,
    Estimate,
    ratio_of_sums,
)
from hydraspec.metrics.summary import Assessment, CategoryFigures, Interval, PlaceFigures

Says = Literal["worth_it", "cannot_tell", "slower"]
SPEEDUP = (1, -1, -1, 1)  # signs of `speed_columns`


def by_category(method: Meter, baseline: Meter | None) -> dict[str, CategoryFigures]:
    """Acceptance length and speedup of the requests of each category, each as over all requests
    (`Meter.acceptance_length`, `meter.speedup`), in order of first appearance."""
    groups: dict[str, list[RequestCounters]] = {}
    for counters in method.completed:
        if counters.category is not None:
            groups.setdefault(counters.category, []).append(counters)
    pairs = [] if baseline is None else finished_pairs(method, baseline)
    found: dict[str, CategoryFigures] = {}
    for name, members in groups.items():
        length = ratio_of_sums(
            [c.num_accepted_tokens for c in members], [c.num_drafts for c in members], offset=1.0
        )
        found[name] = {
            "num_requests": len(members),
            "acceptance_length": {"mean": length.mean, "ci95": length.ci95},
            "speedup": _as_interval(speedup([p for p in pairs if p[0].category == name])),
        }
    return found


def _as_interval(estimate: Estimate) -> Interval | None:
    return None if estimate.mean is None else {"mean": estimate.mean, "ci95": estimate.ci95}


def by_output_place(meter: Meter) -> list[PlaceFigures]:
    """Acceptance length of the verifications by the place of their first output token, in bins
    0..15, 16..31, 32..63, ...: each ends at twice the end of the one before."""
    bins = sorted({place for c in meter.completed for place in c.drafts_by_place})
    figures: list[PlaceFigures] = []
    for place in bins:
        counts = [c.drafts_by_place[place] for c in meter.completed if place in c.drafts_by_place]
        length = ratio_of_sums([a for _, a in counts], [n for n, _ in counts], offset=1.0)
        figures.append(
            {
                "first": FIRST_PLACES << (place - 1) if place else 0,
                "last": (FIRST_PLACES << place) - 1,
                "num_requests": len(counts),
                "num_drafts": sum(n for n, _ in counts),
                "acceptance_length": {"mean": length.mean, "ci95": length.ci95},
            }
        )
    return figures


def assess(
    method: Meter,
    baseline: Meter | None,
    gained: Interval | None,
    categories: Mapping[str, CategoryFigures],
    *,
    at_once: int | None,
    diverged: bool,
    synthetic: bool,
) -> Assessment | None:
    """Whether the speedup's interval is above 1, below it, or neither, and in which categories
    that differs: those whose own speedup is told from 1 after Holm's correction over categories.
    None without a baseline.

    Args:
        gained: the speedup of all requests.
        at_once: requests in the engine at a time; None: all.
        diverged: outputs are not the target's: then nothing can be told.
        synthetic: drafts were accepted at a set rate, whatever the drafter.
    """
    if baseline is None:
        return None
    if gained is None:
        return {"says": "cannot_tell", "sentence": "cannot tell: no request finished on both sides"}
    says = _says(gained["ci95"])
    figures = in_words(gained)
    if diverged:
        sentence = f"cannot tell: the outputs are not the target's, so {figures} says nothing"
        return {"says": "cannot_tell", "sentence": sentence}
    words = {"worth_it": "worth it", "cannot_tell": "cannot tell", "slower": "slower"}
    sentence = f"{words[says]}: {figures}"
    if synthetic:
        sentence += " at the acceptance that was set, not the drafter's"
    for other, names in _other_categories(method, baseline, says, at_once):
        listed = ", ".join(f"{name} {in_words(categories[name]['speedup'])}" for name in names)
        sentence += f"; {words[other]} in {listed}"
    return {"says": says, "sentence": sentence}


def in_words(gained: Interval | None) -> str:
    """ "1.97x (1.75 to 2.20)"."""
    assert gained is not None
    if gained["ci95"] is None:
        return f"{gained['mean']:.2f}x, of fewer than {MIN_REQUESTS} requests"
    low, high = gained["ci95"]
    return f"{gained['mean']:.2f}x ({low:.2f} to {high:.2f})"


def _says(ci95: Sequence[float] | None) -> Says:
    if ci95 is None or ci95[0] <= 1 <= ci95[1]:
        return "cannot_tell"
    return "worth_it" if ci95[0] > 1 else "slower"


def _other_categories(
    method: Meter, baseline: Meter, says: Says, at_once: int | None
) -> list[tuple[str, list[str]]]:
    """What is told of categories and is not what `says` is, with their names."""
    pairs = sorted(
        (p for p in finished_pairs(method, baseline) if p[0].category is not None),
        key=lambda p: str(p[0].category),
    )
    tested: dict[str, PairedRatio] = {}
    for name, members in groupby(pairs, key=lambda p: str(p[0].category)):
        columns = speed_columns(list(members))
        tested[name] = paired_ratio(columns, SPEEDUP, at_once=at_once or columns.shape[1])
    adjusted = holm([found.p for found in tested.values()])
    told: dict[str, list[str]] = {}
    for (name, found), p in zip(tested.items(), adjusted, strict=True):
        if p is not None and p <= LEVEL and found.ratio is not None:
            told.setdefault("worth_it" if found.ratio > 1 else "slower", []).append(name)
    return [
        (other, told[other]) for other in ("worth_it", "slower") if other in told and other != says
    ]


def speed_columns(pairs: Sequence[Pair]) -> np.ndarray:
    """Tokens and milliseconds of the method and of the baseline: [4, R]."""
    return np.array(
        [[m.decode_tokens, m.decode_ms, b.decode_tokens, b.decode_ms] for m, b in pairs], float
    ).T
