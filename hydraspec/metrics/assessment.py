"""Judges in a sentence whether a method is worth it, from a run's paired speedup over all requests
and by category.

Figures by category and by place in the output are defined here too, all computed from meters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from hydraspec.metrics.counters import FIRST_PLACES
from hydraspec.metrics.meter import (
    Meter,
    Pair,
    acceptance_length,
    measured_speedup,
    speedup,
)
from hydraspec.metrics.paired import LEVEL, PairedRatio, holm
from hydraspec.metrics.statistics import (
    MIN_REQUESTS,
    range_words,
    ratio_of_sums,
)
from hydraspec.metrics.step_costs import CostRatio
from hydraspec.metrics.summary import Assessment, CategoryFigures, Interval, PlaceFigures

Says = Literal["worth_it", "cannot_tell", "slower"]
WORDS: dict[Says, str] = {
    "worth_it": "worth it",
    "cannot_tell": "cannot tell",
    "slower": "slower",
}


def pairs_by_category(pairs: Sequence[Pair]) -> dict[str, list[Pair]]:
    """The pairs of each category, in order of first appearance, without pairs that have none."""
    groups: dict[str, list[Pair]] = {}
    for pair in pairs:
        if pair[0].category is not None:
            groups.setdefault(pair[0].category, []).append(pair)
    return groups


def speedups_by_category(
    pairs: Sequence[Pair], *, at_once: int, costs: CostRatio | None = None
) -> dict[str, PairedRatio]:
    """`meter.speedup` of the requests of each category, in order of first appearance."""
    groups = pairs_by_category(pairs).items()
    return {name: speedup(members, at_once=at_once, costs=costs) for name, members in groups}


def as_interval(found: PairedRatio | None) -> Interval | None:
    """Mean and interval of a ratio as summary.json has them; None without a ratio."""
    return (
        None if found is None or found.ratio is None else {"mean": found.ratio, "ci95": found.ci95}
    )


def by_category(
    method: Meter, speedups: Mapping[str, PairedRatio], pairs: Sequence[Pair] = ()
) -> dict[str, CategoryFigures]:
    """Acceptance length (as `Meter.acceptance_length`) and speedup of the requests of each
    category, in order of first appearance; `speedup_measured` is that of `pairs`."""
    timed = pairs_by_category(pairs)
    found: dict[str, CategoryFigures] = {}
    for name, members in method.completed_by_category().items():
        length = acceptance_length(members)
        found[name] = {
            "num_requests": len(members),
            "acceptance_length": {"mean": length.mean, "ci95": length.ci95},
            "speedup": as_interval(speedups.get(name)),
            "speedup_measured": measured_speedup(timed.get(name, [])),
        }
    return found


def by_output_place(meter: Meter) -> list[PlaceFigures]:
    """Acceptance length of the verifications by the place of their first output token, in bins
    0..15, 16..31, 32..63, …: each later bin is as long as all before it."""
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
    gained: PairedRatio,
    categories: Mapping[str, PairedRatio],
    *,
    num_pairs: int,
    diverged: bool,
    synthetic: bool,
) -> Assessment:
    """The judgement of a method: "worth it" where the speedup's interval is above 1, "slower" where
    it is below 1, else "cannot tell". Categories with another judgement are named if their
    speedup differs significantly from 1 after Holm's correction over categories.

    Args:
        gained: the speedup of all requests.
        categories: the speedup of each category.
        num_pairs: requests that both sides finished, with a decode step to time or without.
        diverged: whether outputs differ from the target's, so that nothing can be judged.
        synthetic: whether drafts were accepted at a set rate, whatever the drafter.
    """
    if gained.ratio is None:
        return {"says": "cannot_tell", "sentence": f"cannot tell: {_nothing_timed(num_pairs)}"}
    says = _says(gained)
    figures = in_words(gained)
    if diverged:
        sentence = f"cannot tell: the outputs are not the target's, so {figures} says nothing"
        return {"says": "cannot_tell", "sentence": sentence}
    sentence = f"{WORDS[says]}: {figures}"
    if synthetic:
        sentence += " at the acceptance that was set, not the drafter's"
    adjusted = holm([found.p for found in categories.values()])
    told: dict[Says, list[str]] = {"worth_it": [], "slower": []}
    for (name, found), p in zip(categories.items(), adjusted, strict=True):
        if p is not None and p <= LEVEL and found.ratio is not None:
            told["worth_it" if found.ratio > 1 else "slower"].append(f"{name} {in_words(found)}")
    for other, named in told.items():
        if named and other != says:
            sentence += f"; {WORDS[other]} in {', '.join(named)}"
    return {"says": says, "sentence": sentence}


def _nothing_timed(num_pairs: int) -> str:
    """The reason why no speedup was measured over the requests that both sides finished."""
    if not num_pairs:
        return "no request finished on both sides"
    finished = "one request" if num_pairs == 1 else f"{num_pairs} requests"
    return f"both sides finished {finished}, but one or both had no decode step to time"


def in_words(found: PairedRatio) -> str:
    """A speedup with its interval in words: "1.97x (1.75 to 2.20)"."""
    if found.ci95 is None:
        return f"{found.ratio:.2f}x, of fewer than {MIN_REQUESTS} requests"
    return f"{found.ratio:.2f}x ({range_words(found.ci95)})"


def _says(found: PairedRatio) -> Says:
    if found.ci95 is None or found.ci95[0] <= 1 <= found.ci95[1]:
        return "cannot_tell"
    return "worth_it" if found.ci95[0] > 1 else "slower"
