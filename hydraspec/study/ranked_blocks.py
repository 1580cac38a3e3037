"""Blocks of a ranking of jobs: table, sentences, categories, slowest requests, charts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from hydraspec.metrics.accuracy import accuracy_name
from hydraspec.metrics.assessment import as_interval
from hydraspec.study.blocks import Block, Line, Table
from hydraspec.study.charts import Bar, Chart, Series, curves, horizontal_bars
from hydraspec.study.pairs import ALL
from hydraspec.study.ranking import BEST, EQUAL, Ranked, Ranking
from hydraspec.study.runs import Job
from hydraspec.study.texts import estimate, number
from hydraspec.study.words import drift_words, name_of, verdicts

COLORS = (*(f"var(--p{i})" for i in (2, 4, 1, 3, 0, 5)), "var(--accepted)", "var(--bad)")
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
SLOWEST = ("request", "category", "ratio", "acceptance length", "of the reference")
# Figures as bars: title and note.
BARS = {
    "speedup": (
        "Speedup over method=none",
        "Each against its own baseline; dashed: 1; green: the best, and what cannot be told from "
        "it",
    ),
    "acceptance length": (
        "Acceptance length",
        "Tokens per verification; dashed: none accepted",
    ),
}
THROUGHPUTS = ("tok/s", "tok/s per device")  # where jobs are ranked by them


def ranking_blocks(ranking: Ranking, title: str) -> list[Block]:
    """The parts of one ranking; its table is titled by what its jobs share."""
    made = [
        ranked_jobs(ranking, title),
        told(ranking),
        by_category(ranking),
        _slowest(ranking),
        _bars(ranking, "speedup"),
        _bars(ranking, "acceptance length"),
        _curves(ranking),
    ]
    return [block for block in made if block]


def notes(ranking: Ranking) -> list[str]:
    """What the marks mean, and what the machine did between the jobs."""
    drift = drift_words(ranking)
    return [NOTE if ranking.by == "speedup" else NOTE_OF_SPEEDS, *([drift] if drift else [])]


def ranked_jobs(ranking: Ranking, title: str) -> Block:
    """The table of jobs, best first."""
    lines = [
        Line(
            cells=cells(each, ranking),
            link=each.job.runs[0].folder,
            is_best=bool(each.mark),
        )
        for each in ranking.ranked
    ]
    table = Table(header=_header(ranking), lines=lines, linked=NAMES.index("job"))
    return Block(title=title, note=" ".join(notes(ranking)), table=table)


def told(ranking: Ranking) -> Block:
    """The comparison in sentences; of several jobs what ranks them, and all of it folded."""
    return Block(
        title="What is told",
        note="Speedup, acceptance length and correct outputs over all requests, and categories "
        "that differ",
        sentences=list(verdicts(ranking, brief=len(ranking.ranked) > 2)),
        all_sentences=list(verdicts(ranking)),
    )


def by_category(ranking: Ranking) -> Block | None:
    """A line per job and a column for each category; None where there is none."""
    if len(ranking.scopes()) < 2:
        return None
    lines = [Line(cells=_by_scope(each, ranking)) for each in ranking.ranked]
    header = ["job", *(scope or "all" for scope in ranking.scopes())]
    table = Table(header=header, lines=lines)
    return Block(title="By category", note="Speedup / acceptance length", table=table)


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


def cells(each: Ranked, ranking: Ranking) -> list[str]:
    """A job's line in the table of jobs."""
    versus, speedup = each.against(ranking.by), estimate(as_interval(each.speedups[ALL]), "x")
    against = estimate(as_interval(versus.ratio)) if versus else "-"
    if each is ranking.reference:
        against = "reference"
    return [
        *(each.mark, each.job.name, each.job.label, str(len(each.job.runs))),
        *_in_order(ranking, _throughputs(each), speedup, against),
        estimate(as_interval(each.lengths[ALL])),
        number(each.accuracy, 3),
        number(each.baseline_tokens_per_second, 0),
    ]


def _throughputs(each: Ranked) -> list[str]:
    """Tokens per second, in all and per device; empty where jobs are not ranked by them."""
    if not each.throughputs:
        return []
    total = each.throughputs[ALL].ratio
    return [number(total, 0), number(None if total is None else total / each.job.num_devices, 0)]


def _by_scope(each: Ranked, ranking: Ranking) -> list[str]:
    """Speedup and acceptance length of each category."""
    row = [name_of(each.job)]
    for scope in ranking.scopes():
        speedup, length = each.speedups.get(scope), each.lengths.get(scope)
        figures = [f"{speedup.ratio:.2f}x"] if speedup and speedup.ratio is not None else []
        figures += [f"{length.ratio:.2f}"] if length and length.ratio is not None else []
        row.append(" / ".join(figures) or "-")
    return row


def _slowest(ranking: Ranking) -> Block | None:
    """Of two jobs: the requests that lost most against the reference."""
    lines = [
        Line(
            cells=[
                *(one.id, one.category or "-", number(one.speedup_ratio)),
                *(number(one.acceptance_length), number(one.reference_acceptance_length)),
            ]
        )
        for each in ranking.others
        for one in each.slowest
    ]
    if len(ranking.ranked) != 2 or not lines:
        return None
    return Block(
        title="Requests that lost most against the reference",
        note="Ratio of the two speedups of a request, which single requests make noisy; acceptance "
        "length of both",
        table=Table(header=SLOWEST, lines=lines),
    )


def _curves(ranking: Ranking) -> Block | None:
    drawn = position_curves([(each.job, each.by_position) for each in ranking.ranked])
    note = "Accepted at a position / verifications"
    return Block(title="Accepted drafts by position", note=note, chart=drawn) if drawn else None


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


def _bars(ranking: Ranking, what: Literal["speedup", "acceptance length"]) -> Block | None:
    bars = []
    names = bar_labels([each.job for each in ranking.ranked])
    is_speedup = what == "speedup"
    for each, name in zip(ranking.ranked, names, strict=True):
        found = (each.speedups if is_speedup else each.lengths)[ALL]
        if found.ratio is None:
            continue
        marked = is_speedup and ranking.by == "speedup" and bool(each.mark)
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
    if not bars:
        return None
    title, note = BARS[what]
    chart = horizontal_bars(bars, description=f"{what} of each job", mark=1.0)
    return Block(title=title, note=note, chart=chart)
