"""Jobs ranked by paired speedup, or by tokens per second where they share no baseline; what cannot
be told from the best, and the machine's drift.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from hydraspec.metrics.paired import PairedRatio
from hydraspec.metrics.statistics import ratio
from hydraspec.study.pairs import (
    ALL,
    BASELINE,
    PER_SECOND,
    Figure,
    Measure,
    RankedBy,
    RequestFigures,
    accuracy,
    corrected,
    figures,
    own_figure,
    paired,
    slowest_requests,
)
from hydraspec.study.runs import Job, by_key
from hydraspec.study.setups import baseline_keys

BEST, EQUAL = "*", "="  # marks of the best job, and of those that cannot be told from it
NUM_SLOWEST = 10  # requests that are listed of each job
DRIFT = 1.1  # between the slowest and the fastest baseline, beyond which it is said


@dataclass(slots=True, kw_only=True)
class Ranked:
    """A job with its own figures, and those against the reference.

    Attributes:
        rank: by the ranking's measure, from 1; None without one.
        throughputs, speedups, lengths: by scope: ALL or a category. Throughputs are in tokens per
            second, and there only where these rank.
        versus, slowest: against the reference, and the requests that lost most; empty for the
            reference.
        told_from_best: whether it differs from the best job beyond noise, in the ranking's measure.
    """

    job: Job
    rank: int | None
    speedups: dict[str, PairedRatio]
    lengths: dict[str, PairedRatio]
    accuracy: float | None
    baseline_tokens_per_second: float | None
    by_position: list[float | None]
    throughputs: dict[str, PairedRatio] = field(default_factory=dict)
    versus: list[Figure] = field(default_factory=list)
    slowest: list[RequestFigures] = field(default_factory=list)
    told_from_best: bool = False

    @property
    def mark(self) -> str:
        """BEST, EQUAL or nothing."""
        if self.rank is None:
            return ""
        return BEST if self.rank == 1 else "" if self.told_from_best else EQUAL

    def against(self, measure: Measure, scope: str = ALL) -> Figure | None:
        """The figure of a measure against the reference."""
        wanted = (measure, scope)
        return next((f for f in self.versus if (f.measure, f.scope) == wanted), None)

    def own(self, measure: RankedBy) -> PairedRatio:
        """Its speedup or its tokens per second, over all requests."""
        return (self.speedups if measure == "speedup" else self.throughputs)[ALL]


@dataclass(slots=True, kw_only=True)
class Ranking:
    """Jobs over the same prompts, best first, and the one that the others are compared with.

    Attributes:
        by: what ranks them: speedups, each over the job's own baseline, or tokens per second as
            measured, where baselines are of other devices, engines or settings.
    """

    ranked: list[Ranked]
    reference: Ranked
    by: RankedBy = "speedup"

    @property
    def others(self) -> list[Ranked]:
        """All but the reference."""
        return [each for each in self.ranked if each is not self.reference]

    def scopes(self) -> list[str]:
        """ALL and the categories."""
        return list(dict.fromkeys(scope for each in self.ranked for scope in each.speedups))

    def drift(self) -> tuple[Ranked, Ranked] | None:
        """The jobs in which their common baseline was slowest and fastest, if that differs by
        DRIFT; of several such baselines, of the one that differs most."""
        known = [each for each in self.ranked if each.baseline_tokens_per_second]
        groups = by_key(known, baseline_keys([each.job.runs[0] for each in known]))
        ends = [(min(group, key=_baseline), max(group, key=_baseline)) for group in groups.values()]
        worst = max(ends, key=lambda pair: _baseline(pair[1]) / _baseline(pair[0]), default=None)
        return worst if worst and _baseline(worst[1]) > DRIFT * _baseline(worst[0]) else None


def _baseline(each: Ranked) -> float:
    return each.baseline_tokens_per_second or 0.0


def fitting_measure(jobs: Sequence[Job]) -> RankedBy:
    """What tells which job is faster: "speedup" where all share a baseline, which cancels the
    machine, else "tokens_per_second"."""
    keys = baseline_keys([job.runs[0] for job in jobs], load=False)
    return "speedup" if len(set(keys)) == 1 else "tokens_per_second"


def rank(jobs: Sequence[Job], *, reference: Job | None = None, by: RankedBy = "speedup") -> Ranking:
    """Rank jobs that are alike (`runs.check_alike`) by their paired speedup or throughput.

    Args:
        reference: what the others are compared with; the best job without one. Against the best,
            which the figures chose, as many tests count as there are pairs of jobs.
    """
    made = [_ranked(job, by) for job in jobs]
    made.sort(key=lambda each: -(each.own(by).ratio or 0.0))
    for number, each in enumerate(made, start=1):
        each.rank = number if each.own(by).ratio is not None else None
    best = made[0]
    against = next((each for each in made if each.job is reference), best)
    num_pairs = len(made) * (len(made) - 1) // 2 if reference is None else None
    for i, found in _versus(made, against, num_pairs, by).items():
        made[i].versus = found
        made[i].slowest = slowest_requests(made[i].job, against.job, count=NUM_SLOWEST)
    _mark_told(made, best, against, by)
    return Ranking(ranked=made, reference=against, by=by)


def _versus(
    made: Sequence[Ranked], against: Ranked, num_pairs: int | None, by: RankedBy
) -> dict[int, list[Figure]]:
    measured = by == "tokens_per_second"
    pairs = {
        str(i): figures(each.job, against.job, with_tokens_per_second=measured)
        for i, each in enumerate(made)
        if each is not against
    }
    found = corrected(pairs, num_pairs=num_pairs)
    return {int(i): figures_of for i, figures_of in found.items()}


def _mark_told(made: Sequence[Ranked], best: Ranked, against: Ranked, by: RankedBy) -> None:
    if against is best:
        for each in made:
            speed = each.against(by)
            each.told_from_best = speed is not None and speed.says != "cannot_tell"
    elif (speed := best.against(by)) is not None and len(made) == 2:
        against.told_from_best = speed.says != "cannot_tell"


def _ranked(job: Job, by: RankedBy) -> Ranked:
    pairs = paired(job, job)
    scopes = pairs.scopes()
    measured = scopes if by == "tokens_per_second" else []
    num_tokens, milliseconds = pairs.job[:, BASELINE].sum(axis=0)
    return Ranked(
        job=job,
        rank=None,
        speedups={scope: own_figure(job, pairs, "speedup", scope) for scope in scopes},
        lengths={scope: own_figure(job, pairs, "acceptance_length", scope) for scope in scopes},
        throughputs={
            scope: own_figure(job, pairs, "tokens_per_second", scope) for scope in measured
        },
        accuracy=accuracy(pairs.job),
        baseline_tokens_per_second=ratio(PER_SECOND * num_tokens, milliseconds),
        by_position=acceptance_by_position(job),
    )


def acceptance_by_position(job: Job) -> list[float | None]:
    """Accepted at each position / drafts, over all its runs."""
    counts = [row["accepted_per_position"] for run in job.runs for row in run.rows]
    num_drafts = sum(row["num_drafts"] for run in job.runs for row in run.rows)
    return [ratio(sum(at), num_drafts) for at in zip_longest(*counts, fillvalue=0)]
