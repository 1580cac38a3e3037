"""Costs of decode steps: blocks, and ratios fitted to simulated machines whose speed drifts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from records import completion, part, request, step

from hydraspec.metrics.meter import (
    Meter,
    cost_ratio,
    finished_pairs,
    measured_speedup,
    speedup,
)
from hydraspec.metrics.paired import SPEEDUP, PairedRatio, costed_ratio
from hydraspec.metrics.step_blocks import (
    MOST_BLOCKS,
    STEPS_OF_BLOCK,
    Block,
    StepBlocks,
    step_costs_file,
)
from hydraspec.metrics.step_costs import LEAST_BLOCKS, CostRatio, StepCosts, fit

NUM_REQUESTS = 32
NUM_REPEATS = 200
COVERED = (0.90, 0.98)  # of NUM_REPEATS intervals of 95 %
MOST_ALARMS = 0.08  # of intervals of 95 %: two standard deviations above 5 %
COSTS = {"method": 15.0, "baseline": 10.0}  # ms of a step of four requests
# Standard deviations: of a step, of drift within a run, of whole runs; seconds that drift lasts.
MACHINES = {
    "idle": (0.04, 0.01, 0.0, 4.0),
    "shared": (0.10, 0.10, 0.2, 1.0),
    "slow drift": (0.05, 0.15, 0.3, 20.0),
}


class Machine:
    """Draws runs of both sides in turn, twice: steps with noise, drift and spikes."""

    def __init__(self, seed: int, name: str) -> None:
        self.rng = np.random.default_rng(seed)
        self.noise, self.drift, self.level, self.lasting_s = MACHINES[name]
        self.now = self.state = 0.0

    def step_ms(self, cost: float) -> float:
        """A step's time; the clock goes on."""
        kept = np.exp(-cost / 1000 / self.lasting_s)
        fresh = np.sqrt(1 - kept**2) * self.drift * self.rng.standard_normal()
        self.state = kept * self.state + fresh
        took = cost * np.exp(self.state + self.noise * self.rng.standard_normal())
        if self.rng.random() < cost / 2000:  # every two seconds another process has the core
            took += 20.0
        self.now += took / 1000
        return float(took)

    def run(self, *, spread: float = 1.0) -> tuple[Meter, Meter]:
        """Both sides' counts of a run: 32 requests of 48 tokens, four at once; requests accept
        2 drafts of 3 in a step on average, give or take `spread`."""
        self.state = self.drift * self.rng.standard_normal()
        whole = np.exp(self.level * self.rng.standard_normal())
        means = self.rng.uniform(2 - spread, 2 + spread, NUM_REQUESTS)
        meters = [Meter(request(i) for i in range(NUM_REQUESTS)) for _ in COSTS]
        for half in np.split(np.arange(NUM_REQUESTS), 2):
            for meter, (side, cost) in zip(meters, COSTS.items(), strict=True):
                meter.blocks = StepBlocks(lambda: self.now) if not half[0] else meter.blocks
                meter.begin_run()
                for together in np.split(half, len(half) // 4):
                    left = dict.fromkeys(map(int, together), 48)
                    while left:
                        parts = []
                        for i, tokens in left.items():
                            drawn = self.rng.binomial(3, means[i] / 3) if spread else 2
                            more = drawn if side == "method" else 0
                            parts.append(part(i, emitted=min(tokens, 1 + more)))
                        size = cost * whole * (0.5 + len(parts) / 8)
                        meter.add_step(step(*parts, ms=self.step_ms(size)))
                        for one in parts:
                            left[one.index] -= len(one.output_token_ids)
                        left = {i: tokens for i, tokens in left.items() if tokens}
                for i in half:
                    meter.add_completion(completion(int(i), output_token_ids=[1] * 49))
        return meters[0], meters[1]


def estimated(method: Meter, baseline: Meter) -> PairedRatio:
    costs = cost_ratio(method, baseline, at_once=4)
    assert costs is not None
    assert costs.holds
    return speedup(finished_pairs(method, baseline), at_once=4, costs=costs)


def covered(found: Sequence[PairedRatio], truth: float) -> float:
    """The share of intervals that hold a logarithm."""
    ends = np.log([each.ci95 or (1.0, 1.0) for each in found])
    return float(((ends[:, 0] <= truth) & (truth <= ends[:, 1])).mean())


@pytest.mark.slow
@pytest.mark.parametrize("name", MACHINES)
def test_intervals_of_95_percent_cover_the_truth(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where drift is large they do not without the costs' error, which is a planted fault."""
    runs = [Machine(seed, name).run() for seed in range(NUM_REPEATS)]
    found = [estimated(*sides) for sides in runs]
    truth = float(np.mean(np.log([each.ratio or 0.0 for each in found])))
    assert COVERED[0] <= covered(found, truth) <= COVERED[1]
    if name == "shared":
        whole = StepCosts.ratio
        monkeypatch.setattr(StepCosts, "ratio", lambda *of: replace(whole(*of), log_error=0.0))
        assert covered([estimated(*sides) for sides in runs], truth) < COVERED[0]


def equal_jobs(seed: int, name: str) -> tuple[float, float]:
    """Logarithm of the ratio of two equal jobs' speedups and its error, baselines pooled."""
    machine = Machine(seed, name)
    runs = [machine.run(spread=0.0) for _ in range(2)]
    costs = fit(
        [
            {job: method.blocks.blocks, "none": none.blocks.blocks}
            for job, (method, none) in zip("ab", runs, strict=True)
        ]
    )
    assert costs is not None
    logs = [
        np.log(measured_speedup(finished_pairs(*sides)) or 0.0)
        + costs.ratio(job, "none", [number]).correction
        for number, (job, sides) in enumerate(zip("ab", runs, strict=True))
    ]
    return logs[0] - logs[1], costs.error("a", "b")


@pytest.mark.slow
@pytest.mark.parametrize("name", MACHINES)
def test_false_alarms_of_two_equal_jobs(name: str) -> None:
    found = np.array([equal_jobs(seed, name) for seed in range(NUM_REPEATS)])
    assert (np.abs(found[:, 0]) > 1.96 * found[:, 1]).mean() <= MOST_ALARMS
    assert (np.abs(found[:, 0]) > 0.5 * found[:, 1]).mean() > 0.4, "errors are no excuse"


def test_the_interval_of_an_idle_machine_is_narrow_and_drift_is_taken_out() -> None:
    """Catches the machine's change between both sides in the speedup."""
    method, baseline = Machine(0, "idle").run(spread=0.0)
    found = estimated(method, baseline)
    assert found.ci95 is not None
    assert found.ci95[1] / found.ci95[0] < 1.11
    assert found.ratio == pytest.approx(2.0, rel=0.04)
    for block in baseline.blocks.blocks[len(baseline.blocks.blocks) // 2 :]:
        block.sizes = {size: (count, 2 * ms) for size, (count, ms) in block.sizes.items()}
    slowed = cost_ratio(method, baseline)
    assert slowed is not None
    assert slowed.log_error > 0.2, "one round of one side alone was slow: nobody knows why"


def test_a_common_baseline_is_pooled_and_a_run_of_much_noise_spoils_no_other() -> None:
    """Catches one noise for all runs: the quiet one's error grew from 1.5 to 20 %."""
    quiet, loud = Machine(1, "idle").run(), Machine(2, "shared").run()
    for side in loud:
        for number, block in enumerate(side.blocks.blocks):
            factor = 1 + number % 3
            block.sizes = {size: (n, factor * ms) for size, (n, ms) in block.sizes.items()}
    sides = [{"none": baseline.blocks.blocks} for _, baseline in (quiet, loud)]
    both = fit(
        [{"a": quiet[0].blocks.blocks, **sides[0]}, {"b": loud[0].blocks.blocks, **sides[1]}]
    )
    alone = cost_ratio(*quiet)
    assert both is not None
    assert alone is not None
    assert both.error("a", "none") <= 1.1 * alone.log_error
    assert both.error("b", "none") > 2 * alone.log_error


def test_blocks_are_joined_and_begin_with_each_round() -> None:
    now = iter(range(1000))
    blocks = StepBlocks(lambda: float(next(now)))
    for count in (STEPS_OF_BLOCK * MOST_BLOCKS + 1, 3):
        blocks.begin_run()
        for _ in range(count):
            blocks.add(step(part(0), part(1, 1)), 2.0)
        blocks.add(step(part(0), part(1, prefill_rows=5)), 2.0)
    assert [block.num_steps for block in blocks.blocks] == [8] * 8 + [1, 3]
    assert blocks.blocks[0].sizes == {(2, 3): (8, 16.0)}
    file = json.loads(json.dumps(step_costs_file({"method": blocks})))
    assert [Block.of_record(record) for record in file["method"]] == blocks.blocks


def test_few_steps_have_no_costs_and_equal_steps_no_error() -> None:
    meters = [Meter([request(i) for i in range(8)]) for _ in range(2)]
    assert cost_ratio(*meters) is None
    for meter, ms in zip(meters, (3.0, 2.0), strict=True):
        for number in range(STEPS_OF_BLOCK * LEAST_BLOCKS):
            if number <= STEPS_OF_BLOCK * (LEAST_BLOCKS - 1):
                assert cost_ratio(*meters) is None
            meter.add_step(step(*(part(i, emitted=3) for i in range(8)), ms=ms))
        for i in range(8):
            meter.add_completion(completion(i))
    found = estimated(*meters)
    assert (found.ratio, found.p) == (pytest.approx(2 / 3), 1e-4)
    assert found.ci95 == pytest.approx((2 / 3, 2 / 3))


def timed(meter: Meter, costs: dict[int, float], *, full: int, ends: int) -> None:
    """Two rounds of `full` steps of 4 requests, each with one mixed step, then `ends` steps of one
    request; `costs` are milliseconds by number of requests."""
    for _ in range(2):
        meter.begin_run()
        for count, size in ((full, 4), (ends, 1)):
            for _ in range(count):
                parts = [part(i, emitted=1) for i in range(size)]
                meter.add_step(step(*parts, ms=costs[size]))
            if size == 4:
                meter.add_step(step(part(0), part(1, prefill_rows=7), ms=80.0))
    for i in range(4):
        meter.add_completion(completion(i))


def test_steps_of_the_last_few_requests_do_not_move_a_speedup() -> None:
    """Catches the end of a round in the speedup: the method had 10 of 30 steps there, and a long
    run next to none."""
    meters = [Meter(request(i) for i in range(4)) for _ in range(2)]
    timed(meters[0], {4: 8.0, 1: 6.0}, full=20, ends=10)
    timed(meters[1], {4: 6.0, 1: 4.0}, full=60, ends=4)
    full = cost_ratio(*meters, at_once=4)
    assert full is not None
    # Of mixed steps the decoding request has 1 of 8 rows.
    taken = [2 * ms + 2 * 10.0 for ms in (20 * 8.0 + 10 * 6.0, 60 * 6.0 + 4 * 4.0)]
    whole = [2 * ms + 2 * 10.0 for ms in ((20 + 2.5) * 8.0, (60 + 1) * 6.0)]
    wanted = np.log(taken[0] / whole[0]) - np.log(taken[1] / whole[1])
    assert full.correction == pytest.approx(wanted)
    every = cost_ratio(*meters)
    assert every is not None
    assert every.correction == pytest.approx(0.0)
    assert cost_ratio(*meters, at_once=3) == every, "no step has three requests"


def test_a_few_interrupted_steps_do_not_move_a_speedup() -> None:
    """Catches means that one step of 20 times the cost moves by a tenth."""
    meters = [Meter(request(i) for i in range(4)) for _ in range(2)]
    for meter, ms in zip(meters, (8.0, 6.0), strict=True):
        timed(meter, {4: ms, 1: ms}, full=60, ends=0)
        for number, block in enumerate(meter.blocks.blocks):
            block.sizes = {
                s: (n, of * (1 + number % 3 / 100)) for s, (n, of) in block.sizes.items()
            }
    quiet = cost_ratio(*meters)
    ((size, (count, ms)),) = meters[0].blocks.blocks[5].sizes.items()
    meters[0].blocks.blocks[5].sizes = {size: (count, ms + 160.0)}
    loud = cost_ratio(*meters)
    assert quiet is not None
    assert loud is not None
    taken = sum(ms for block in meters[0].blocks.blocks for _, ms in block.sizes.values())
    interrupted = np.log(taken / (taken - 160.0))
    assert loud.correction - quiet.correction == pytest.approx(interrupted, rel=0.1)
    assert loud.log_error < 1.2 * quiet.log_error


def test_drift_that_no_model_allows_leaves_the_timings() -> None:
    method, baseline = Machine(3, "idle").run()
    pairs = finished_pairs(method, baseline)
    costs = CostRatio(correction=0.2, log_error=0.01, holds=False)
    assert speedup(pairs, at_once=4, costs=costs) == speedup(pairs, at_once=4)
    moved = speedup(pairs, at_once=4, costs=replace(costs, holds=True))
    assert moved.ratio == pytest.approx((measured_speedup(pairs) or 0.0) * np.exp(0.2))


def test_a_mix_of_categories_is_no_accident() -> None:
    """Catches requests drawn across categories: the mix is the workload's."""
    tokens = np.repeat([10.0, 40.0], 8) + np.tile([-0.5, 0.5], 8)
    columns = np.stack([tokens, np.ones(16), np.full(16, 10.0), np.full(16, 10.0)])
    costs = CostRatio(correction=0.0, log_error=0.0)
    wide, narrow = (
        costed_ratio(columns, SPEEDUP, measured=25.0, costs=costs, strata=strata)
        for strata in ([None] * 16, ["a"] * 8 + ["b"] * 8)
    )
    assert wide.log_error is not None
    assert narrow.log_error is not None
    assert narrow.log_error < wide.log_error / 5
