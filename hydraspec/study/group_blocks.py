"""Blocks of a group of jobs: table of jobs, acceptance, categories, predictions, time by phase."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hydraspec.metrics.accuracy import accuracy_name
from hydraspec.metrics.assessment import as_interval
from hydraspec.metrics.draft_figures import draft_share
from hydraspec.metrics.formats import columns as format_columns
from hydraspec.metrics.lossless import verdict_words
from hydraspec.study.blocks import Block, Line, Panel, Table
from hydraspec.study.charts import (
    Series,
    Stack,
    curves,
    stacked_bars,
)
from hydraspec.study.decision import decide
from hydraspec.study.pairs import ALL
from hydraspec.study.ranking import BEST, EQUAL, Group, JobFigures
from hydraspec.study.speedups import MAX_BARS, bar_labels, drafter_colors, kind_of
from hydraspec.study.texts import estimate, milliseconds, number, percent
from hydraspec.study.words import drift_words, verdicts

_TOLD = (
    f"{EQUAL}: cannot be told from it (paired bootstrap over requests, Holm's correction over "
    "pairs of jobs, 5 %; the intervals are of single comparisons, and that of the speedup decides "
    "against none)."
)
NOTE = f"{BEST}: the highest speedup, each job against its own baseline; {_TOLD}"
NOTE_OF_SPEEDS = (
    f"{BEST}: the most tokens/s; {_TOLD} Devices, engine or settings differ, so that the jobs have "
    "no common baseline: tokens/s are compared as measured, and a machine that changes between "
    "jobs does not cancel. A speedup is over the job's own baseline: it says what drafts gain "
    "there, not which job is faster."
)
NOTE_OF_COSTS = (
    "Speedups rest on the step costs of all jobs together; a job's own page has that of its own "
    "steps alone."
)
NOTE_OF_CATEGORIES = (
    f"{BEST}: the highest speedup of the category. better, worse: told from the reference's there "
    "(Holm's correction over jobs and categories, 5 %); all others cannot be."
)
SLOWEST = ("request", "category", "ratio", "acceptance length", "of the reference")
Column = tuple[str, Callable[[JobFigures], str]]  # heading, and a job's cell


def notes(group: Group) -> list[str]:
    """Sentences on the meaning of the marks and on a change of the machine between jobs; empty
    without a ranking."""
    if group.reference is None:
        return []
    drift = drift_words(group)
    return [
        NOTE if group.by == "speedup" else NOTE_OF_SPEEDS,
        *([NOTE_OF_COSTS] if group.has_costs else []),
        *([drift] if drift else []),
    ]


def jobs(group: Group, *, title: str = "Jobs", with_speeds: bool = True) -> Block:
    """Table of all jobs with their main figures and links to their pages; the same in sentences.

    Args:
        with_speeds: show the mean throughputs of the runs, in place of the baseline's.
    """
    columns = [*_ranked_columns(group), *(_speed_columns() if with_speeds else [_BASELINE])]
    columns += _format_columns(group)
    if any(len(one.job.runs) > 1 for one in group.jobs):
        columns.insert(0, ("runs", lambda one: str(len(one.job.runs))))
    lines = [
        Line(
            cells=[
                *(one.job.label, f"{one.mark} {one.job.name}".strip()),
                *(cell(one) for _, cell in columns),
            ],
            link=one.job.folder,
            kind=kind_of(one, group),
        )
        for one in group.jobs
    ]
    return Block(
        title=title,
        note=" ".join(["Means with 95 % intervals; drafting: its share of a step.", *notes(group)]),
        all_sentences=list(verdicts(group)),
        table=Table(
            header=["settings", "job", *(heading for heading, _ in columns)],
            lines=lines,
            num_left=2,
        ),
    )


def _ranked_columns(group: Group) -> list[Column]:
    """Columns of the measure that ranks the jobs, of its ratio to the reference's, and of the other
    figures."""
    speedup: Column = ("speedup", lambda one: estimate(one.speedups[ALL], "x"))
    against: list[Column] = [
        ("against the reference", lambda one: _against(one, group)),
        ("difference", lambda one: _difference(one, group)),
    ]
    by_tokens: list[Column] = [
        ("tok/s", lambda one: number(_throughput(one), 0)),
        ("tok/s per device", lambda one: number(_throughput(one) / one.job.num_devices, 0)),
    ]
    return [
        *([] if group.by == "speedup" else by_tokens),
        *([speedup] if group.by == "speedup" else []),
        *(against if group.reference else []),
        *([] if group.by == "speedup" else [speedup]),
        ("acceptance length", lambda one: estimate(one.lengths[ALL])),
        *([("drafting", _drafting)] if any(_has_drafting(one) for one in group.jobs) else []),
        (accuracy_name(one.job.summary["accuracy"] for one in group.jobs), _accuracy),
    ]


def _format_columns(group: Group) -> list[Column]:
    """Columns of the number formats in which jobs differ."""

    def cell(of: Mapping[str, str]) -> Callable[[JobFigures], str]:
        return lambda one: of[one.job.name]

    names = [one.job.name for one in group.jobs]
    found = format_columns([one.job.runs[0].formats for one in group.jobs])
    return [(heading, cell(dict(zip(names, cells, strict=True)))) for heading, cells in found]


_BASELINE: Column = ("baseline tok/s", lambda one: number(one.baseline_tokens_per_second, 0))


def _speed_columns() -> list[Column]:
    return [
        ("tok/s of one user", lambda one: number(one.speeds.tokens_per_second_per_user, 0)),
        ("tok/s of all", lambda one: number(one.speeds.tokens_per_second, 0)),
    ]


def _throughput(one: JobFigures) -> float:
    found = one.throughputs[ALL]
    return found["mean"] if found else 0.0


def _against(one: JobFigures, group: Group) -> str:
    if one is group.reference:
        return "reference"
    versus = one.against(group.by)
    return estimate(as_interval(versus.ratio)) if versus else "-"


def _difference(one: JobFigures, group: Group) -> str:
    """Cell on whether a job is better or worse than the reference, or as good by the answer, or how
    many more prompts would tell, as the answer has them."""
    if one is group.reference or one.against(group.by) is None:
        return "-"
    is_told, says = (told := group.says(one)) != "cannot_tell", told.replace("_", " ")
    if within := _within(one, group):
        return f"{says}, {within}" if is_told else within
    more = None if is_told else group.num_more(one)
    return says if not more else f"{more:,} more prompt{'' if more == 1 else 's'}"


def _within(one: JobFigures, group: Group) -> str:
    """Words that the answer counts the job as good as the reference, such as "within 3 %"; empty if
    it does not."""
    answer = decide(group)
    if answer is None or answer.best is not group.reference or one not in answer.as_good:
        return ""
    return f"within {answer.share}"


def _has_drafting(one: JobFigures) -> bool:
    return not one.job.is_plain and draft_share(one.breakdown_ms) is not None


def _drafting(one: JobFigures) -> str:
    """Drafting's share of a step of the first run."""
    return percent(draft_share(one.breakdown_ms)) if _has_drafting(one) else "-"


