"""Coverage of speedups' intervals over real repeats of jobs, on other prompts each time.

    python tests/bench/speedup_calibration.py [repeats] [prompts]      # 200 and 16: 25 minutes idle

gemma4_mtp with K=3 against none, with K=1 against none, K=3 against K=1, and K=3 against itself in
a second run over the same prompts. Engines are loaded once. The truth is the plain throughput of
long runs over a quarter of all prompts, a part after each tenth of the repeats. Prints the share of
95 % intervals that hold it, of equal jobs told apart, and of jobs told apart where one takes 5 %
more time, each with its own 95 % interval.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from math import exp, log
from pathlib import Path

import numpy as np
from rich.console import Console
from scipy.stats import binomtest

import hydraspec
from hydraspec.cli.from_python import planned_call
from hydraspec.engine.base import Engine
from hydraspec.lab.rounds import Measurement
from hydraspec.metrics.meter import Meter, Pair, cost_ratio, finished_pairs, speedup
from hydraspec.metrics.paired import LEVEL, SPEEDUP, PairedRatio, costed_ratio, paired_ratio
from hydraspec.metrics.sinks import Side
from hydraspec.metrics.step_costs import CostRatio, fit
from hydraspec.types import Request
from hydraspec.workloads import reading
from hydraspec.zoo.recipe.corpus import workload_lines

say = Console(soft_wrap=True, markup=False, highlight=False).print
AT_ONCE = 4
DRAFTS = (3, 1)
AGAIN = 2  # place of the second run of the first of DRAFTS
PARTS = 10  # of the repeats, each followed by long runs
SLOWER = 1.05


@dataclass
class Job:
    """Both sides of one measured job."""

    method: Meter
    baseline: Meter

    @property
    def pairs(self) -> list[Pair]:
        return finished_pairs(self.method, self.baseline)

    def sums(self, steps: str) -> np.ndarray:
        """[R, 4] tokens of both sides' requests, and their time or their number of steps."""
        keys = ("decode_tokens", steps)
        return np.array([[getattr(c, key) for c in pair for key in keys] for pair in self.pairs])

    def slowed(self, factor: float) -> Job:
        """The job with `factor` times the time in every step with drafts."""
        method = deepcopy(self.method)
        for counters in method.completed:
            counters.decode_ms *= factor
        for block in method.blocks.blocks:
            block.sizes = {size: (n, factor * ms) for size, (n, ms) in block.sizes.items()}
            block.mixed_ms *= factor
        return Job(method, self.baseline)


@dataclass
class Repeats:
    """All jobs of each repeat, and tokens and milliseconds of long runs: none, then DRAFTS."""

    jobs: list[list[Job]] = field(default_factory=list)
    long: np.ndarray = field(default_factory=lambda: np.zeros((1 + len(DRAFTS), 2)))

    def truth(self, place: int) -> float:
        """Logarithm of the speedup of one of DRAFTS in the long runs."""
        rates = np.log(self.long[:, 0] / self.long[:, 1])
        return float(rates[1 + place] - rates[0])


def measured(engines: dict[Side, Engine], requests: Sequence[Request]) -> Measurement:
    requests = [replace(request, index=i) for i, request in enumerate(requests)]
    made = Measurement(engines, requests, [], concurrency=AT_ONCE)
    made.run()
    return made


def job(engines: dict[Side, Engine], requests: Sequence[Request]) -> Job:
    made = measured(engines, requests)
    assert made.baseline is not None
    return Job(made.method.meter, made.baseline.meter)


def against(a: Job, b: Job) -> PairedRatio:
    """The ratio of two jobs' speedups over the same requests, their baselines pooled."""
    found = fit(
        [
            {name: job.method.blocks.blocks, "none": job.baseline.blocks.blocks}
            for name, job in (("a", a), ("b", b))
        ],
        [AT_ONCE, AT_ONCE],
    )
    timed = np.hstack([a.sums("decode_ms"), b.sums("decode_ms")]).T
    signs = (*SPEEDUP, *(-sign for sign in SPEEDUP))
    ratios = [] if found is None else [found.ratio("a", "none", [0]), found.ratio("b", "none", [1])]
    if found is None or not all(ratio.holds for ratio in ratios):
        return paired_ratio(timed, signs, at_once=AT_ONCE)
    costs = CostRatio(
        correction=ratios[0].correction - ratios[1].correction, log_error=found.error("a", "b")
    )
    counts = np.hstack([a.sums("decode_steps"), b.sums("decode_steps")]).T
    strata = [method.category for method, _ in a.pairs]
    whole = exp(sum(s * log(t) for s, t in zip(signs, timed.sum(axis=1), strict=True)))
    return costed_ratio(counts, signs, measured=whole, costs=costs, strata=strata)


