"""Paired ratios: intervals against what is known, false alarms under the null, power, Holm."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from simulated_runs import Machine

from hydraspec.metrics.paired import (
    LEVEL,
    Critical,
    PairedRatio,
    balanced,
    holm,
    in_blocks,
    paired_ratio,
    two_sided,
)
from hydraspec.metrics.statistics import (
    normal_quantile,
    normal_tail,
    sign_test,
    student_quantile,
    student_tail,
)

SPEEDUPS = (1, -1, -1, 1, -1, 1, 1, -1)
NUM_PAIRS = 200
LEVELS = (0.05, 0.005, 0.05 / 66)  # of one comparison, ten, and the pairs of twelve jobs
MOST_ALARMS = 16  # of 200 pairs at 5 %: two standard deviations above ten
# Share of pairs told apart by a true ratio, of 64 and 256 prompts: ADR 29 has the whole table.
POWER = {(64, 1.5): 0.92, (256, 1.2): 0.90, (64, 1.1): 0.14}


def compared(machine: Machine, faster: float = 1.0) -> PairedRatio:
    columns = np.concatenate([machine.run(faster=faster), machine.run()])
    return paired_ratio(columns, SPEEDUPS, at_once=4)


def told(found: PairedRatio) -> bool:
    return found.p is not None and found.p <= LEVEL


def told_from(found: PairedRatio, level: float) -> list[float]:
    """The logarithms of what the job has to be faster and slower by for this noise to tell it."""
    assert found.critical is not None
    assert found.log_error is not None
    assert found.ratio is not None
    least = found.critical.at(level) * found.log_error
    return [least - np.log(found.ratio), least + np.log(found.ratio)]


@pytest.mark.parametrize("num_requests", [16, 64, 256])
def test_false_alarms_under_the_null(num_requests: int) -> None:
    """Catches requests taken as independent where those that share steps share noise: 23 alarms at
    64 requests with blocks of one."""
    pairs = [compared(Machine(seed, num_requests=num_requests)) for seed in range(NUM_PAIRS)]
    assert sum(map(told, pairs)) <= MOST_ALARMS
    covered = [p.ci95 is not None and p.ci95[0] <= 1 <= p.ci95[1] for p in pairs]
    assert sum(covered) >= NUM_PAIRS - MOST_ALARMS


def test_two_equal_jobs_repeated_twenty_times_are_called_equal() -> None:
    """Each repeat is a new pair of runs, on a machine whose speed drifts between them."""
    equal = sum(not told(compared(Machine(10_000 + seed))) for seed in range(20))
    assert equal >= 18


@pytest.mark.slow
@pytest.mark.parametrize(("num_requests", "faster"), POWER)
def test_power_is_as_stated(num_requests: int, faster: float) -> None:
    pairs = [compared(Machine(seed, num_requests=num_requests), faster) for seed in range(100)]
    assert sum(map(told, pairs)) / 100 == pytest.approx(POWER[num_requests, faster], abs=0.08)


def test_the_machines_speed_cancels_and_the_ratio_is_that_of_the_sums() -> None:
    rng = np.random.default_rng(0)
    columns = rng.uniform(1, 2, (4, 40))
    found = paired_ratio(columns, (1, -1, -1, 1), at_once=1)
    a, b, c, d = columns.sum(axis=1)
    assert found.ratio == pytest.approx((a / b) / (c / d))
    drifted = columns * np.array([1, 3, 1, 3])[:, None]
    assert paired_ratio(drifted, (1, -1, -1, 1), at_once=1).ci95 == pytest.approx(found.ci95)


def test_equal_counts_have_no_error_and_a_constant_difference_is_certain() -> None:
    counts = np.arange(1.0, 41).reshape(2, 20)
    same = paired_ratio(np.concatenate([counts, counts]), (1, -1, -1, 1), at_once=1)
    assert (same.ratio, same.p, same.ci95) == (1.0, 1.0, (1.0, 1.0))
    assert same.num_more_needed() is None
    other = paired_ratio(
        np.concatenate([2 * counts[:1], counts[1:], counts]), (1, -1, -1, 1), at_once=1
    )
    assert other.ratio == pytest.approx(2)
    assert told(other)


def test_few_requests_have_no_interval_and_zeros_no_ratio() -> None:
    few = paired_ratio(np.ones((2, 4)), (1, -1), at_once=1)
    assert (few.ratio, few.ci95, few.p) == (1.0, None, None)
    assert few.num_more_needed() is None
    assert few.detectable() is None
    assert paired_ratio(np.zeros((2, 9)), (1, -1), at_once=None).ratio is None
    assert paired_ratio(np.ones((2, 0)), (1, -1), at_once=1).ratio is None


@pytest.mark.parametrize("num_requests", [16, 64, 256])
def test_a_stated_difference_is_told_in_four_of_five_repeats(num_requests: int) -> None:
    """What each pair states, told by every other one. Catches normal quantiles: of 16 prompts
    0.34, 0.08 and 0.01 at these levels, of 256 0.68, 0.47 and 0.30."""
    pairs = [compared(Machine(20_000 + i, num_requests=num_requests)) for i in range(80)]
    for level in LEVELS:
        stated = np.log([pair.detectable(level) or 1.0 for pair in pairs])
        least = [told_from(pair, level) for pair in pairs]
        assert 0.7 <= np.mean(stated[:, None] > np.ravel(least)) <= 0.9


@pytest.mark.slow
@pytest.mark.parametrize("num_requests", [16, 64, 256])
@pytest.mark.parametrize("level", LEVELS)
def test_runs_that_differ_as_stated_are_told_apart(num_requests: int, level: float) -> None:
    count = 0
    for i in range(200):
        stated = compared(Machine(30_000 + i, num_requests=num_requests)).detectable(level)
        assert stated is not None
        found = compared(Machine(40_000 + i, num_requests=num_requests), stated)
        count += found.p is not None and found.p <= level
    assert 0.7 <= count / 200 <= 0.9


@pytest.mark.slow
@pytest.mark.parametrize(("num_requests", "faster"), [(16, 1.5), (24, 1.4), (64, 1.2)])
def test_as_many_prompts_as_are_needed_tell_the_difference(
    num_requests: int, faster: float
) -> None:
    """At 5 %, of a first pair whose ratio happens to be the true one."""
    count = 0
    for i in range(100):
        first = compared(Machine(50_000 + i, num_requests=num_requests))
        more = replace(first, ratio=faster).num_more_needed()
        assert more is not None
        enough = Machine(60_000 + i, num_requests=num_requests + min(more, 5000))
        count += told(compared(enough, faster))
    assert 0.7 <= count / 100 <= 0.95


def test_more_prompts_needed_follow_from_the_error() -> None:
    """An error that is well known: 10 % of a difference of 10 % need (1.98 x larger + 0.84)² times
    as many, where it is `larger` = 1.09 times as large in a fifth of repeats."""
    rng = np.random.default_rng(0)
    t = np.sort(np.abs(rng.standard_t(199, 9_999)))
    critical = Critical(num_blocks=200, num_turnovers=200, largest=t[-500:], num_resamples=9_999)
    found = PairedRatio(
        ratio=1.1, ci95=(0.9, 1.3), p=0.3, log_error=0.1, num_requests=200, critical=critical
    )
    reach = (1.97 * 1.088 + 0.845) * 0.1
    assert found.detectable() == pytest.approx(np.exp(reach), rel=0.01)
    assert found.num_more_needed() == pytest.approx(
        200 * (reach / np.log(1.1)) ** 2 - 200, rel=0.05
    )
    enough = replace(found, ratio=found.detectable())
    assert enough.num_more_needed() in (0, 1)


def test_more_prompts_make_more_blocks_of_few() -> None:
    """Catches Student's t of four blocks taken for any number of prompts."""
    few = replace(compared(Machine(0, num_requests=16)), log_error=0.1, ratio=1.5)
    assert few.critical == Critical(num_blocks=4, num_turnovers=2.0)
    assert few.num_more_needed(0.005) == pytest.approx(240, abs=60)
    alone = few.critical.reach(0.005) * 0.1 / np.log(1.5)
    assert 16 * (alone**2 - 1) > 700


