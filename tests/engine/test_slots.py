"""The drafts of each request that are worth their rows, against every choice there is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from hydraspec.engine.costs import HALF, CostTable, StepTimes
from hydraspec.engine.run.step_costs import with_ragged
from hydraspec.engine.slots import (
    LengthCosts,
    accepted_by_length,
    best_allocation,
    in_two_lengths,
    leading,
    least_survivals,
)

OFFERED = (0, 1, 2, 4)
MOST = OFFERED[-1]


def random_costs(rng: np.random.Generator) -> LengthCosts:
    steps = np.concatenate(([rng.uniform(0.5, 2)], rng.uniform(0, 0.5, len(OFFERED) - 1)))
    drafting = np.concatenate(([0.0], rng.uniform(0, 0.3, len(OFFERED) - 1)))
    return LengthCosts(
        OFFERED, steps.cumsum(), drafting.cumsum(), rng.uniform(0, 0.2, len(OFFERED))
    )


def raised(wanted: Sequence[int], costs: LengthCosts) -> list[int]:
    shorter, longer = in_two_lengths(wanted, costs)
    return [shorter if count <= shorter else longer for count in wanted]


def random_survivals(rng: np.random.Generator, num_requests: int) -> np.ndarray:
    found: np.ndarray = np.cumprod(rng.uniform(0, 1, (num_requests, MOST)) ** 0.4, axis=1)
    return found


def cost_of(counts: tuple[int, ...], costs: LengthCosts) -> float:
    """Milliseconds of a step, written out."""
    verify = float(np.interp(sum(counts) / len(counts), OFFERED, costs.verify_ms))
    is_ragged = len(set(counts)) > 1
    drafting = float(costs.draft_ms[OFFERED.index(max(counts))])
    ragged = float(np.interp(sum(counts) / len(counts), OFFERED, costs.ragged_ms))
    return verify + ragged * is_ragged + drafting


@pytest.mark.parametrize("seed", range(40))
def test_no_choice_of_two_lengths_is_better(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_requests, costs = 1 + seed % 5, random_costs(rng)
    survivals = random_survivals(rng, num_requests)

    def speed(counts: tuple[int, ...]) -> float:
        drafts = sum(float(row[:n].sum()) for row, n in zip(survivals, counts, strict=True))
        return (num_requests + drafts) / cost_of(counts, costs)

    every = [c for c in product(OFFERED, repeat=num_requests) if len(set(c)) <= 2]
    found = best_allocation(accepted_by_length(survivals, OFFERED), costs)
    counts = tuple(found.counts.tolist())
    assert len(set(counts)) <= 2
    assert OFFERED[found.most] == max(counts)
    assert found.tokens_per_ms == pytest.approx(max(map(speed, every)))
    assert speed(counts) == pytest.approx(found.tokens_per_ms)


def test_equal_requests_have_equally_many_drafts() -> None:
    costs = LengthCosts(OFFERED, np.array([1.0, 1.1, 1.2, 1.4]), np.zeros(4), np.zeros(4))
    survivals = np.tile(np.cumprod([0.9] * MOST), (6, 1))
    assert best_allocation(accepted_by_length(survivals, OFFERED), costs).counts.tolist() == [4] * 6


@pytest.mark.parametrize("seed", range(10))
def test_two_lengths_never_pay_where_they_cost_the_rows_of_the_longer(seed: int) -> None:
    """A device that pads a ragged step to its widest request, by what was measured of one such
    step; the same requests get two lengths where rows are packed."""
    rng = np.random.default_rng(seed)
    survivals = np.cumprod(
        np.where(np.arange(8)[:, None] < 4, 0.02, rng.uniform(0.8, 1, (8, 1))) * np.ones((8, MOST)),
        axis=1,
    )
    accepted = accepted_by_length(survivals, OFFERED)
    steps = tuple(10.0 + 2 * n for n in OFFERED)
    plain = CostTable(batches=(8,), drafts=OFFERED, step_ms=(steps,))
    for half_ms, num_lengths in ((steps[-1], 1), (plain.at(8, MOST / 2).step_ms, 2)):
        times = StepTimes()
        times.step_ms[8, HALF] = [half_ms] * 12
        costs = LengthCosts.of(with_ragged(plain, times), OFFERED, 8, None)
        counts = best_allocation(accepted, costs).counts
        assert len(set(counts.tolist())) == num_lengths, half_ms


def test_a_length_is_kept_where_others_gain_little() -> None:
    """With costs by which two drafts are a little better than four, or much."""
    survivals = np.tile(np.cumprod([0.8] * MOST), (6, 1))
    accepted = accepted_by_length(survivals, OFFERED)
    for step_ms, kept in (([1.0, 1.1, 1.2, 1.67], 4), ([1.0, 1.1, 1.2, 2.2], 2)):
        costs = LengthCosts(OFFERED, np.array(step_ms), np.zeros(4), np.zeros(4))
        assert best_allocation(accepted, costs).counts.tolist() == [2] * 6
        found = best_allocation(accepted, costs, last=OFFERED.index(4))
        assert found.counts.tolist() == [kept] * 6
        assert found.most == OFFERED.index(kept)
    costly = LengthCosts(OFFERED, np.array([1.0, 3.0, 5.0, 9.0]), np.zeros(4), np.zeros(4))
    assert best_allocation(accepted, costly, last=1).counts.tolist() == [0] * 6


def test_the_least_survival_is_that_of_a_row_which_pays_for_itself() -> None:
    """Where time is linear in rows, adding a draft just above it raises the speed, and adding one
    just below it lowers it."""
    num_requests, row_ms = 5, 0.05
    verify = 1 + row_ms * num_requests * np.array(OFFERED)
    costs = LengthCosts(OFFERED, verify, np.zeros(4), np.zeros(4))
    tokens, ms = 9.0, 2.0
    least, further = least_survivals(costs, num_requests, tokens / ms)
    assert further == pytest.approx(least)
    assert (tokens + 1.01 * least) / (ms + row_ms) > tokens / ms
    assert (tokens + 0.99 * least) / (ms + row_ms) < tokens / ms


def test_further_drafts_cost_what_they_add_to_a_step_with_drafts() -> None:
    costs = LengthCosts((0, 1, 3), np.array([1.0, 1.6, 1.8]), np.zeros(3), np.zeros(3))
    first, further = least_survivals(costs, 2, 3.0)
    assert first == pytest.approx(3 / 2 * 0.8 / 3)
    assert further == pytest.approx(3 / 2 * 0.1)
    assert leading([[0.5, 0.2, 0.1], [0.39, 0.3, 0.2]], (first, further)) == [2, 0]
    one = replace(costs, offered=(0, 3), verify_ms=np.array([1.0, 1.8]))
    assert least_survivals(one, 2, 3.0) == pytest.approx((first, first))


@pytest.mark.parametrize("seed", range(40))
def test_two_lengths_hold_what_is_wanted_and_cost_least(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_requests, costs = 1 + seed % 5, random_costs(rng)
    wanted = rng.integers(0, MOST + 1, num_requests)
    every = [
        tuple(shorter if n <= shorter else longer for n in wanted.tolist())
        for shorter, longer in product(OFFERED, OFFERED)
        if shorter <= longer >= wanted.max()
    ]
    found = tuple(raised(wanted.tolist(), costs))
    assert found in every

    def price(counts: tuple[int, ...]) -> float:
        """Without drafting, which is as long as wanted in any case."""
        drafting = float(costs.draft_ms[OFFERED.index(max(counts))])
        unwanted = (sum(counts) - wanted.sum()) / num_requests
        draft_ms = (costs.verify_ms[-1] - costs.verify_ms[0]) / MOST
        return cost_of(counts, costs) - drafting - float(unwanted * draft_ms / 2)

    assert price(found) == pytest.approx(min(map(price, every)))


def test_drafts_that_cost_nothing_are_verified_although_they_are_not_wanted() -> None:
    costs = LengthCosts((0, 2, 4), np.array([1.0, 1.5, 1.5]), np.zeros(3), np.array([0.1] * 3))
    assert raised([1], costs) == [4]
    assert raised([0, 1, 2], costs) == [4, 4, 4]
    dear = replace(costs, verify_ms=np.array([1.0, 1.5, 2.0]))
    assert raised([1], dear) == [2]


def test_a_draft_is_verified_whatever_comes_after_it() -> None:
    """The number of drafts of a sampled request may depend on no token that it verifies: changing
    the estimates after a draft, which read its token, does not change whether it is verified."""
    rng = np.random.default_rng(3)
    for _ in range(300):
        costs, least = random_costs(rng), tuple(rng.uniform(0.1, 0.6, 2))
        survivals = random_survivals(rng, 4)
        counts = raised(leading(survivals, least), costs)
        for index in range(MOST):  # estimates after draft `index` are others
            changed = survivals.copy()
            factors = np.cumprod(rng.uniform(0, 1, MOST - index - 1))
            changed[0, index + 1 :] = changed[0, index] * factors
            again = raised(leading(changed, least), costs)
            assert (counts[0] > index) == (again[0] > index)
