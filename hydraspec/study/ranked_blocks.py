"""A ranking of jobs as the parts of pages and of the console: table, matrix, curves, sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydraspec.metrics.accuracy import accuracy_name
from hydraspec.metrics.paired import PairedRatio
from hydraspec.metrics.statistics import range_words
from hydraspec.study.charts import Bar, Chart, Series, curves, horizontal_bars
from hydraspec.study.comparison.pairs import ALL
from hydraspec.study.comparison.ranking import Ranked, Ranking
from hydraspec.study.comparison.runs import Job
from hydraspec.study.comparison.words import drift_words, name_of, verdicts
from hydraspec.study.texts import number

COLORS = (*(f"var(--p{i})" for i in (2, 4, 1, 3, 0, 5)), "var(--accepted)", "var(--bad)")
BEST, EQUAL = "*", "="
_TOLD = (
    f"{EQUAL}: cannot be told from it (paired bootstrap over requests, Holm's correction over "
    "pairs of jobs, 5 %; the intervals are of single comparisons)."
)
NOTE = f"{BEST}: the highest speedup, each job against its own baseline; {_TOLD}"
NOTE_OF_SPEEDS = (
    f"{BEST}: the most tokens/s; {_TOLD} Devices, engine or settings differ, so that the jobs have "
    "no common baseline: tokens/s are compared as measured, and a machine that changes between "
    "jobs does not cancel. A speedup is over the job's own baseline: it says what drafts gain "
    "there, not which job is faster."
)
NAMES = ("", "job", "settings", "runs")
THROUGHPUTS = ("tok/s", "tok/s per device")  # where jobs are ranked by them


@dataclass(slots=True, kw_only=True)
class Blocks:
    """What templates/ranking.html shows of one ranking."""

    title: str
    header: Sequence[str]
    lines: Sequence[tuple[Sequence[str], bool]]  # cells, and whether it is the best or equal to it
    folders: Sequence[Path]  # of each line's first run
    matrix_header: Sequence[str]
    matrix: Sequence[Sequence[str]]
    curves: Chart | None
    speedups: Chart | None
    lengths: Chart | None
    sentences: Sequence[str]
    brief: Sequence[str]  # of several jobs only what ranks them
    notes: Sequence[str]
    slowest: Sequence[Sequence[str]]  # of two jobs: requests that lost most against the reference


def blocks(ranking: Ranking, title: str) -> Blocks:
    """The parts of one ranking, titled by what its jobs share."""
    drift = drift_words(ranking)
    return Blocks(
        title=title,
        header=_header(ranking),
        lines=[(cells(each, ranking), bool(mark(each, ranking))) for each in ranking.ranked],
        folders=[each.job.runs[0].folder for each in ranking.ranked],
        matrix_header=["job", *(scope or "all" for scope in ranking.scopes())],
        matrix=[_matrix_row(each, ranking) for each in ranking.ranked],
        curves=position_curves([(each.job, each.by_position) for each in ranking.ranked]),
        speedups=_bars(ranking, "speedup"),
        lengths=_bars(ranking, "acceptance length"),
        sentences=list(verdicts(ranking)),
        brief=list(verdicts(ranking, brief=len(ranking.ranked) > 2)),
        notes=[NOTE if ranking.by == "speedup" else NOTE_OF_SPEEDS, *([drift] if drift else [])],
        slowest=_slowest(ranking) if len(ranking.ranked) == 2 else [],
    )


def _header(ranking: Ranking) -> list[str]:
    speeds = _in_order(ranking, THROUGHPUTS, "speedup", "against the reference")
    return [*NAMES, *speeds, "acceptance length", _correct(ranking), "baseline tok/s"]


def _in_order(
    ranking: Ranking, throughputs: Sequence[str], speedup: str, against: str
) -> list[str]:
    """The columns of speed: what ranks the jobs, its ratio to the reference's, and the other."""
    if ranking.by == "speedup":
        return [speedup, against]
    return [*throughputs, against, speedup]


def _correct(ranking: Ranking) -> str:
    return accuracy_name(each.job.summary["accuracy"] for each in ranking.ranked)


def mark(each: Ranked, ranking: Ranking) -> str:
    """BEST, EQUAL or nothing."""
    if each.rank is None or len(ranking.ranked) < 2:
        return ""
    return BEST if each.rank == 1 else "" if each.told_from_best else EQUAL


