"""Drafters on prompts with images: the text is the target's own, and every draft is the plain
uncached loop's, token for token, in float64, with chunks, preemption and prefix hits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
from grids import slow_unless
from image_worlds import WORLDS, make_world, run_scenarios
from plain_loops import MAX_K
from scenarios import Outcome

from hydraspec.types import Batch, RequestState

QUICK = ("eagle3 reads images", "eagle3 reads placeholders", "peagle reads images", "dflash")


@pytest.fixture(scope="module")
def world_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    return cache(lambda name: make_world(tmp_path_factory.mktemp("world"), name))


@pytest.mark.parametrize("name", slow_unless(lambda name: name in QUICK, product(WORLDS)))
def test_drafts_and_acceptance_equal_the_plain_loop(
    name: str, world_of: Callable[[str], Any]
) -> None:
    """Catches a row that is merged a place too early, a mask row on an image's, features of the
    placeholder's states."""
    outcome = run_scenarios(world_of(name), 8, 1, Outcome())
    assert {right for _, right in outcome.accepted} >= {1, 2}
    assert any(right < k for k, right in outcome.accepted), "no draft was rejected"
    assert outcome.num_preempted > 0, "no scenario met cache pressure"


def unmerged(speculator: Any) -> None:
    """The head reads the placeholder's embedding where it asks for the image's."""
    speculator.spec = replace(speculator.spec, supports_mm_inputs=False)


def unshifted(speculator: Any) -> None:
    """Rows of images read their own output, not that of the next token."""
    true_propose = speculator.propose

    def propose(step: Any, verdict: Any, batch: Batch, state: RequestState) -> Any:
        encoded = None if batch.encoded is None else replace(batch.encoded, sees_until=None)
        return true_propose(step, verdict, replace(batch, next_encoded=encoded), state)

    speculator.propose = propose


@pytest.mark.parametrize("plant", [unmerged, unshifted])
@pytest.mark.parametrize("name", [n for n, (*_, reads) in WORLDS.items() if reads])
def test_planted_mistakes_are_caught(
    name: str, plant: Callable[[Any], None], world_of: Callable[[str], Any]
) -> None:
    with pytest.raises(AssertionError, match="RequestStep"):
        run_scenarios(world_of(name), MAX_K, 1, Outcome(), plant)


def test_a_head_that_asks_for_nothing_is_not_given_images(world_of: Callable[[str], Any]) -> None:
    """The same drafts would come from no image at all: only the states know of it."""

    def reads_all(speculator: Any) -> None:
        speculator.spec = replace(speculator.spec, supports_mm_inputs=True)

    with pytest.raises(AssertionError, match="RequestStep"):
        run_scenarios(world_of("eagle3 reads placeholders"), MAX_K, 1, Outcome(), reads_all)
