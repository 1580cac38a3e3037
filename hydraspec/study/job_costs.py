"""Costs of the decode steps of jobs, pooled over their runs. Steps without drafts are pooled over
all jobs of the same setup and load; costs of steps with drafts are shrunk to what jobs share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log, sqrt

import numpy as np

from hydraspec.metrics.draft_lengths import PER_STEP, drafts_of
from hydraspec.metrics.paired import Array
from hydraspec.metrics.step_blocks import Block
from hydraspec.metrics.step_costs import CostRatio, fit
from hydraspec.study.jobs import Job, baseline_keys

FEWEST_ALIKE = 3  # jobs with drafts, from which the growth of costs with K is estimated
# Prior standard deviations of log(cost of a step / cost of a step without drafts): the part that
# all jobs share, at one row and per log(K + 1), and jobs of one K; a drafter's difference from this
# part; a job's own. A cost proportional to rows is 1 per log(K + 1), one that is not, 0.
ALL, ALL_GROWTH, OF_K = 0.3, 0.5, 0.03
DRAFTER, DRAFTER_GROWTH = 0.1, 0.1
OWN = 0.02


@dataclass(frozen=True, slots=True)
class JobCosts:
    """Ratios: cost of a step without drafts / cost of a job's step, for N jobs with drafts.

    Attributes:
        places: index of each of these jobs in `corrections` and `covariance`, by name; jobs
            without drafts have no place, and ratio 1.
        corrections: [N] logarithm of the ratio minus the logarithm of the ratio of measured times.
        covariance: [N, N] covariance of the logarithms of the ratios.
    """

    places: Mapping[str, int]
    corrections: Array
    covariance: Array

    def ratio(self, job: Job, reference: Job | None = None) -> CostRatio:
        """The ratio of a job; with a reference, the job's ratio / the reference's ratio."""
        signs = np.zeros(len(self.corrections))
        for sign, one in ((1.0, job), (-1.0, reference)):
            if one is not None and one.name in self.places:
                signs[self.places[one.name]] += sign
        variance = float(signs @ self.covariance @ signs)
        correction = float(signs @ self.corrections)
        return CostRatio(correction=correction, log_error=sqrt(max(0.0, variance)))


def job_costs(jobs: Sequence[Job]) -> JobCosts | None:
    """The costs of jobs; None where a run has too few steps or is of an earlier version, or where
    the machine changed more than the model of drift allows."""
    keys = baseline_keys([job.runs[0] for job in jobs])
    found: list[dict[str, Sequence[Block]]] = []
    at_once: list[int | None] = []
    runs: dict[str, range] = {}
    for job, key in zip(jobs, keys, strict=True):
        first = len(found)
        for run in job.runs:
            sides = {_baseline(key) if job.is_plain else job.name: run.blocks.get("method", ())}
            if not job.is_plain:
                sides[_baseline(key)] = run.blocks.get("baseline", ())
            if not all(sides.values()) or any("decode_steps" not in row for row in run.rows):
                return None
            found.append(sides)
            is_open, k = run.summary["request_rate"] is not None, drafts_of(run.summary)
            at_once.append(None if is_open or k == PER_STEP else run.summary["concurrency"])
        runs[job.name] = range(first, len(found))
    if (fitted := fit(found, at_once)) is None:
        return None
    drafting = [
        (job, _baseline(key)) for job, key in zip(jobs, keys, strict=True) if not job.is_plain
    ]
    own = [fitted.ratio(job.name, none, runs[job.name]) for job, none in drafting]
    if not all(one.holds for one in own):
        return None
    covariance = np.zeros((len(own), len(own)))
    for i, (a, none_a) in enumerate(drafting):
        for j, (b, none_b) in enumerate(drafting):
            covariance[i, j] = fitted.covariance_of((a.name, none_a), (b.name, none_b))
        covariance[i, i] = own[i].log_error ** 2
    corrections = np.array([one.correction for one in own])
    if len(set(keys)) == 1 and len(own) >= FEWEST_ALIKE:
        corrections, covariance = _alike([job for job, _ in drafting], corrections, covariance)
    places = {job.name: i for i, (job, _) in enumerate(drafting)}
    return JobCosts(places, corrections, covariance)


def _baseline(key: str) -> str:
    return f"without drafts: {key}"


def _alike(jobs: Sequence[Job], drifts: Array, covariance: Array) -> tuple[Array, Array]:
    """Posterior drifts [N] and covariance [N, N] under a normal prior in which costs grow with K
    alike in all jobs, up to differences of drafters and jobs. Well measured costs move little. Jobs
    whose K was chosen per step are left unchanged."""
    fixed = [i for i, job in enumerate(jobs) if isinstance(drafts_of(job.summary), int)]
    if len(fixed) < FEWEST_ALIKE:
        return drifts, covariance
    k = np.array([drafts_of(jobs[i].summary) for i in fixed], float)
    drafter = [jobs[i].label.replace(f", K={drafts_of(jobs[i].summary)}", "") for i in fixed]
    same = np.array([[one == other for other in drafter] for one in drafter], float)
    grown = np.outer(np.log(k + 1), np.log(k + 1))
    prior = ALL**2 + ALL_GROWTH**2 * grown + OF_K**2 * np.equal.outer(k, k)
    prior += same * (DRAFTER**2 + DRAFTER_GROWTH**2 * grown) + OWN**2 * np.eye(len(k))
    at = np.ix_(fixed, fixed)
    logs = np.array([_measured(jobs[i]) for i in fixed]) + drifts[fixed]
    gain = prior @ np.linalg.inv(prior + covariance[at])
    drifts, covariance = drifts.copy(), covariance.copy()
    drifts[fixed] += gain @ logs - logs
    covariance[at] = prior - gain @ prior
    return drifts, covariance


def _measured(job: Job) -> float:
    """Logarithm of measured ms per step without drafts / ms per step; 0 where not known."""
    sums = np.zeros((2, 2))
    for run in job.runs:
        for row in run.rows:
            for side, of in enumerate((row, row["baseline"])):
                if of:
                    sums[side] += of["decode_ms"], of["decode_steps"]
    (ms, steps), (none_ms, none_steps) = sums.tolist()
    return (
        log(none_ms * steps / (none_steps * ms)) if min(ms, none_ms, none_steps, steps) > 0 else 0.0
    )
