"""Blocks of a group of jobs: table, sentences, speedups, acceptance, categories, predictions, where
time goes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hydraspec.metrics.accuracy import accuracy_name
from hydraspec.metrics.assessment import as_interval
from hydraspec.metrics.draft_figures import draft_share
from hydraspec.metrics.lossless import verdict_words
from hydraspec.study.blocks import Block, Line, Panel, Table
from hydraspec.study.charts import COLORS, Bar, Series, Stack, curves, horizontal_bars, stacked_bars
from hydraspec.study.jobs import Job
from hydraspec.study.pairs import ALL
from hydraspec.study.ranking import BEST, EQUAL, ByScope, Group, JobFigures
from hydraspec.study.texts import estimate, number
from hydraspec.study.words import drift_words, verdicts

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
NAMES = ("", "job", "settings", "runs")  # columns of every table of jobs
SLOWEST = ("request", "category", "ratio", "acceptance length", "of the reference")
MAX_BARS = 24
Column = tuple[str, Callable[[JobFigures], str]]  # heading and cell


def notes(group: Group) -> list[str]:
    """The meaning of the marks, and the change of the machine between the jobs; empty without a
    ranking."""
    if group.reference is None:
        return []
    drift = drift_words(group)
    return [NOTE if group.by == "speedup" else NOTE_OF_SPEEDS, *([drift] if drift else [])]


def jobs(group: Group, *, title: str = "Jobs", with_speeds: bool = True) -> Block:
    """All jobs with their main figures, each linked to its page.

    Args:
        with_speeds: also the mean throughputs of the runs, and their verdicts.
    """
    columns = [*_ranked_columns(group), *(_speed_columns() if with_speeds else ())]
    lines = [
        Line(
            cells=[
                *(one.mark, one.job.name, one.job.label, str(len(one.job.runs))),
                *(cell(one) for _, cell in columns),
            ],
            link=one.job.folder,
            is_best=bool(one.mark),
        )
        for one in group.jobs
    ]
    header = [*NAMES, *(heading for heading, _ in columns)]
    return Block(
        title=title,
        note=" ".join(["Means with 95 % intervals.", *notes(group)]),
        table=Table(header=header, lines=lines, linked=1, num_left=len(NAMES) - 1),
    )


def _ranked_columns(group: Group) -> list[Column]:
    """The measure that ranks the jobs, its ratio to the reference's, and the other figures."""
    speedup: Column = ("speedup", lambda one: estimate(one.speedups[ALL], "x"))
    against: Column = ("against the reference", lambda one: _against(one, group))
    by_tokens: list[Column] = [
        ("tok/s", lambda one: number(_throughput(one), 0)),
        ("tok/s per device", lambda one: number(_throughput(one) / one.job.num_devices, 0)),
    ]
    return [
        *([speedup, against] if group.by == "speedup" else [*by_tokens, against, speedup]),
        ("acceptance length", lambda one: estimate(one.lengths[ALL])),
        (accuracy_name(one.job.summary["accuracy"] for one in group.jobs), _accuracy),
        ("baseline tok/s", lambda one: number(one.baseline_tokens_per_second, 0)),
    ]


def _speed_columns() -> list[Column]:
    return [
        ("tokens/s of one user", lambda one: number(one.speeds.tokens_per_second_per_user, 0)),
        ("tokens/s of all", lambda one: number(one.speeds.tokens_per_second, 0)),
        ("lossless", lambda one: one.job.lossless["verdict"].replace("_", " ")),
    ]


def _throughput(one: JobFigures) -> float:
    found = one.throughputs[ALL]
    return found["mean"] if found else 0.0


def _against(one: JobFigures, group: Group) -> str:
    if one is group.reference:
        return "reference"
    versus = one.against(group.by)
    return estimate(as_interval(versus.ratio)) if versus else "-"


def _accuracy(one: JobFigures) -> str:
    """The share over all runs of a job that is compared, else the first run's."""
    accuracy = one.job.summary["accuracy"]
    if one.accuracy is None and accuracy:
        return number(accuracy["exact_match"], 3)
    return number(one.accuracy, 3)


def told(group: Group) -> Block | None:
    """The comparison in sentences; of several jobs what ranks them, and all of it folded."""
    if group.reference is None:
        return None
    return Block(
        title="What is told",
        note="Speedup, acceptance length and correct outputs over all requests, and categories "
        "that differ; paired request by request, corrected for the number of comparisons.",
        sentences=list(verdicts(group, brief=len(group.jobs) > 2)),
        all_sentences=list(verdicts(group)),
    )