def cells(each: Ranked, ranking: Ranking) -> list[str]:
    """A job's line in the table of jobs."""
    versus, speedup = each.against(ranking.by), estimate(each.speedups[ALL], "x")
    against = estimate(versus.ratio) if versus else "-"
    if each is ranking.reference:
        against = "reference"
    return [
        *(mark(each, ranking), each.job.name, each.job.label, str(len(each.job.runs))),
        *_in_order(ranking, _throughputs(each), speedup, against),
        estimate(each.lengths[ALL]),
        number(each.accuracy, 3),
        number(each.baseline_tokens_per_second, 0),
    ]


def _throughputs(each: Ranked) -> list[str]:
    """Tokens per second, in all and per device; empty where jobs are not ranked by them."""
    if not each.throughputs:
        return []
    total = each.throughputs[ALL].ratio
    return [number(total, 0), number(None if total is None else total / each.job.num_devices, 0)]


def estimate(found: PairedRatio, unit: str = "") -> str:
    """ "1.97x (1.75 to 2.20)", or a dash."""
    if found.ratio is None:
        return "-"
    text = f"{found.ratio:.2f}{unit}"
    return f"{text} ({range_words(found.ci95)})" if found.ci95 else text


def _matrix_row(each: Ranked, ranking: Ranking) -> list[str]:
    """Speedup and acceptance length of each category."""
    row = [name_of(each.job)]
    for scope in ranking.scopes():
        speedup, length = each.speedups.get(scope), each.lengths.get(scope)
        figures = [f"{speedup.ratio:.2f}x"] if speedup and speedup.ratio is not None else []
        figures += [f"{length.ratio:.2f}"] if length and length.ratio is not None else []
        row.append(" / ".join(figures) or "-")
    return row


def _slowest(ranking: Ranking) -> list[list[str]]:
    return [
        [
            *(one.id, one.category or "-", number(one.speedup_ratio)),
            *(number(one.acceptance_length), number(one.reference_acceptance_length)),
        ]
        for each in ranking.others
        for one in each.slowest
    ]


def position_curves(found: Sequence[tuple[Job, Sequence[float | None]]]) -> Chart | None:
    """A line for each job with its rates by position; jobs that differ in K only share a colour."""
    width = max((len(rates) for _, rates in found), default=0)
    if width == 0:
        return None
    drafters = list(dict.fromkeys(_without_k(job.label) for job, rates in found if rates))
    colors = {name: COLORS[i % len(COLORS)] for i, name in enumerate(drafters)}
    series = [
        Series(
            name=_without_k(job.label),
            color=colors[_without_k(job.label)],
            values=[*rates, *[None] * (width - len(rates))],
            title=name_of(job),
        )
        for job, rates in found
        if rates
    ]
    labels = [str(i + 1) for i in range(width)]
    return curves(labels, series, description="Acceptance rate by draft position, a line per job")


def _without_k(label: str) -> str:
    """A label without its number of drafts, "K=3"."""
    return ", ".join(part for part in label.split(", ") if not part.startswith("K=")) or label


def bar_labels(jobs: Sequence[Job]) -> list[str]:
    """What stands beside the bars of jobs: their labels where these tell them apart."""
    labels = [job.label for job in jobs]
    distinct = len(set(labels)) == len(labels)
    return [
        (label if distinct else name_of(job))[:28] for label, job in zip(labels, jobs, strict=True)
    ]


def _bars(ranking: Ranking, what: str) -> Chart | None:
    bars = []
    names = bar_labels([each.job for each in ranking.ranked])
    for each, name in zip(ranking.ranked, names, strict=True):
        is_speedup = what == "speedup"
        found = (each.speedups if is_speedup else each.lengths)[ALL]
        if found.ratio is None:
            continue
        marked = is_speedup and ranking.by == "speedup" and bool(mark(each, ranking))
        plain = "var(--method)" if is_speedup else "var(--second)"
        bars.append(
            Bar(
                label=name,
                value=found.ratio,
                text=number(found.ratio),
                color="var(--good)" if marked else plain,
                ci95=found.ci95,
            )
        )
    return horizontal_bars(bars, description=f"{what} of each job", mark=1.0) if bars else None
