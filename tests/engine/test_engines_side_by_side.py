"""Two and three engines of one process over one loaded target: each decodes what it decodes alone.

Engines share weights and nothing that changes. Separate caches run step by step in between one
another; a baseline shares its origin's cache, so the two take turns. Whatever one wrote into a
shared place (a block size in the target, a layout, a graph's memory) shows as another token or
draft of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import permutations
from typing import Any

import engine_company
import pytest
from engine_company import LAUNCHES, Company
from fuzz_stages import PAIRS, RANDOM_PAIRS, Pair
from graph_runs import attention_as_on_devices
from rehearsed import rehearse_on_cpu, rehearse_where_it_decodes

from hydraspec.engine.run import loading

QUICK = {("random mimo", "graphs"), ("random sharing", "eager")}
ORDERS = tuple(permutations(["k", "own", "none"]))
# The zoo's models are slow on a CPU: graphs and one order of them.
EVERY_PAIR = [
    (pair, launch)
    for pair in PAIRS
    for launch in LAUNCHES
    if pair.method != "none" and (pair in RANDOM_PAIRS or launch == "graphs")
]
EVERY_ORDER = [
    (pair, launch, order)
    for pair, launch in EVERY_PAIR
    for order in (ORDERS if launch == "eager" else ORDERS[:1])
]


def quick_or_slow(cases: Sequence[Any]) -> list[Any]:
    """A few are quick: the first of those that QUICK names."""
    quick = {case[:2]: case for case in reversed(cases) if (case[0].stage, case[1]) in QUICK}
    return [
        pytest.param(
            *case,
            id="-".join((case[0].stage, case[0].method, case[1], *(*case[2:], ())[0])),
            marks=[] if case in quick.values() else [pytest.mark.slow],
        )
        for case in cases
    ]


alone = cache(engine_company.alone)


@pytest.fixture(autouse=True)
def _as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Static attention plans for graphs, and every engine that launches rehearses."""
    attention_as_on_devices(monkeypatch)
    rehearse_on_cpu(monkeypatch)


@pytest.mark.parametrize(("pair", "launch", "order"), quick_or_slow(EVERY_ORDER))
def test_three_engines_step_in_between_one_another(
    pair: Pair, launch: str, order: tuple[str, ...]
) -> None:
    engine_company.three_step_in_between(Company(pair, launch), order, alone)


@pytest.mark.parametrize(("pair", "launch"), quick_or_slow(EVERY_PAIR))
def test_a_baseline_and_its_origin_take_turns(pair: Pair, launch: str) -> None:
    engine_company.baseline_takes_turns(Company(pair, launch), alone)


@pytest.mark.parametrize(("pair", "launch"), quick_or_slow(EVERY_PAIR))
def test_an_engine_that_goes_in_the_middle_takes_nothing_along(pair: Pair, launch: str) -> None:
    engine_company.one_goes_in_the_middle(Company(pair, launch), alone)


def share_the_target_itself(patch: pytest.MonkeyPatch) -> None:
    """Block sizes are written into the target that all engines have, as they once were."""
    patch.setattr(loading, "copy", lambda target: target)


@pytest.mark.parametrize("plant", [share_the_target_itself, rehearse_where_it_decodes])
def test_planted_bugs_are_caught(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    company = Company(Pair("random mimo", "mtp"), "eager")
    order = ("k", "own", "none")
    for kind in order:
        alone(company, kind)
    plant(monkeypatch)
    with pytest.raises((AssertionError, IndexError)):
        engine_company.three_step_in_between(company, order, alone)