def slowest(group: Group) -> Block | None:
    """The requests that lost most against the reference, where there are two jobs."""
    lines = [
        Line(
            cells=[
                *(one.id, one.category or "-", number(one.speedup_ratio)),
                *(number(one.acceptance_length), number(one.reference_acceptance_length)),
            ]
        )
        for each in group.others
        for one in each.slowest
    ]
    if len(group.jobs) != 2 or not lines:
        return None
    return Block(
        title="Requests that lost most against the reference",
        note="Ratio of the two speedups of a request, which single requests make noisy; acceptance "
        "length of both",
        table=Table(header=SLOWEST, lines=lines),
    )


def bar_labels(found: Sequence[Job]) -> list[str]:
    """Text beside the bars of jobs: their labels where these tell them apart, else their titles."""
    is_enough = len({job.label for job in found}) == len(found)
    return [(job.label if is_enough else job.title)[:28] for job in found]


def _bars(
    group: Group, figure: Callable[[JobFigures], ByScope], unit: str, colors: tuple[str, str]
) -> list[Bar]:
    """A bar for each job with such a figure; the colours are of marked jobs and of others."""
    labels = bar_labels([one.job for one in group.jobs])
    return [
        Bar(
            label=label,
            value=found["mean"],
            text=f"{number(found['mean'])}{unit}",
            color=colors[0] if one.mark and group.by == "speedup" else colors[1],
            ci95=found["ci95"],
        )
        for one, label in list(zip(group.jobs, labels, strict=True))[:MAX_BARS]
        if (found := figure(one)[ALL])
    ]


def speedups(group: Group) -> Block | None:
    """The speedup of each job over decoding without drafts, as bars with intervals."""
    bars = _bars(group, lambda one: one.speedups, "x", ("var(--good)", "var(--method)"))
    if not bars:
        return None
    return Block(
        title="Speedup over decoding without drafts",
        note="Each against its own baseline, with 95 % intervals; dashed: 1. Green: the best, and "
        "what cannot be told from it.",
        chart=horizontal_bars(bars, description="Speedup of each job", mark=1.0),
        panels=(Panel(kind="bar", title="Speedup", metrics=("speedup/mean",)),),
    )


def lengths(group: Group) -> Block | None:
    """The acceptance length of each job, as bars with intervals."""
    bars = _bars(group, lambda one: one.lengths, "", ("var(--second)", "var(--second)"))
    if not bars:
        return None
    return Block(
        title="Acceptance length",
        note="Tokens per verification; dashed: none accepted",
        chart=horizontal_bars(bars, description="Acceptance length of each job", mark=1.0),
    )


def acceptance_by_position(group: Group) -> Block | None:
    """A curve and a line of a table per job; jobs that differ in K only share a colour."""
    found = [(one.job, rates) for one in group.jobs if (rates := one.by_position)]
    width = max((len(rates) for _, rates in found), default=0)
    if not width:
        return None
    labels = [str(i + 1) for i in range(width)]
    padded = [(job, [*rates, *[None] * (width - len(rates))]) for job, rates in found]
    drafters = dict.fromkeys(_without_k(job.label) for job, _ in padded)
    colors = {name: COLORS[i % len(COLORS)] for i, name in enumerate(drafters)}
    series = [
        Series(name=name, color=colors[name], values=rates, title=job.title)
        for job, rates in padded
        if (name := _without_k(job.label))
    ]
    lines = [Line(cells=[job.title, *map(_percent, rates)]) for job, rates in padded]
    metrics = [f"acceptance_rate_per_position/{i}" for i in range(width)]
    return Block(
        title="Accepted drafts by position",
        note="Accepted at a position / verifications; positions of draft tokens from 1. A line for "
        "each job, in the colour of its drafter.",
        chart=curves(labels, series, description="Acceptance rate by draft position, by job"),
        table=Table(header=["job", *labels], lines=lines),
        panels=(Panel(kind="bar", title="Acceptance rate by position", metrics=metrics),),
    )


def _without_k(label: str) -> str:
    """A label without its number of drafts, "K=3"."""
    return ", ".join(part for part in label.split(", ") if not part.startswith("K=")) or label


