"""Jobs ranked by paired speedup, what cannot be told from the best, and the machine's drift."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from hydraspec.comparison.pairs import (
    ALL,
    Figure,
    Measure,
    RequestFigures,
    accuracy,
    corrected,
    figures,
    own_figure,
    paired,
    slowest_requests,
)
from hydraspec.comparison.runs import Job
from hydraspec.metrics.paired import PairedRatio
from hydraspec.metrics.statistics import ratio

NUM_SLOWEST = 10  # requests that are listed of each job
DRIFT = 1.1  # between the slowest and the fastest baseline, beyond which it is said


@dataclass(slots=True, kw_only=True)
class Ranked:
    """A job with its own figures, and those against the reference.

    Attributes:
        rank: by speedup, from 1; None without one.
        speedups, lengths: by scope: ALL or a category.
        versus, slowest: against the reference, and the requests that lost most; empty for the
            reference.
        told_from_best: whether its speedup differs from the best job's beyond noise.
    """

    job: Job
    rank: int | None
    speedups: dict[str, PairedRatio]
    lengths: dict[str, PairedRatio]
    accuracy: float | None
    baseline_tokens_per_second: float | None
    by_position: list[float | None]
    versus: list[Figure] = field(default_factory=list)
    slowest: list[RequestFigures] = field(default_factory=list)
    told_from_best: bool = False

    def against(self, measure: Measure, scope: str = ALL) -> Figure | None:
        """The figure of a measure against the reference."""
        wanted = (measure, scope)
        return next((f for f in self.versus if (f.measure, f.scope) == wanted), None)


@dataclass(slots=True, kw_only=True)
class Ranking:
    """Jobs over the same prompts, best first, and the one that the others are compared with."""

    ranked: list[Ranked]
    reference: Ranked

    @property
    def others(self) -> list[Ranked]:
        """All but the reference."""
        return [each for each in self.ranked if each is not self.reference]

    def scopes(self) -> list[str]:
        """ALL and the categories."""
        return list(dict.fromkeys(scope for each in self.ranked for scope in each.speedups))

    def drift(self) -> tuple[Ranked, Ranked] | None:
        """The jobs with the slowest and the fastest baseline, if those differ by DRIFT."""
        known = [each for each in self.ranked if each.baseline_tokens_per_second]
        if len(known) < 2:
            return None
        slow, *_, fast = sorted(known, key=lambda each: each.baseline_tokens_per_second or 0.0)
        share = ratio(fast.baseline_tokens_per_second or 0, slow.baseline_tokens_per_second or 0)
        return (slow, fast) if share and share > DRIFT else None


def rank(jobs: Sequence[Job], *, reference: Job | None = None) -> Ranking:
    """Rank jobs that are alike (`runs.check_alike`) by their paired speedup.

    Args:
        reference: what the others are compared with; the best job without one. Against the best,
            which the figures chose, as many tests count as there are pairs of jobs.
    """
    made = [_ranked(job) for job in jobs]
    made.sort(key=lambda each: -(each.speedups[ALL].ratio or 0.0))
    for number, each in enumerate(made, start=1):
        each.rank = number if each.speedups[ALL].ratio is not None else None
    best = made[0]
    against = next((each for each in made if each.job is reference), best)
    num_pairs = len(made) * (len(made) - 1) // 2 if reference is None else None
    for i, found in _versus(made, against, num_pairs).items():
        made[i].versus = found
        made[i].slowest = slowest_requests(made[i].job, against.job, count=NUM_SLOWEST)
    _mark_told(made, best, against)
    return Ranking(ranked=made, reference=against)


def _versus(
    made: Sequence[Ranked], against: Ranked, num_pairs: int | None
) -> dict[int, list[Figure]]:
    pairs = {
        str(i): figures(each.job, against.job) for i, each in enumerate(made) if each is not against
    }
    found = corrected(pairs, num_pairs=num_pairs)
    return {int(i): figures_of for i, figures_of in found.items()}


def _mark_told(made: Sequence[Ranked], best: Ranked, against: Ranked) -> None:
    if against is best:
        for each in made:
            speed = each.against("speedup")
            each.told_from_best = speed is not None and speed.says != "cannot_tell"
    elif (speed := best.against("speedup")) is not None and len(made) == 2:
        against.told_from_best = speed.says != "cannot_tell"


def _ranked(job: Job) -> Ranked:
    pairs = paired(job, job)
    scopes = pairs.scopes()
    baselines = pairs.job[:, 2:4].sum(axis=0)
    return Ranked(
        job=job,
        rank=None,
        speedups={scope: own_figure(job, pairs, "speedup", scope) for scope in scopes},
        lengths={scope: own_figure(job, pairs, "acceptance_length", scope) for scope in scopes},
        accuracy=accuracy(pairs.job),
        baseline_tokens_per_second=ratio(1000 * baselines[0], baselines[1]),
        by_position=acceptance_by_position(job),
    )


def acceptance_by_position(job: Job) -> list[float | None]:
    """Accepted at each position / drafts, over all its runs."""
    counts = [row["accepted_per_position"] for run in job.runs for row in run.rows]
    num_drafts = sum(row["num_drafts"] for run in job.runs for row in run.rows)
    return [ratio(sum(at), num_drafts) for at in zip_longest(*counts, fillvalue=0)]
