"""Figures of jobs, and jobs ranked by paired speedup, or by tokens per second where they share no
baseline; jobs that are not significantly worse than the best, and drift of the machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from statistics import fmean
from typing import TYPE_CHECKING

from hydraspec.metrics.assessment import as_interval
from hydraspec.metrics.paired import LEVEL, PairedRatio
from hydraspec.metrics.statistics import ratio
from hydraspec.metrics.summary import AcceptanceLength, Baseline, Interval, Length, Summary
from hydraspec.study.job_costs import JobCosts, job_costs
from hydraspec.study.jobs import Job, baseline_keys, by_key
from hydraspec.study.pairs import (
    ALL,
    BASELINE,
    PER_SECOND,
    Figure,
    Measure,
    RankedBy,
    RequestFigures,
    Says,
    accuracy,
    corrected,
    figures,
    own_figure,
    paired,
    slowest_requests,
)

if TYPE_CHECKING:
    from hydraspec.study.decision import Decision

BEST, EQUAL = "*", "="  # marks: the best job, and jobs that cannot be told from it
NUM_SLOWEST = 10  # requests listed for each job
MOST_MORE = 1000  # times the prompts of a comparison: more prompts than this are not asked for
DRIFT = 1.1  # fastest / slowest baseline, beyond which drift is reported
ByScope = Mapping[str, Interval | None]  # ALL or a category → a figure


@dataclass(slots=True, frozen=True, kw_only=True)
class Speeds:
    """Decode throughput of all users together, and of one user: 1000 / ms per output token."""

    tokens_per_second: float | None
    tokens_per_second_per_user: float | None


@dataclass(slots=True, kw_only=True)
class JobFigures:
    """The figures of one job, over one run or several pooled runs.

    Attributes:
        speedups, lengths, throughputs: by scope; lengths are acceptance lengths, throughputs are
            tokens per second, and empty unless they rank the jobs.
        accuracy, baseline_tokens_per_second: over the requests of all runs; None for a job that
            is not compared.
        rank: from 1; None for a job without a rank.
        versus, slowest: figures against the reference, and the requests that lost most; empty for
            the reference.
        gain: the speedup over all requests, with its error and p-value.
        told_from_best: whether the ranking's measure differs significantly from the best job's.
    """

    job: Job
    speedups: ByScope
    lengths: ByScope
    throughputs: ByScope = field(default_factory=dict)
    accuracy: float | None = None
    baseline_tokens_per_second: float | None = None
    rank: int | None = None
    versus: Sequence[Figure] = ()
    slowest: Sequence[RequestFigures] = ()
    told_from_best: bool = False
    gain: PairedRatio | None = None

    @property
    def mark(self) -> str:
        """BEST for rank 1, EQUAL if not told from the best job, "" otherwise or without a rank."""
        if self.rank is None:
            return ""
        return BEST if self.rank == 1 else "" if self.told_from_best else EQUAL

    @property
    def speedup(self) -> float:
        """Mean speedup over all requests; 0 where it is not known."""
        speed = self.speedups[ALL]
        return speed["mean"] if speed else 0.0

    @property
    def speeds(self) -> Speeds:
        """Means of the throughputs of the job's runs."""
        return speeds_of([run.summary for run in self.job.runs])

    @property
    def own_baseline(self) -> Speeds:
        """Means of the baseline throughputs of the job's runs; None values without a baseline."""
        sides = [run.summary if run.is_plain else run.summary["baseline"] for run in self.job.runs]
        return speeds_of([side for side in sides if side])

    @property
    def by_position(self) -> list[float | None]:
        """Accepted / verifications at each draft position [K], over all runs of the job; values are
        None without verifications."""
        rows = [row for run in self.job.runs for row in run.rows]
        counts = zip_longest(*(row["accepted_per_position"] for row in rows), fillvalue=0)
        num_drafts = sum(row["num_drafts"] for row in rows)
        return [ratio(sum(at), num_drafts) for at in counts]

    @property
    def breakdown_ms(self) -> dict[str, float]:
        """Mean milliseconds per step by phase, of the first run."""
        found = self.job.summary["time_breakdown_ms"].items()
        return {name: ms for name, ms in found if ms is not None}

    def against(self, measure: str, scope: str = ALL) -> Figure | None:
        """The figure of a measure against the reference; None if there is none."""
        wanted = (measure, scope)
        return next((f for f in self.versus if (f.measure, f.scope) == wanted), None)

    def own(self, measure: RankedBy) -> Interval | None:
        """The job's speedup or tokens per second over all requests; None if not known."""
        return (self.speedups if measure == "speedup" else self.throughputs)[ALL]


