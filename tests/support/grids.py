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


def in_turn(names: Iterable[str], ways: Sequence[str], always: Sequence[str] = ()) -> list[Any]:
    """Every name in every way, quick in one way that takes turns, of `always` in all of them."""
    names = list(names)
    assert set(always) <= set(names)
    turn = {name: ways[number % len(ways)] for number, name in enumerate(names)}
    return slow_unless(lambda n, way: n in always or way == turn[n], product(names, ways))
