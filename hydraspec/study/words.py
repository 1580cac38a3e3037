"""A comparison in sentences, as JSON, CSV and Markdown."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from hydraspec.errors import printable
from hydraspec.metrics.accuracy import accuracy_name
from hydraspec.metrics.assessment import as_interval
from hydraspec.metrics.files import Json
from hydraspec.metrics.paired import PairedRatio
from hydraspec.metrics.statistics import range_words
from hydraspec.study.pairs import ALL, Figure
from hydraspec.study.ranking import Ranked, Ranking
from hydraspec.study.runs import Job

TITLES = {
    "speedup": "speedup",
    "tokens_per_second": "tokens/s",
    "acceptance_length": "acceptance length",
}
COLUMNS = ("rank", "job", "label", "runs", "category", "measure", "value", "ci95_low", "ci95_high")
VERSUS = ("reference", "ratio", "ratio_ci95_low", "ratio_ci95_high", "p_adjusted", "says")
MOST_PROMPTS = 1_000_000  # that are said to be needed
LARGEST_FACTOR = 10  # that is said to be told: no two jobs differ by more


def name_of(job: Job) -> str:
    """ "eagle3, K=5 (job 3)"."""
    return job.name if job.label == job.name else f"{job.label} (job {job.name})"


def sentence(figure: Figure, ranked: Ranked, reference: Ranked) -> str:
    """What is told of one measure of two jobs, in words."""
    where = "" if figure.scope == ALL else f" in {figure.scope}"
    title = TITLES.get(figure.measure) or accuracy_name([reference.job.summary["accuracy"]])
    about = f"{name_of(ranked.job)} against {name_of(reference.job)}, {title}{where}"
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
    """ ": ratio 1.07 (1.02 to 1.12)", or nothing where there is no ratio."""
    if found.ratio is None:
        return ""
    if found.ci95 is None:
        return f": ratio {found.ratio:.3f}, too few requests for an interval"
    return f": ratio {found.ratio:.3f} ({range_words(found.ci95, 3)})"


def _what_is_needed(figure: Figure) -> str:
    """What as many prompts tell, and how many more would tell the difference that was seen."""
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
    """ "differences of 12.0%", "a factor of 2.9"."""
    if least > LARGEST_FACTOR:
        return f"no factor below {LARGEST_FACTOR}"
    return f"differences of {least - 1:.1%}" if least < 2 else f"a factor of {least:.1f}"


def drift_words(ranking: Ranking) -> str | None:
    """What the machine did between the jobs, if its baseline changed."""
    if (drift := ranking.drift()) is None:
        return None
    slow, fast = drift
    if ranking.by == "speedup":
        so = "so tokens/s cannot be compared; speedups, each against its own baseline, can."
    else:
        so = "so the ranking by tokens/s may be the machine's."
    return (
        f"The same baseline ran at {slow.baseline_tokens_per_second:,.0f} tokens/s in "
        f"{slow.job.name} and at {fast.baseline_tokens_per_second:,.0f} in {fast.job.name}: the "
        f"machine changed between jobs, {so}"
    )


def verdicts(ranking: Ranking, *, brief: bool = False) -> Iterator[str]:
    """A sentence for each measure over all requests, and for categories where a job differs; with
    `brief` for the measure that ranks the jobs alone, over all requests."""
    for each in ranking.others:
        for figure in each.versus:
            if brief and (figure.measure, figure.scope) != (ranking.by, ALL):
                continue
            if figure.scope == ALL or figure.says != "cannot_tell":
                yield sentence(figure, each, ranking.reference)


# ---------------------------------------------------------------- files


def as_json(ranking: Ranking) -> Json:
    """The comparison as `hydraspec.compare` returns it."""
    return {
        "schema_version": 1,
        "ranked_by": ranking.by,
        "reference": ranking.reference.job.name,
        "jobs": [_job_json(each, ranking) for each in ranking.ranked],
        "verdicts": list(verdicts(ranking)),
        "drift": drift_words(ranking),
    }


def _job_json(each: Ranked, ranking: Ranking) -> Json:
    return {
        "job": each.job.name,
        "label": each.job.label,
        "folders": [str(run.folder) for run in each.job.runs],
        "rank": each.rank,
        "told_from_best": each.told_from_best,
        "tokens_per_second": as_interval(each.throughputs[ALL]) if each.throughputs else None,
        "num_devices": each.job.num_devices,
        "speedup": as_interval(each.speedups[ALL]),
        "acceptance_length": as_interval(each.lengths[ALL]),
        "accuracy": each.accuracy,
        "baseline_tokens_per_second": each.baseline_tokens_per_second,
        "acceptance_rate_per_position": each.by_position,
        "by_category": {
            scope: {
                "speedup": as_interval(each.speedups[scope]),
                "acceptance_length": as_interval(each.lengths[scope]),
            }
            for scope in each.speedups
            if scope != ALL
        },
        "slowest_requests": [asdict(request) for request in each.slowest],
        "versus": [_figure_json(figure, each, ranking.reference) for figure in each.versus],
    }


def _figure_json(figure: Figure, each: Ranked, reference: Ranked) -> Json:
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
        "num_more_needed": figure.ratio.num_more_needed(figure.level)
        if figure.says == "cannot_tell"
        else None,
        "sentence": sentence(figure, each, reference),
    }


def table(ranking: Ranking) -> tuple[list[str], list[list[str]]]:
    """Header and rows: each job's measures over all requests and by category."""
    rows = []
    for each in ranking.ranked:
        for scope in each.speedups:
            for measure, found in (
                ("tokens_per_second", each.throughputs.get(scope)),
                ("speedup", each.speedups[scope]),
                ("acceptance_length", each.lengths[scope]),
            ):
                if found is None or found.ratio is None:
                    continue
                versus = next(
                    (f for f in each.versus if (f.measure, f.scope) == (measure, scope)), None
                )
                rows.append(
                    [
                        *(str(each.rank or ""), each.job.name, each.job.label),
                        *(str(len(each.job.runs)), scope or "all", measure),
                        *map(_cell, (found.ratio, *(found.ci95 or (None, None)))),
                        *_versus_cells(versus, ranking),
                    ]
                )
    return [*COLUMNS, *VERSUS], rows


def _versus_cells(figure: Figure | None, ranking: Ranking) -> list[str]:
    if figure is None:
        return [""] * len(VERSUS)
    found = figure.ratio
    numbers = (found.ratio, *(found.ci95 or (None, None)), figure.p_adjusted)
    return [ranking.reference.job.name, *map(_cell, numbers), figure.says]


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def as_csv(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as CSV."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([header, *rows])
    return out.getvalue()


def as_markdown(header: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str]) -> str:
    """A table as GitHub's Markdown, with notes under it."""
    lines = [header, ["---"] * len(header), *rows]
    text = "".join(f"| {' | '.join(map(escaped, line))} |\n" for line in lines)
    return text + "".join(f"\n- {escaped(note)}" for note in notes) + "\n"


def escaped(text: str) -> str:
    """Text as it reads in a cell of a Markdown table."""
    for mark in "\\`*_<[|":
        text = text.replace(mark, "\\" + mark)
    return printable(text).replace("\n", " ")