def speeds_of(sides: Sequence[Summary | Baseline]) -> Speeds:
    """Mean throughputs over the runs of a job; `sides` are their figures, of method or baseline."""
    totals = [total for side in sides if (total := side["output_tokens_per_second"])]
    waits = [wait for side in sides if (wait := side["time_per_output_token_ms"])]
    return Speeds(
        tokens_per_second=fmean(totals) if totals else None,
        tokens_per_second_per_user=fmean(1000 / wait for wait in waits) if waits else None,
    )


def from_summary(job: Job) -> JobFigures:
    """The figures of a job as the summary of its first run has them."""
    summary = job.summary
    categories = summary["by_category"].items()
    lengths = {name: _known(of["acceptance_length"]) for name, of in categories}
    return JobFigures(
        job=job,
        speedups={ALL: summary["speedup"], **{name: of["speedup"] for name, of in categories}},
        lengths={ALL: _known(summary["acceptance_length"]), **lengths},
    )


def _known(length: Length | AcceptanceLength) -> Interval | None:
    mean = length["mean"]
    return None if mean is None else {"mean": mean, "ci95": length["ci95"]}


def from_requests(job: Job, by: RankedBy = "speedup", costs: JobCosts | None = None) -> JobFigures:
    """The figures of a job over the requests of all its runs, each of which needs a baseline."""
    pairs = paired(job, job)
    scopes = pairs.scopes()

    def by_scope(measure: Measure) -> ByScope:
        return {
            scope: as_interval(own_figure(job, pairs, measure, scope, costs)) for scope in scopes
        }

    gain = own_figure(job, pairs, "speedup", ALL, costs)
    num_tokens, milliseconds = pairs.job[:, BASELINE].sum(axis=0)
    return JobFigures(
        job=job,
        speedups=by_scope("speedup"),
        lengths=by_scope("acceptance_length"),
        throughputs=by_scope(by) if by == "tokens_per_second" else {},
        accuracy=accuracy(pairs.job),
        gain=gain,
        baseline_tokens_per_second=ratio(PER_SECOND * num_tokens, milliseconds),
    )


# ---------------------------------------------------------------- groups


