"""Costs of the decode steps of jobs, pooled over their runs; those without drafts over all jobs of
the same setup and load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import hypot, sqrt

from hydraspec.metrics.step_costs import Block, CostRatio, StepCosts, fit
from hydraspec.study.jobs import Job, baseline_keys

NONE = CostRatio(drift=0.0, log_error=0.0)  # a job without drafts is its own baseline


@dataclass(frozen=True, slots=True)
class JobCosts:
    """Costs of several jobs.

    Attributes:
        runs: of each job, by name, their numbers in `costs`.
        baselines: of each job, by name, the name of the steps without drafts.
    """

    costs: StepCosts
    runs: Mapping[str, Sequence[int]]
    baselines: Mapping[str, str]

    def ratio(self, job: Job, reference: Job | None = None) -> CostRatio:
        """The cost of a step without drafts over that of the job's; with a reference, over the same
        of the reference."""
        baseline = self.baselines[job.name]
        own = NONE
        if not job.is_plain:
            own = self.costs.ratio(job.name, baseline, self.runs[job.name])
        if reference is None:
            return own
        theirs = self.ratio(reference)
        if self.baselines[reference.name] != baseline:
            error = hypot(own.log_error, theirs.log_error)
        else:
            names = [baseline if one.is_plain else one.name for one in (job, reference)]
            beyond = [  # of runs whose halves differ, which the fit does not know
                ratio.log_error**2 - self.costs.error(name, baseline) ** 2
                for ratio, name in zip((own, theirs), names, strict=True)
            ]
            error = sqrt(self.costs.error(*names) ** 2 + sum(beyond))
        return CostRatio(drift=own.drift - theirs.drift, log_error=error)


def job_costs(jobs: Sequence[Job]) -> JobCosts | None:
    """The costs of jobs; None where a run has too few steps, or is of an earlier version, or where
    the machine changed otherwise than drift does."""
    named = dict(
        zip([job.name for job in jobs], baseline_keys([job.runs[0] for job in jobs]), strict=True)
    )
    found: list[dict[str, Sequence[Block]]] = []
    runs: dict[str, range] = {}
    for job in jobs:
        baseline = f"without drafts: {named[job.name]}"
        first = len(found)
        for run in job.runs:
            sides = {(baseline if job.is_plain else job.name): run.blocks.get("method", ())}
            if not job.is_plain:
                sides[baseline] = run.blocks.get("baseline", ())
            if not all(sides.values()) or any("decode_steps" not in row for row in run.rows):
                return None
            found.append(sides)
        runs[job.name], named[job.name] = range(first, len(found)), baseline
    fitted = fit(found)
    if fitted is None:
        return None
    made = JobCosts(fitted, runs, named)
    return made if all(made.ratio(job).holds for job in jobs) else None