def share(hits: Sequence[bool]) -> str:
    """A share in words, with its binomial interval (Clopper and Pearson)."""
    ends = binomtest(sum(hits), len(hits)).proportion_ci()
    return f"{np.mean(hits):.1%} ({ends.low:.1%} to {ends.high:.1%}) of {len(hits)}"


def told(name: str, found: list[PairedRatio], truth: float) -> None:
    ends = np.log([each.ci95 or (1e-9, 1e9) for each in found])
    inside = [bool(low <= truth <= high) for low, high in ends]
    ratios = np.log([each.ratio or 1.0 for each in found])
    width = float(np.median(ends[:, 1] - ends[:, 0]))
    say(
        f"{name}: truth {exp(truth):.3f}, covered {share(inside)}, median width {width:.1%} of the "
        f"mean, bias {ratios.mean() - truth:+.1%}, standard deviation {ratios.std():.1%}"
    )


def measure(repeats: int, prompts: int) -> Repeats:
    """Measure all jobs in turn, and a long run of a quarter of the prompts after each part."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "prompts.jsonl"
        count = repeats * prompts // 4 + 1
        file.write_text("\n".join(workload_lines(per_category=count)) + "\n", encoding="utf-8")
        typed = ["workload=jsonl", f"workload.path={file}"]
        workload = reading.read(planned_call("run", typed).jobs[0].config)
    assert workload is not None
    requests = workload.requests
    both: list[dict[Side, Engine]] = []
    for drafts in DRAFTS:
        typed = ["method=gemma4_mtp", f"method.num_speculative_tokens={drafts}", "tracker=none"]
        engine = hydraspec.build_engine(typed)
        both.append({Side.method: engine, Side.baseline: engine.baseline()})
    both[0][Side.method].tokenize(requests)
    for engines in both:
        Measurement(engines, requests[:prompts], [], concurrency=AT_ONCE).warm_up()
    long = [both[0][Side.baseline], *(engines[Side.method] for engines in both)]
    found = Repeats()
    for numbers in np.array_split(np.arange(repeats), PARTS):
        for number in numbers:
            part = requests[number * prompts : (number + 1) * prompts]
            found.jobs.append([job(engines, part) for engines in (*both, both[0])])
        first, last = numbers[0] * prompts, (numbers[-1] + 1) * prompts
        for place, engine in enumerate(long):
            meter = measured(
                {Side.method: engine}, requests[first : (3 * first + last) // 4]
            ).method
            done = meter.meter.completed
            found.long[place] += [
                sum(c.decode_tokens for c in done),
                sum(c.decode_ms for c in done),
            ]
        say(f"{len(found.jobs)} repeats")
    return found


def report(found: Repeats) -> None:
    """Print coverage, false alarms and power."""
    for place, drafts in enumerate(DRAFTS):
        own = [
            speedup(
                jobs[place].pairs,
                at_once=AT_ONCE,
                costs=cost_ratio(jobs[place].method, jobs[place].baseline, at_once=AT_ONCE),
            )
            for jobs in found.jobs
        ]
        told(f"K={drafts} against none", own, found.truth(place))
    versus = [against(jobs[0], jobs[1]) for jobs in found.jobs]
    told("K=3 against K=1", versus, found.truth(0) - found.truth(1))
    told("K=3 against itself", [against(jobs[0], jobs[AGAIN]) for jobs in found.jobs], 0.0)
    for factor, words in ((1.0, "equal jobs"), (SLOWER, f"jobs {SLOWER - 1:.0%} apart")):
        p = [against(jobs[0].slowed(factor), jobs[AGAIN]).p or 0.0 for jobs in found.jobs]
        say(f"{words} told apart: {share([each <= LEVEL for each in p])}")


def main(repeats: int = 200, prompts: int = 16) -> None:
    report(measure(repeats, prompts))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