def by_category(group: Group, *, brief: bool = False) -> Block | None:
    """A line per job and a column for each category; None where there is none. With `brief` lengths
    have no intervals."""
    scopes = group.scopes
    if len(scopes) < 2:
        return None
    lines = [
        Line(cells=[one.job.title, *(_both(one, scope, brief) for scope in scopes)])
        for one in group.jobs
    ]
    metrics = [f"acceptance_length_by_category/{scope}" for scope in scopes if scope != ALL]
    return Block(
        title="Speedup / acceptance length by category",
        table=Table(header=["job", *(scope or "all" for scope in scopes)], lines=lines),
        panels=(Panel(kind="bar", title="Acceptance length by category", metrics=metrics),),
    )


def _both(one: JobFigures, scope: str, brief: bool) -> str:
    """Speedup and acceptance length of a category."""
    speedup, length = one.speedups.get(scope), one.lengths.get(scope)
    figures = [f"{speedup['mean']:.2f}x"] if speedup else []
    figures += [number(length["mean"]) if brief else estimate(length)] if length else []
    return " / ".join(figures) or "-"


def lossless(group: Group) -> Block:
    """The verdicts on outputs against the target's; one sentence where all jobs have the same."""
    found = [one.job for one in group.jobs]
    drafting = [verdict_words(job.lossless) for job in found if not job.is_plain]
    note = "Outputs of greedy requests against those of the same run without drafts."
    if len(drafting) > 1 and len(set(drafting)) == 1:
        said = f"All {len(drafting)} jobs with drafts: {drafting[0]}."
        return Block(title="Lossless", note=note, sentences=[said])
    lines = [
        Line(
            cells=[
                job.title,
                verdict_words(job.lossless),
                str(job.lossless["num_requests_checked"]),
                str(job.lossless["num_requests_diverged"]),
            ]
        )
        for job in found
    ]
    header = ("job", "verdict", "requests checked", "with another output")
    return Block(title="Lossless", note=note, table=Table(header=header, lines=lines))


def time_breakdown(group: Group) -> Block | None:
    """Mean milliseconds per step by phase."""
    found = [(one.job, times) for one in group.jobs if (times := one.breakdown_ms)][:MAX_BARS]
    phases = list(dict.fromkeys(name for _, times in found for name in times))
    if not phases:
        return None
    stacks, lines = [], []
    for (job, times), label in zip(found, bar_labels([job for job, _ in found]), strict=True):
        parts = [
            (name, times.get(name, 0.0), f"var(--p{min(i, 5)})") for i, name in enumerate(phases)
        ]
        stacks.append(Stack(label=label, parts=parts, text=f"{number(sum(times.values()))} ms"))
        share = "-" if job.is_plain else _percent(draft_share(times))
        cells = [job.title, *(number(times.get(name), 3) for name in phases), share]
        lines.append(Line(cells=cells))
    sources = dict.fromkeys(job.summary["time_breakdown_from"] for job, _ in found)
    measured = "; or ".join(str(source) for source in sources if source)
    metrics = [f"time_breakdown_ms/{name}" for name in phases]
    return Block(
        title="Where a step's time goes",
        note=f"Means over {measured}. Drafting: the share of propose.",
        chart=stacked_bars(stacks, description="Mean milliseconds per step by phase"),
        table=Table(header=["job", *(f"{name}, ms" for name in phases), "drafting"], lines=lines),
        panels=(Panel(kind="bar", title="Milliseconds per step", metrics=metrics),),
    )


def predictions(group: Group) -> Block | None:
    """A line per job that ran with metrics.prediction."""
    lines, errors = [], []
    for one in group.jobs:
        summary = one.job.summary
        found, speedup = summary.get("prediction"), summary["speedup"]
        if not found:
            continue
        error = found["error"]
        errors += [] if error is None else [abs(error)]
        cells = [
            one.job.name,
            f"{found['speedup']:.2f}x",
            f"{speedup['mean']:.2f}x" if speedup else "-",
            "-" if error is None else f"{error:+.1%}",
            f"{found['break_even_acceptance_length']:.2f}",
            f"{found['acceptance_length']:.2f}",
            number(summary["acceptance_length"]["mean"]),
        ]
        lines.append(Line(cells=cells, link=one.job.folder))
    if not lines:
        return None
    header = ("job", "predicted", "measured", "error", "break-even acceptance length")
    said = f"Mean absolute error: {sum(errors) / len(errors):.1%}." if errors else ""
    return Block(
        title="Predicted speedup",
        note="Of python -m hydraspec.predict before the run. Below the break-even acceptance "
        "length drafts are slower than none.",
        sentences=[said] if said else (),
        table=Table(header=(*header, "predicted acceptance length", "measured"), lines=lines),
    )


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.1%}"