def test_levels_beyond_the_resamples_take_students_t() -> None:
    """Catches a family of so many comparisons that none could ever be told."""
    t = np.linspace(0, 3, 9_999)
    critical = Critical(num_blocks=12, num_turnovers=12, largest=t[-500:], num_resamples=9_999)
    assert critical.at(0.05) == t[-500]
    assert two_sided(np.nextafter(t[-500], 9), t, 12) <= 0.05 < two_sided(t[-500], t, 12)
    assert two_sided(4.0, t, 12) == 1e-4  # less often by resamples than by Student's t
    far = critical.at(1e-6)
    assert far == pytest.approx(10.5, rel=0.1)
    assert two_sided(far, t, 12) == pytest.approx(1e-6, rel=1e-3)


def test_tails_and_quantiles_are_those_of_tables() -> None:
    """Catches a tail taken for its complement. Tables: Abramowitz and Stegun, 26.1 and 26.10."""
    for tail, freedom, t in ((0.025, 2, 4.303), (0.005, 4, 4.604), (0.2, 1, 1.376)):
        assert student_quantile(tail, freedom) == pytest.approx(t, abs=1e-3)
        assert student_tail(t, freedom) == pytest.approx(tail, rel=1e-3)
    assert student_tail(student_quantile(1e-9, 2), 2) == pytest.approx(1e-9, rel=1e-3)
    assert normal_tail(1.96) == pytest.approx(0.025, rel=1e-3)
    assert normal_quantile(0.8) == pytest.approx(0.8416, abs=1e-4)


