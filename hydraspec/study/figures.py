"""The figures of a job that blocks show, of a single run or of pooled ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from hydraspec.metrics.assessment import as_interval
from hydraspec.metrics.summary import Baseline, Interval, Length, Lossless, Summary
from hydraspec.study.pairs import ALL
from hydraspec.study.ranking import Ranked, acceptance_by_position
from hydraspec.study.runs import Job
from hydraspec.study.words import name_of

WORST_FIRST = ("diverged", "not_checked", "numerical", "identical")


@dataclass(slots=True, frozen=True, kw_only=True)
class Speeds:
    """Decode throughput of all users together, and of one: 1000 / its ms per output token."""

    tokens_per_second: float | None
    tokens_per_second_per_user: float | None


@dataclass(slots=True, frozen=True, kw_only=True)
class JobFigures:
    """Figures of one job; speedups and lengths by category have ALL for all requests.

    Attributes:
        ranked: its place in the ranking of its group, if there is one.
        name: "eagle3, K=5 (job 3)": its label and folder.
        breakdown_ms: mean milliseconds per step by phase, of the first run.
        folder: of its first run.
    """

    job: Job
    ranked: Ranked | None
    name: str
    is_plain: bool  # method=none
    speedups: Mapping[str, Interval | None]
    lengths: Mapping[str, Interval | Length | None]
    by_position: Sequence[float | None]
    speeds: Speeds
    lossless: Lossless
    breakdown_ms: Mapping[str, float]
    folder: Path

    @property
    def mark(self) -> str:
        """The mark of the best job, of one that cannot be told from it, or nothing."""
        return self.ranked.mark if self.ranked else ""

    @property
    def summary(self) -> Summary:
        """That of its first run."""
        return self.job.summary


def figures_of(job: Job, ranked: Ranked | None) -> JobFigures:
    """A job's figures: those of the ranking, which pools its runs, or of its own run."""
    summaries = [run.summary for run in job.runs]
    first = summaries[0]
    speedups: dict[str, Interval | None]
    lengths: dict[str, Interval | Length | None]
    if ranked:
        speedups = {scope: as_interval(found) for scope, found in ranked.speedups.items()}
        lengths = {scope: as_interval(found) for scope, found in ranked.lengths.items()}
    else:
        categories = first["by_category"].items()
        speedups = {ALL: first["speedup"], **{name: of["speedup"] for name, of in categories}}
        lengths = {name: of["acceptance_length"] for name, of in categories}
        pooled = first["acceptance_length"]
        lengths[ALL] = {"mean": pooled["mean"], "ci95": pooled["ci95"]}
    return JobFigures(
        job=job,
        ranked=ranked,
        name=name_of(job),
        is_plain=first["method"] == "none",
        speedups=speedups,
        lengths=lengths,
        by_position=acceptance_by_position(job),
        speeds=speeds_of(summaries),
        lossless=min(
            (summary["lossless"] for summary in summaries),
            key=lambda lossless: WORST_FIRST.index(lossless["verdict"]),
        ),
        breakdown_ms={k: ms for k, ms in first["time_breakdown_ms"].items() if ms is not None},
        folder=job.runs[0].folder,
    )


def speeds_of(sides: Sequence[Summary | Baseline]) -> Speeds:
    """Means over the runs of a job, of its method or of its baseline."""
    totals = [side["output_tokens_per_second"] for side in sides]
    waits = [side["time_per_output_token_ms"] for side in sides]
    return Speeds(
        tokens_per_second=_mean([total for total in totals if total]),
        tokens_per_second_per_user=_mean([1000 / wait for wait in waits if wait]),
    )


def own_baseline(job: Job) -> Speeds:
    """What a job measured without drafts; nothing where it has no baseline."""
    is_plain = job.summary["method"] == "none"
    sides = [run.summary if is_plain else run.summary["baseline"] for run in job.runs]
    return speeds_of([side for side in sides if side])


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
