"""Comparison of jobs in sentences, and as JSON, CSV and Markdown."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from hydraspec.errors import printable
from hydraspec.metrics.accuracy import accuracy_name
from hydraspec.metrics.files import Json
from hydraspec.metrics.paired import PairedRatio
from hydraspec.metrics.statistics import range_words
from hydraspec.study.blocks import Line, Table
from hydraspec.study.decision import decide
from hydraspec.study.jobs import Job
from hydraspec.study.pairs import ALL, Figure
from hydraspec.study.ranking import Group, JobFigures

TITLES = {
    "speedup": "speedup",
    "tokens_per_second": "tokens/s",
    "acceptance_length": "acceptance length",
}
COLUMNS = ("rank", "job", "label", "runs", "category", "measure", "value", "ci95_low", "ci95_high")
VERSUS = ("reference", "ratio", "ratio_ci95_low", "ratio_ci95_high", "p_adjusted", "says")
MOST_PROMPTS = 1_000_000  # the largest number that is given as needed
LARGEST_FACTOR = 10  # the largest factor that is given: no two jobs differ by more


def sentence(figure: Figure, job: Job, reference: Job) -> str:
    """The comparison of two jobs by one measure, in words."""
    where = "" if figure.scope == ALL else f" in {figure.scope}"
    title = TITLES.get(figure.measure) or accuracy_name([reference.summary["accuracy"]])
    about = f"{job.title} against {reference.title}, {title}{where}"
    value = _value(figure, figure.job)
    values = f"{value} and {_value(figure, figure.reference)}"
    of = in_words(figure.ratio)
    if figure.job == figure.reference:
        return f"{about}: the same, {value}"
    if figure.says != "cannot_tell":
        return f"{about}: {figure.says}, {values}{of}"
    return f"{about}: cannot tell, {values}{of}{_what_is_needed(figure)}"


def _value(figure: Figure, value: float | None) -> str:
    return f"{value:,.0f}" if figure.measure == "tokens_per_second" else f"{value:.3g}"


def in_words(found: PairedRatio) -> str:
    """A ratio as text after a sentence, such as ": ratio 1.070 (1.020 to 1.120)"; empty if there is
    no ratio."""
    if found.ratio is None:
        return ""
    if found.ci95 is None:
        return f": ratio {found.ratio:.3f}, too few requests for an interval"
    return f": ratio {found.ratio:.3f} ({range_words(found.ci95, 3)})"


def _what_is_needed(figure: Figure) -> str:
    """Words on the smallest difference that these prompts tell, and on how many more are needed for
    the measured one; empty where not known."""
    more = figure.ratio.num_more_needed(figure.level)
    least = figure.ratio.detectable(figure.level)
    if not more or least is None:
        return ""
    told = f"; in four of five repeats these {figure.ratio.num_requests} tell {_size(least)}"
    if more > MOST_PROMPTS:
        return f"{told}, and no number of prompts one so small"
    prompts = "prompt" if more == 1 else "prompts"
    return f"{told}; about {more:,} more {prompts} needed for this one"


def _size(least: float) -> str:
    """A ratio above 1 as text, such as "differences of 12.0%" or "a factor of 2.9"."""
    if least > LARGEST_FACTOR:
        return f"no factor below {LARGEST_FACTOR}"
    return f"differences of {least - 1:.1%}" if least < 2 else f"a factor of {least:.1f}"


def drift_words(group: Group) -> str | None:
    """Sentence on the change of the machine between jobs; None unless their baseline changed."""
    if (drift := group.drift()) is None:
        return None
    slow, fast = drift
    if group.by == "speedup":
        so = "so tokens/s cannot be compared; speedups, each against its own baseline, can."
    else:
        so = "so the ranking by tokens/s may be the machine's."
    return (
        f"The same baseline ran at {slow.baseline_tokens_per_second:,.0f} tokens/s in "
        f"{slow.job.name} and at {fast.baseline_tokens_per_second:,.0f} in {fast.job.name}: the "
        f"machine changed between jobs, {so}"
    )


def verdicts(group: Group, *, brief: bool = False) -> Iterator[str]:
    """Yields a sentence for each measure over all requests, and for each category where a job
    differs; with `brief` only for the measure that ranks; no sentence without a ranking."""
    for each in group.others if group.reference else ():
        for figure in each.versus:
            if brief and (figure.measure, figure.scope) != (group.by, ALL):
                continue
            if figure.scope == ALL or figure.says != "cannot_tell":
                yield _sentence(figure, each, group)


def _sentence(figure: Figure, each: JobFigures, group: Group) -> str:
    assert group.reference is not None
    return sentence(figure, each.job, group.reference.job)


# ---------------------------------------------------------------- files


def as_json(group: Group) -> Json:
    """The comparison of ranked jobs as `hydraspec.compare` returns it."""
    assert group.reference is not None
    return {
        "schema_version": 1,
        "ranked_by": group.by,
        "reference": group.reference.job.name,
        "jobs": [_job_json(each, group) for each in group.jobs],
        "answer": decision.record() if (decision := decide(group)) else None,
        "verdicts": list(verdicts(group)),
        "drift": drift_words(group),
    }


def _job_json(each: JobFigures, group: Group) -> Json:
    return {
        "job": each.job.name,
        "label": each.job.label,
        "folders": [str(run.folder) for run in each.job.runs],
        "rank": each.rank,
        "told_from_best": each.told_from_best,
        "tokens_per_second": each.throughputs.get(ALL),
        "num_devices": each.job.num_devices,
        "speedup": each.speedups[ALL],
        "acceptance_length": each.lengths[ALL],
        "accuracy": each.accuracy,
        "baseline_tokens_per_second": each.baseline_tokens_per_second,
        "acceptance_rate_per_position": each.by_position,
        "by_category": {
            scope: {"speedup": each.speedups[scope], "acceptance_length": each.lengths[scope]}
            for scope in each.speedups
            if scope != ALL
        },
        "slowest_requests": [asdict(request) for request in each.slowest],
        "versus": [_figure_json(figure, each, group) for figure in each.versus],
    }


def _figure_json(figure: Figure, each: JobFigures, group: Group) -> Json:
    is_told = figure.says != "cannot_tell"
    return {
        "measure": figure.measure,
        "category": figure.scope or None,
        "says": figure.says,
        "value": figure.job,
        "reference_value": figure.reference,
        "ratio": figure.ratio.ratio,
        "ci95": figure.ratio.ci95,
        "p": figure.ratio.p,
        "p_adjusted": figure.p_adjusted,
        "num_requests": figure.ratio.num_requests,
        "num_more_needed": None if is_told else figure.ratio.num_more_needed(figure.level),
        "sentence": _sentence(figure, each, group),
    }


def table(group: Group) -> Table:
    """Table with a line for each measure of each job, over all requests and by category."""
    lines = [
        Line(
            cells=[
                *(str(each.rank or ""), each.job.name, each.job.label),
                *(str(len(each.job.runs)), scope or "all", measure),
                *map(_cell, (found["mean"], *(found["ci95"] or (None, None)))),
                *_versus_cells(each.against(measure, scope), group),
            ]
        )
        for each in group.jobs
        for scope in each.speedups
        for measure, by_scope in (
            ("tokens_per_second", each.throughputs),
            ("speedup", each.speedups),
            ("acceptance_length", each.lengths),
        )
        if (found := by_scope.get(scope))
    ]
    return Table(header=[*COLUMNS, *VERSUS], lines=lines)


def _versus_cells(figure: Figure | None, group: Group) -> list[str]:
    if figure is None or group.reference is None:
        return [""] * len(VERSUS)
    found = figure.ratio
    numbers = (found.ratio, *(found.ci95 or (None, None)), figure.p_adjusted)
    return [group.reference.job.name, *map(_cell, numbers), figure.says]


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def as_csv(found: Table) -> str:
    """The text of a table as CSV."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(found.cells)
    return out.getvalue()


def as_markdown(found: Table, notes: Sequence[str] = ()) -> str:
    """The text of a table in GitHub's Markdown, with notes as a list below."""
    header, *lines = found.cells
    rows = [header, ["---"] * len(header), *lines]
    text = "".join(f"| {' | '.join(map(escaped, row))} |\n" for row in rows)
    return text + "".join(f"\n- {escaped(note)}" for note in notes) + "\n"


def escaped(text: str) -> str:
    """Text escaped for a cell of a Markdown table."""
    for mark in "\\`*_<[|":
        text = text.replace(mark, "\\" + mark)
    return printable(text).replace("\n", " ")