def test_blocks_follow_requests_that_run_together() -> None:
    ones = np.ones((1, 64))
    assert in_blocks(ones, 1).shape == (1, 8)
    assert in_blocks(np.ones((1, 32)), 4).shape == (1, 4), "eight requests: two turnovers of four"
    assert in_blocks(np.ones((1, 10)), 4).shape == (1, 5)
    assert in_blocks(np.ones((1, 6)), 1).shape == (1, 6)
    assert in_blocks(ones, 64).sum() == 64
    assert in_blocks(ones, None).shape == (1, 64)
    assert in_blocks(np.ones((1, 1001)), None).shape == (1, 167)


def test_the_order_is_that_of_the_workload_with_categories_in_proportion() -> None:
    """Catches a run over a sorted workload whose halves differ by content, taken for noise."""
    assert balanced([None] * 4) == [0, 1, 2, 3]
    assert balanced(list("abab")) == [0, 1, 2, 3]
    assert balanced(list("aaaabb")) == [0, 4, 1, 2, 5, 3]
    slow = np.repeat([1.0, 3.0], 20)
    columns = np.stack([np.ones(40), slow, np.ones(40), np.ones(40)])
    mixed = paired_ratio(columns[:, balanced(["a"] * 20 + ["b"] * 20)], (1, -1, -1, 1), at_once=4)
    as_sorted = paired_ratio(columns, (1, -1, -1, 1), at_once=4)
    assert mixed.log_error is not None
    assert as_sorted.log_error is not None
    assert mixed.log_error < as_sorted.log_error / 3


def test_holm_by_hand() -> None:
    assert holm([0.01, None, 0.04, 0.03]) == [0.03, None, 0.06, 0.06]
    assert holm([0.01, 0.5], num_tests=6) == [0.06, 1.0]
    assert holm([]) == []


def test_the_sign_test_is_exact() -> None:
    assert sign_test(0, 0) == sign_test(5, 5) == sign_test(5, 4) == 1.0
    assert sign_test(8, 0) == sign_test(0, 8) == pytest.approx(2 / 256)
    assert sign_test(1, 9) == pytest.approx(22 / 1024)
