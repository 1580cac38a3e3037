"""Coverage of speedups' intervals over real repeats of two jobs, on other prompts each time.

    python tests/bench/speedup_calibration.py [repeats] [prompts]      # 200 and 8: 12 minutes idle

gemma4_mtp with K=3 against none, with K=1 against none, and one against the other. Engines are
loaded once; the truth is all repeats pooled. Prints the share of 95 % intervals that hold it, and
the share of equal jobs (K=3 in two repeats) that are told apart.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass, replace
from itertools import pairwise
from math import exp, hypot, log
from pathlib import Path

import numpy as np
from rich.console import Console

import hydraspec
from hydraspec.cli.from_python import planned_call
from hydraspec.engine.base import Engine
from hydraspec.lab.rounds import Measurement
from hydraspec.metrics.meter import Meter, Pair, cost_ratio, finished_pairs, speedup
from hydraspec.metrics.paired import SPEEDUP, PairedRatio, costed_ratio, paired_ratio
from hydraspec.metrics.sinks import Side
from hydraspec.metrics.step_costs import CostRatio, fit
from hydraspec.types import Request
from hydraspec.workloads import reading
from hydraspec.zoo.recipe.corpus import workload_lines

say = Console(soft_wrap=True, markup=False, highlight=False).print
AT_ONCE = 4
DRAFTS = (3, 1)


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


def measured(engines: dict[Side, Engine], requests: list[Request]) -> Job:
    made = Measurement(engines, requests, [], concurrency=AT_ONCE)
    made.run()
    assert made.baseline is not None
    return Job(made.method.meter, made.baseline.meter)


def against(a: Job, b: Job) -> PairedRatio:
    """The ratio of two jobs' speedups over the same requests, their baselines pooled."""
    found = fit(
        [
            {name: job.method.blocks.blocks, "none": job.baseline.blocks.blocks}
            for name, job in (("a", a), ("b", b))
        ]
    )
    timed = np.hstack([a.sums("decode_ms"), b.sums("decode_ms")]).T
    signs = (*SPEEDUP, *(-sign for sign in SPEEDUP))
    if found is None:
        return paired_ratio(timed, signs, at_once=AT_ONCE)
    ratios = found.ratio("a", "none", [0]), found.ratio("b", "none", [1])
    costs = CostRatio(drift=ratios[0].drift - ratios[1].drift, log_error=found.error("a", "b"))
    counts = np.hstack([a.sums("decode_steps"), b.sums("decode_steps")]).T
    strata = [method.category for method, _ in a.pairs]
    whole = exp(sum(s * log(t) for s, t in zip(signs, timed.sum(axis=1), strict=True)))
    return costed_ratio(counts, signs, measured=whole, costs=costs, strata=strata)


def pooled(jobs: list[Job]) -> float:
    """Logarithm of the speedup over all repeats."""
    sums = sum(job.sums("decode_ms").sum(axis=0) for job in jobs)
    return float(np.array(SPEEDUP) @ np.log(sums))


def told(name: str, found: list[PairedRatio], truth: float) -> None:
    ends = np.log([each.ci95 or (1e-9, 1e9) for each in found])
    inside = float(((ends[:, 0] <= truth) & (truth <= ends[:, 1])).mean())
    ratios = np.log([each.ratio or 1.0 for each in found])
    width = float(np.median(ends[:, 1] - ends[:, 0]))
    say(
        f"{name}: truth {exp(truth):.3f}, covered {inside:.1%} of {len(found)}, median width "
        f"{width:.1%} of the mean, standard deviation of repeats {ratios.std():.1%}"
    )


def main(repeats: int = 200, prompts: int = 8) -> None:
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
    runs: list[list[Job]] = []
    for number in range(repeats):
        part = requests[number * prompts : (number + 1) * prompts]
        part = [replace(request, index=i) for i, request in enumerate(part)]
        runs.append([measured(engines, part) for engines in both])
        if number % 20 == 19:
            say(f"{number + 1} repeats")
    own = [
        [
            speedup(job.pairs, at_once=AT_ONCE, costs=cost_ratio(job.method, job.baseline))
            for job in jobs
        ]
        for jobs in runs
    ]
    truths = [pooled([jobs[i] for jobs in runs]) for i in range(len(DRAFTS))]
    for i, drafts in enumerate(DRAFTS):
        told(f"K={drafts} against none", [each[i] for each in own], truths[i])
    versus = [against(*jobs) for jobs in runs]
    told("K=3 against K=1", versus, truths[0] - truths[1])
    alarms = [
        abs(log((a[0].ratio or 1.0) / (b[0].ratio or 1.0)))
        > 1.96 * hypot(a[0].log_error or 0.0, b[0].log_error or 0.0)
        for a, b in pairwise(own)
    ]
    say(f"equal jobs told apart, K=3 in repeats that follow each other: {np.mean(alarms):.1%}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