def _accuracy(one: JobFigures) -> str:
    """Share of correct outputs over all runs, or the first run's where jobs are not compared."""
    accuracy = one.job.summary["accuracy"]
    if one.accuracy is None and accuracy:
        return number(accuracy["exact_match"], 3)
    return number(one.accuracy, 3)


def slowest(group: Group) -> Block | None:
    """Table of the requests that lost most against the reference; None unless of two jobs."""
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


def acceptance_by_position(group: Group) -> Block | None:
    """Curves and table of acceptance rates by draft position, a line per job; None without drafts.
    Jobs that differ in K only share a colour."""
    found = [(one.job, rates) for one in group.jobs if (rates := one.by_position)]
    width = max((len(rates) for _, rates in found), default=0)
    if not width:
        return None
    labels = [str(i + 1) for i in range(width)]
    padded = [(job, [*rates, *[None] * (width - len(rates))]) for job, rates in found]
    colors = drafter_colors(job.drafter for job, _ in padded)
    series = [
        Series(name=name, color=colors[name], values=rates, title=job.title)
        for job, rates in padded
        if (name := job.drafter)
    ]
    lines = [Line(cells=[job.title, *map(percent, rates)]) for job, rates in padded]
    metrics = [f"acceptance_rate_per_position/{i}" for i in range(width)]
    return Block(
        title="Accepted drafts by position",
        note="Accepted at a position / verifications; positions of draft tokens from 1. A line for "
        "each job, in the colour of its drafter.",
        chart=curves(labels, series, description="Acceptance rate by draft position, by job"),
        table=Table(header=["job", *labels], lines=lines),
        panels=(Panel(kind="bar", title="Acceptance rate by position", metrics=metrics),),
        narrow=True,
    )


