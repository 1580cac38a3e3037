"""What decoding beside long prompts may cost: loads in the time of a model of steps, of which the
figures of E4B give eight prompts of 32,000 tokens the time that was measured."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from step_times import Limits, Offered, Served, StepTimes, parts_ms, serve

# One H200: 16,384 short prompt rows in 122 ms, 256,000 of long prompts in 2.66 s; a decode step
# 3.2 ms at batch 1, 5.7 at batch 8 after 32,000 tokens; 512 mixed rows 7.1 ms.
E4B = StepTimes(
    prompt_row=7.4e-3,
    prompt_key=1.8e-7,
    prompt_step=1.0,
    decode_step=3.15,
    decode_row=0.025,
    decode_key=9.2e-6,
    mixed_step=3.3,
    mixed_key=1.56e-4,
    launch_bound_rows=915,
)
# 10,861 prompt tokens a second; decode steps of 15.1 to 19.5 ms. The times of keys are assumed.
LARGE = StepTimes(
    prompt_row=0.091,
    prompt_key=7e-7,
    prompt_step=3.0,
    decode_step=15.0,
    decode_row=0.14,
    decode_key=2e-5,
    mixed_step=16.0,
    mixed_key=2e-4,
    launch_bound_rows=207,
)
EIGHT = [Offered(32000, 128)] * 8
UNBOUNDED = Limits(max_mixing_cost=None)
BOUNDED = Limits(max_mixing_cost=0.08)
REMAINDER = 8  # mixed steps that what is left of a long reading may cost above the bound


def cost(load: list[Offered], times: StepTimes, limits: Limits) -> tuple[float, Served]:
    """The time of a load over that of its parts alone, and how it was served."""
    served = serve(load, times, limits)
    return served.busy_ms / sum(parts_ms(load, times, limits)), served


def test_the_model_has_the_times_that_were_measured() -> None:
    read, decode = parts_ms(EIGHT, E4B, UNBOUNDED)
    assert read == pytest.approx(2660, rel=0.01)
    assert decode == pytest.approx(127 * 5.71, rel=0.02)
    ratio, served = cost(EIGHT, E4B, UNBOUNDED)
    assert served.busy_ms == pytest.approx(4180, rel=0.01)
    assert ratio == pytest.approx(1.23, abs=0.01)


def test_small_mixed_steps_were_many_and_shortened_nothing() -> None:
    """115 steps of at most 2,047 prompt rows add 8.3 ms each; after the last prompt all 127 steps
    of its request are left."""
    served = serve(EIGHT, E4B, UNBOUNDED)
    assert served.num_mixed == 115
    assert sum(not prompts for prompts, _ in served.steps) == 127


def test_eight_long_prompts_stay_within_the_bound() -> None:
    ratio, served = cost(EIGHT, E4B, BOUNDED)
    assert ratio < 1.06
    assert served.num_mixed < 30
    assert 100 < served.p99_ms < 140, "where it was 34 ms without a bound"


@pytest.mark.parametrize("times", [E4B, LARGE], ids=["E4B", "31B"])
def test_a_larger_bound_costs_more_and_evens_out_times_between_tokens(times: StepTimes) -> None:
    found = [
        cost(EIGHT, times, Limits(max_mixing_cost=bound)) for bound in (0.05, 0.08, 0.15, 0.3, None)
    ]
    ratios, p99 = [ratio for ratio, _ in found], [served.p99_ms for _, served in found]
    assert ratios == sorted(ratios)
    assert p99 == sorted(p99, reverse=True)


def test_random_loads_stay_within_the_bound() -> None:
    """Lengths, arrivals, slots and budgets at random. Without the bound many loads leave it; with
    it none does by more than the few steps that read the rest of the prompts."""
    rng, over = random.Random(1), Counter[float | None]()
    for _ in range(60):
        load, times, limits = random_load(rng)
        most = 1.08 * sum(parts_ms(load, times, limits))
        for bound in (0.08, None):
            took = serve(load, times, replace(limits, max_mixing_cost=bound)).busy_ms
            over[bound] += took > most
            if bound is not None:
                longest = max(each.prompt + each.output for each in load)
                spare = REMAINDER * (times.mixed_step + longest * times.mixed_key)
                assert took <= most + spare, (load, limits)
    assert over[0.08] <= 1
    assert over[None] >= 5


def random_load(rng: random.Random) -> tuple[list[Offered], StepTimes, Limits]:
    longest, output = rng.choice([500, 2000, 8000, 32000]), rng.choice([16, 64, 128, 300])
    shortest = rng.choice([longest, longest // 8])
    fewest, until = rng.choice([output, output // 4]), rng.choice([0, 100, 1000])
    load = [
        Offered(rng.randint(shortest, longest), rng.randint(fewest, output), until * rng.random())
        for _ in range(rng.choice([2, 3, 5, 8, 16, 32]))
    ]
    limits = replace(BOUNDED, slots=rng.choice([8, 32]), max_rows=rng.choice([8192, 16384]))
    return load, rng.choice([E4B, LARGE]), limits


def test_steady_loads_of_short_prompts_are_served_as_before() -> None:
    """Few rows are unread at a time: their steps bring tokens on, which have to be decoded."""
    rng = random.Random(3)
    load = [Offered(rng.randint(16, 700), rng.randint(40, 200)) for _ in range(128)]
    limits = replace(BOUNDED, max_rows=8192)
    without = replace(limits, max_mixing_cost=None)
    assert serve(load, E4B, limits).steps == serve(load, E4B, without).steps