@dataclass(slots=True, kw_only=True)
class Group:
    """Jobs over the same prompts, and the reference with which the other jobs are compared.

    Attributes:
        jobs: best first where they are ranked, else in the order of their folders.
        by: the measure that ranks: speedup over the job's own baseline, or tokens per second as
            measured, where baselines are of several devices, engines or settings.
        reference: None where jobs are not ranked: there is one job, or `unranked` says why.
        smallest_effect: smallest share of the speed that matters; None: as the runs have it.
        has_costs: whether speedups rest on the costs of steps, pooled over all jobs.
        decision: the answer; None until `decision.decide` has made it.
        family, load, setup: words that tell the group from others, or "": target, sampling and
            prompts; load; split, device, engine and settings of the baseline.
    """

    jobs: Sequence[JobFigures]
    by: RankedBy = "speedup"
    reference: JobFigures | None = None
    unranked: str = ""
    smallest_effect: float | None = None
    has_costs: bool = False
    decision: Decision | None = None
    family: str = ""
    load: str = ""
    setup: str = ""

    @property
    def title(self) -> str:
        """The settings that tell the group from others; empty for the only group."""
        return ", ".join(part for part in (self.family, self.load, self.setup) if part)

    def says(self, each: JobFigures) -> Says:
        """Verdict on a job against the reference, by the measure that ranks. A speedup is over
        decoding without drafts: against that the interval of the drafting job's own speedup
        decides, as it does for the answer."""
        drafting = self._against_plain(each)
        if drafting is None:
            found = each.against(self.by)
            return "cannot_tell" if found is None else found.says
        speed = drafting.speedups[ALL]
        low, high = (speed and speed["ci95"]) or (0.0, float("inf"))
        if low <= 1 <= high:
            return "cannot_tell"
        return "better" if (low > 1) == (drafting is each) else "worse"

    def num_more(self, each: JobFigures | None) -> int | None:
        """Further prompts that would tell a job from the reference; None for none, where it is told
        already, or where they are too many to ask for."""
        if each is None or self.says(each) != "cannot_tell":
            return None
        drafting, found = self._against_plain(each), each.against(self.by)
        if drafting is not None:
            return worth_asking(drafting.gain)
        return None if found is None else worth_asking(found.ratio, found.level)

    def _against_plain(self, each: JobFigures) -> JobFigures | None:
        """Of a job and the reference the one with drafts, if speedups rank and the other decodes
        without; else None."""
        if self.reference is None or self.by != "speedup":
            return None
        pair = [one for one in (each, self.reference) if not one.job.is_plain]
        return pair[0] if len(pair) == 1 else None

    @property
    def others(self) -> list[JobFigures]:
        """All jobs but the reference."""
        return [each for each in self.jobs if each is not self.reference]

    @property
    def scopes(self) -> list[str]:
        """ALL, then the categories of the jobs."""
        return list(dict.fromkeys(scope for each in self.jobs for scope in each.lengths))

    def drift(self) -> tuple[JobFigures, JobFigures] | None:
        """The jobs in which a common baseline was slowest and fastest, for the baseline where these
        differ most; None unless they differ by more than the factor DRIFT."""
        known = [each for each in self.jobs if each.baseline_tokens_per_second]
        groups = by_key(known, baseline_keys([each.job.runs[0] for each in known]))
        ends = [(min(group, key=_baseline), max(group, key=_baseline)) for group in groups.values()]
        worst = max(ends, key=lambda pair: _baseline(pair[1]) / _baseline(pair[0]), default=None)
        return worst if worst and _baseline(worst[1]) > DRIFT * _baseline(worst[0]) else None


def worth_asking(found: PairedRatio | None, level: float = LEVEL) -> int | None:
    """Further prompts that would tell a ratio from 1 at a significance level; None for none, or for
    more than MOST_MORE times those that there are."""
    more = None if found is None else found.num_more_needed(level)
    return more if found and more and more <= MOST_MORE * found.num_requests else None


def _baseline(each: JobFigures) -> float:
    return each.baseline_tokens_per_second or 0.0


def fitting_measure(jobs: Sequence[Job]) -> RankedBy:
    """The measure that tells which job is faster: "speedup" where all jobs share a setup, so that
    the machine cancels, else "tokens_per_second"."""
    keys = baseline_keys([job.runs[0] for job in jobs], load=False)
    return "speedup" if len(set(keys)) == 1 else "tokens_per_second"


def rank(jobs: Sequence[Job], *, reference: Job | None = None, by: RankedBy = "speedup") -> Group:
    """Rank jobs that are alike (`jobs.check_alike`) by their paired speedup or throughput.

    Args:
        reference: the job with which the others are compared; None: the best job. Since the figures
            choose the best, Holm's correction then counts a test for each pair of jobs.
    """
    costs = job_costs(jobs)
    made = [from_requests(job, by, costs) for job in jobs]
    made.sort(key=lambda each: -_mean(each.own(by)))
    best = made[0]
    against = next((each for each in made if each.job is reference), best)
    num_pairs = len(made) * (len(made) - 1) // 2 if reference is None else None
    found = {
        each.job.name: figures(
            each.job, against.job, with_tokens_per_second=by != "speedup", costs=costs
        )
        for each in made
        if each is not against
    }
    versus = corrected(found, num_pairs=num_pairs)
    for number, each in enumerate(made, start=1):
        each.rank = number if each.own(by) else None
        if each is not against:
            each.versus = versus[each.job.name]
            each.slowest = slowest_requests(each.job, against.job, count=NUM_SLOWEST)
    group = Group(jobs=made, by=by, reference=against, has_costs=costs is not None)
    if against is best:
        for each in group.others:
            each.told_from_best = group.says(each) != "cannot_tell"
    elif len(made) == 2:
        against.told_from_best = group.says(best) != "cannot_tell"
    return group


def _mean(found: Interval | None) -> float:
    return found["mean"] if found else 0.0
