"""Grids of cases of which a few run each time, and all in `make test-slow`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any

import pytest


def slow_unless(is_quick: Callable[..., bool], cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Parameters of the cases; those that are not quick are marked slow."""
    slow = [pytest.mark.slow]
    return [pytest.param(*case, marks=[] if is_quick(*case) else slow) for case in cases]


def in_turn(names: Iterable[str], ways: Sequence[Any], always: Sequence[str] = ()) -> list[Any]:
    """Every name in every way, quick in one way that takes turns, of `always` in all of them."""
    names = list(names)
    assert set(always) <= set(names)
    turn = {name: ways[number % len(ways)] for number, name in enumerate(names)}
    return slow_unless(lambda n, way: n in always or way == turn[n], product(names, ways))


def every_third(*options: Iterable[Any]) -> list[Any]:
    """All combinations of some options; two of three are slow. Every option is in a quick one."""
    cases = list(product(*map(enumerate, options)))
    quick = [sum(place for place, _ in case) % 3 == 0 for case in cases]
    values = [tuple(value for _, value in case) for case in cases]
    for number, option in enumerate(zip(*values, strict=True)):
        met = {each for each, is_quick in zip(option, quick, strict=True) if is_quick}
        assert met == set(option), f"option {number} is never quick for {set(option) - met}"
    return [
        pytest.param(*case, marks=[] if is_quick else [pytest.mark.slow])
        for case, is_quick in zip(values, quick, strict=True)
    ]