def by_category(group: Group, *, brief: bool = False) -> Block | None:
    """Table of speedup and acceptance length with a line per job and a column per category; None
    without categories. With `brief` lengths have no intervals."""
    scopes = group.scopes
    if len(scopes) < 2:
        return None
    best = {scope: max(group.jobs, key=lambda one: _speedup(one, scope)) for scope in scopes}
    lines = [
        Line(
            cells=[
                one.job.title,
                *(_told(one, scope, group, best[scope], brief) for scope in scopes),
            ],
            kind=kind_of(one, group),
        )
        for one in group.jobs
    ]
    metrics = [f"acceptance_length_by_category/{scope}" for scope in scopes if scope != ALL]
    return Block(
        title="Speedup / acceptance length by category",
        note=NOTE_OF_CATEGORIES if group.reference and group.by == "speedup" else "",
        table=Table(header=["job", *(scope or "all" for scope in scopes)], lines=lines),
        panels=(Panel(kind="bar", title="Acceptance length by category", metrics=metrics),),
    )


def _speedup(one: JobFigures, scope: str) -> float:
    found = one.speedups.get(scope)
    return found["mean"] if found else 0.0


def _told(one: JobFigures, scope: str, group: Group, best: JobFigures, brief: bool) -> str:
    """Cell of a category, with a mark for the highest speedup, and what is told from the
    reference's."""
    mark = f"{BEST} " if one is best and _speedup(one, scope) else ""
    versus = one.against("speedup", scope)
    is_ranked = scope == ALL and group.by == "speedup"
    told = "cannot_tell" if versus is None else group.says(one) if is_ranked else versus.says
    says = "" if told == "cannot_tell" else f", {told}"
    return f"{mark}{_both(one, scope, brief)}{says}"


def _both(one: JobFigures, scope: str, brief: bool) -> str:
    """Cell with speedup and acceptance length of a category."""
    speedup, length = one.speedups.get(scope), one.lengths.get(scope)
    figures = [f"{speedup['mean']:.2f}x"] if speedup else []
    figures += [number(length["mean"]) if brief else estimate(length)] if length else []
    return " / ".join(figures) or "-"


def lossless(group: Group) -> Block:
    """Block of the lossless verdicts: one sentence where all jobs have the same verdict, else a
    table."""
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
    """Chart and table of mean milliseconds per step by phase, of the first MAX_BARS jobs that have
    them; None without any."""
    found = [(one.job, times) for one in group.jobs if (times := one.breakdown_ms)][:MAX_BARS]
    phases = list(dict.fromkeys(name for _, times in found for name in times))
    if not phases:
        return None
    stacks, lines = [], []
    for (job, times), label in zip(found, bar_labels([job for job, _ in found]), strict=True):
        parts = [
            (name, times.get(name, 0.0), f"var(--p{min(i, 5)})") for i, name in enumerate(phases)
        ]
        stacks.append(
            Stack(label=label, parts=parts, text=f"{milliseconds(sum(times.values()))} ms")
        )
        share = "-" if job.is_plain else percent(draft_share(times))
        cells = [job.title, *(milliseconds(times.get(name)) for name in phases), share]
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
    """Table of predicted and measured speedups, a line per job that ran with metrics.prediction;
    None without such jobs."""
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
