"""A pairwise covering set: few rows in which every two levels of different factors meet."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence

CANDIDATES = 40  # rows tried for each that is kept

Row = dict[str, str]
Pair = tuple[tuple[str, str], tuple[str, str]]  # (factor, level), (factor, level)


def all_pairs(factors: Mapping[str, Sequence[str]]) -> set[Pair]:
    """Every two levels of different factors, in the factors' order."""
    return {
        ((one, a), (other, b))
        for one, other in itertools.combinations(factors, 2)
        for a in factors[one]
        for b in factors[other]
    }


def pairs_of(row: Row) -> set[Pair]:
    """The pairs that a row covers."""
    return set(itertools.combinations(row.items(), 2))


def covering_set(factors: Mapping[str, Sequence[str]], seed: int = 0) -> list[Row]:
    """Rows that cover all pairs, the same for the same factors and seed on every machine.

    AETG's greedy algorithm (Cohen, Dalal, Fredman, Patton 1997): each row starts from a pair that
    is still missing, takes the other factors in random order at their most useful level, and is the
    best of CANDIDATES such rows.
    """
    draws = random.Random(seed)  # only random(), the one stream Python promises to keep
    missing = all_pairs(factors)
    rows: list[Row] = []
    while missing:
        candidates = [_candidate(factors, missing, draws) for _ in range(CANDIDATES)]
        best = max(candidates, key=lambda row: len(pairs_of(row) & missing))
        missing -= pairs_of(best)
        rows.append(best)
    return rows


def _candidate(
    factors: Mapping[str, Sequence[str]], missing: set[Pair], draws: random.Random
) -> Row:
    ordered = sorted(missing)
    row = dict(ordered[int(draws.random() * len(ordered))])
    others = sorted((name for name in factors if name not in row), key=lambda _: draws.random())
    for name in others:
        levels = sorted(factors[name], key=lambda _: draws.random())
        row[name] = max(levels, key=lambda level: _gain(row, name, level, factors, missing))
    return {name: row[name] for name in factors}


def _gain(
    row: Row,
    name: str,
    level: str,
    factors: Mapping[str, Sequence[str]],
    missing: set[Pair],
) -> int:
    with_level = {**row, name: level}
    return len(pairs_of({key: with_level[key] for key in factors if key in with_level}) & missing)
