"""Comparison of the jobs of a sweep: a table, compare.html and compare.json.

This module reads run folders and runs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from hydraspec.errors import ConfigurationError, printable
from hydraspec.metrics.accuracy import accuracy_name
from hydraspec.metrics.draft_lengths import drafts_of
from hydraspec.metrics.files import Json, pretty_json, write_whole
from hydraspec.metrics.formats import columns, formats_of, shared_words
from hydraspec.metrics.lossless import distribution_says
from hydraspec.metrics.run_files import (
    COMPARISON,
    COMPARISON_REPORT,
    job_number,
    read_summary,
    skipped_jobs,
)
from hydraspec.metrics.splits import split_words
from hydraspec.metrics.summary import Interval, Summary
from hydraspec.study import formats, html, words
from hydraspec.study.answers import verdict
from hydraspec.study.blocks import Block, Line, Section, Study, Table, Verdict
from hydraspec.study.compare import section, show, tell, write_tables
from hydraspec.study.console import WIDE, print_block, table_console
from hydraspec.study.decision import decide
from hydraspec.study.formats import Formats
from hydraspec.study.groups import families_of, unfinished
from hydraspec.study.jobs import differing_keys
from hydraspec.study.pairs import ALL
from hydraspec.study.ranking import Group, JobFigures
from hydraspec.study.runs import Run, ran_without_graphs, read_run
from hydraspec.study.settings import typed_settings
from hydraspec.study.speedups import kind_of
from hydraspec.study.texts import number, percent, plus_minus

ALWAYS = ("method", "num_speculative_tokens")
# Overrides that a summary records under the last part of their key; others are shown as typed.
RECORDED = {
    *("target", "target.dtype", "method", "method.num_speculative_tokens", "method.verification"),
    *("method.draft_sampling", "engine", "engine.device", "engine.num_threads", "workload"),
    *("workload.concurrency", "workload.request_rate", "workload.burstiness"),
    *("sampling.temperature", "seed", "parallelism"),
}
MEASURES = (  # keys of a summary that compare.json repeats
    *("acceptance_length", "acceptance_rate", "output_tokens_per_second"),
    *("time_per_output_token_ms", "latency_ms", "goodput", "speedup", "lossless", "accuracy"),
    *("num_requests", "warnings"),
)
TITLES = {"num_speculative_tokens": "K", "concurrency": "at once", "request_rate": "requests/s"}
DISTRIBUTIONS = {
    "same": "same distribution",
    "different": "ANOTHER DISTRIBUTION",
    "cannot_tell": "distribution cannot be told",
}
HEADINGS = ("acceptance length", "tok/s", "ms/token", "speedup", "lossless")
LATENCIES = ("queue p99, ms", "ttft p99, ms", "inter-token p99, ms", "goodput")  # with arrivals
COMMON = ("target", "engine", "workload", "concurrency", "dtype", "device")
NO_INTERVAL = "±: half a 95 % interval, bootstrap over requests; ±-: too few requests for one."


@dataclass(slots=True, kw_only=True)
class Row:
    """A job of the sweep that left a summary.

    Attributes:
        figures: the figures of its job in the ranking, which runs that differ in seed share; None
            for a run that did not finish or cannot be read.
    """

    folder: Path
    summary: Summary
    settings: dict[str, object]  # the settings of ALWAYS, and those typed for this job
    figures: JobFigures | None = None

    @property
    def speedup(self) -> Interval | None:
        """The speedup in the ranking, from the step costs of all jobs; unranked, the run's own."""
        own = self.summary["speedup"]
        return self.figures.speedups[ALL] if self.figures and self.rank and own else own

    @property
    def rank(self) -> int | None:
        """The rank of the job, from 1; None for a job without a rank."""
        return self.figures.rank if self.figures else None

    @property
    def mark(self) -> str:
        """BEST, EQUAL or "", as `JobFigures.mark`."""
        return self.figures.mark if self.figures else ""


@dataclass(slots=True, kw_only=True)
class Comparison:
    """A sweep's rows, the settings that differ between them, and the jobs that left no result.

    Attributes:
        columns: names of the settings that differ between rows.
        unfinished: names of the jobs that left no result and were not skipped.
        skipped: settings of each skipped job and the reason, by folder.
        groups: the ranked groups: jobs over the same prompts on the same setup.
        unranked: the reasons why jobs could not be ranked.
        formats: comparisons of one model in several number formats, which then have the answers.
    """

    rows: list[Row]
    columns: list[str]
    unfinished: list[str]
    skipped: dict[Path, tuple[dict[str, str], str]]
    groups: list[Group]
    unranked: list[str]
    formats: list[Formats]


def compare(sweep_dir: Path, *, console: Console | None = None) -> None:
    """Print the comparison and write compare.html and .json into `sweep_dir`, and .csv and .md if
    jobs are ranked; write nothing where no job left a summary.

    A job that took over an equal job's result (`reused_from` in its summary) has no row. Jobs over
    the same prompts on the same setup are ranked by paired speedup. The best job is marked, and so
    are all jobs that are not significantly worse.

    Raises:
        OSError: a file cannot be written; the error has its path.
    """
    found = read(sweep_dir)
    console = console or table_console(WIDE)
    if not found.rows:
        console.print(f"no job of {sweep_dir} left a summary: nothing to compare", soft_wrap=True)
        return
    page = sweep_dir / COMPARISON_REPORT
    write_whole(sweep_dir / COMPARISON, pretty_json(_as_json(found)))
    write_whole(page, html.study_page(_as_study(found, sweep_dir), sweep_dir))
    write_tables(sweep_dir, found.groups)
    for answer in (formats.verdict(one) for one in found.formats):
        console.print(printable(answer.text), markup=False, soft_wrap=True, highlight=False)
    for group in found.groups if not found.formats else ():
        tell(group, console)
    print_block(console, _table(found))
    for block in map(formats.block, found.formats):
        print_block(console, block)
        console.print(printable(block.note), markup=False, soft_wrap=True)
    for group in found.groups:
        show(group, title=_title(group), console=console)
    for note in (NO_INTERVAL, *_notes(found)):
        console.print(printable(note), markup=False, soft_wrap=True)
    console.print(f"Comparison: {page}", soft_wrap=True, markup=False)


def read(sweep_dir: Path) -> Comparison:
    """The jobs of a sweep folder, with the rankings of the jobs that can be compared."""
    rows = []
    for folder in sorted((f for f in sweep_dir.iterdir() if f.is_dir()), key=job_number):
        summary = read_summary(folder)
        if summary and "reused_from" not in summary:
            settings = _settings(summary, typed_settings(folder))
            rows.append(Row(folder=folder, summary=summary, settings=settings))
    skipped = {
        job: ({_name(key): value for key, value in typed_settings(job).items()}, why)
        for job, why in skipped_jobs(sweep_dir).items()
    }
    of_skipped = ({**row.settings, **typed} for row in rows[:1] for typed, _ in skipped.values())
    columns = differing_keys([*(row.settings for row in rows), *of_skipped])
    runs, unranked = _readable(rows)
    groups = [group for family in families_of(runs, is_strict=False) for group in family.groups]
    unranked += [group.unranked for group in groups if group.unranked]
    ranked = {run.folder: one for group in groups for one in group.jobs for run in one.job.runs}
    for row in rows:
        row.figures = ranked.get(row.folder)
    return Comparison(
        rows=rows,
        columns=columns or list(ALWAYS),
        unfinished=[folder.name for folder in unfinished(sweep_dir)],
        skipped=skipped,
        groups=[group for group in groups if group.reference],
        unranked=unranked,
        formats=formats.found_in(groups),
    )


def _readable(rows: Sequence[Row]) -> tuple[list[Run], list[str]]:
    """The runs that finished, and sentences on runs that cannot be read."""
    runs, refused = [], []
    for row in rows:
        if row.summary["status"] != "ok":
            continue
        try:
            runs.append(read_run(row.folder))
        except ConfigurationError as error:
            refused.append(f"Not ranked: {str(error).splitlines()[0]}")
    return [run for run in runs if run.has_finished], refused


def _name(key: str) -> str:
    """The name of the column for an override's key."""
    return key.rpartition(".")[2] if key in RECORDED else key


def _settings(summary: Summary, typed: Mapping[str, str]) -> dict[str, object]:
    settings: dict[str, object] = dict(
        zip(ALWAYS, (summary["method"], drafts_of(summary)), strict=True)
    )
    for key, value in typed.items():
        name = _name(key)
        if key in RECORDED:
            settings.setdefault(name, summary.get(name, value))
        else:  # "baseline" and "cudagraph" hold other values in a summary
            settings.setdefault(key, value)
    return settings


# ---------------------------------------------------------------- as a table, a page and JSON


def _table(found: Comparison) -> Block:
    # Runs of earlier versions do not say their rate.
    arrivals = any(row.summary.get("request_rate") is not None for row in found.rows)
    settings = (TITLES.get(column, column) for column in found.columns)
    correct = accuracy_name(row.summary["accuracy"] for row in found.rows)
    more = columns([formats_of(row.summary) for row in found.rows])
    header = ["job", *settings, *HEADINGS, correct, *(LATENCIES if arrivals else ())]
    header += [heading for heading, _ in more]
    kinds = {
        run.folder: kind_of(one, group)
        for group in found.groups
        for one in group.jobs
        for run in one.job.runs
    }
    lines = {
        row.folder: Line(
            cells=[
                f"{row.mark} {row.folder.name}".strip(),
                *(_shown(column, row.settings.get(column)) for column in found.columns),
                *_figure_cells(row),
                *(_latency_cells(row.summary) if arrivals else ()),
                *(cells[i] for _, cells in more),
            ],
            link=row.folder,
            kind=kinds.get(row.folder, ""),
        )
        for i, row in enumerate(found.rows)
    }
    for job, (of_job, _) in found.skipped.items():
        cells = [job.name, *(_shown(column, of_job.get(column)) for column in found.columns)]
        rest = ["-"] * (len(header) - len(cells))
        rest[HEADINGS.index("lossless")] = "skipped"
        lines[job] = Line(cells=[*cells, *rest])
    in_order = [lines[folder] for folder in sorted(lines, key=job_number)]
    table = Table(header=header, lines=in_order, num_left=0)
    return Block(title="Comparison", table=table)


def _figure_cells(row: Row) -> Iterator[str]:
    summary = row.summary
    greedy, status, accuracy = _verdict(summary), summary["status"], summary["accuracy"]
    yield plus_minus(summary["acceptance_length"])
    yield number(summary["output_tokens_per_second"], 0)
    yield number(summary["time_per_output_token_ms"])
    yield plus_minus(row.speedup)
    yield greedy if status == "ok" else f"{greedy} ({status})"
    yield number(accuracy["exact_match"], 3) if accuracy else "-"


def _verdict(summary: Summary) -> str:
    """Cell with the verdict on greedy requests, and on sampled ones if their distribution was
    tested."""
    greedy = summary["lossless"]["verdict"].replace("not_checked", "-")
    if (sampled := summary["lossless"].get("distribution")) is None:
        return greedy
    says = DISTRIBUTIONS[distribution_says(sampled)]
    return says if greedy == "-" else f"{greedy}, {says}"


def _latency_cells(summary: Summary) -> list[str]:
    found, limits = summary["latency_ms"], summary["goodput"]
    latencies = (found["queue"], found["ttft"], found["inter_token"])
    share = percent(limits["share"] if limits else None)
    return [*(number(latency["p99"], 1) for latency in latencies), share]


def _shown(column: str, value: object) -> str:
    if column == "parallelism":
        value = split_words(value) or value  # of an older version: as typed
    return "-" if value is None else str(value)


def _notes(found: Comparison) -> list[str]:
    notes = [f"{why}." for why in found.unranked]
    if shared := shared_words([formats_of(row.summary) for row in found.rows]):
        notes.append(f"All jobs have {shared}.")
    eager = [row.folder.name for row in found.rows if ran_without_graphs(row.summary)]
    if len(eager) > 1 and any(column.startswith("cudagraph") for column in found.columns):
        notes.append(f"Jobs {', '.join(eager)} ran without graphs, whatever cudagraph asked for.")
    notes += _skipped(found)
    if found.unfinished:
        notes.append(f"Without a result: job {', '.join(found.unfinished)}.")
    return notes


def _skipped(found: Comparison) -> list[str]:
    """A line for each reason for which jobs were skipped, with these jobs."""
    jobs: dict[str, list[str]] = {}
    for job, (_, why) in found.skipped.items():
        jobs.setdefault(why, []).append(job.name)
    lines = []
    for why, names in jobs.items():
        which = f"Jobs {', '.join(names)} were" if len(names) > 1 else f"Job {names[0]} was"
        lines.append(f"{which} skipped: {why}.")
    return lines


def _answers(found: Comparison) -> list[Verdict]:
    """The verdicts on formats; without any, those on the ranked groups."""
    if found.formats:
        return [formats.verdict(one) for one in found.formats]
    return [verdict(group) for group in found.groups]


def _records(found: Comparison) -> list[Json]:
    return [made.record() for group in found.groups if (made := decide(group))]


def _title(group: Group) -> str:
    return f"Jobs by paired speedup{f', {group.title}' if group.title else ''}"


def _as_json(found: Comparison) -> Json:
    return {
        "schema_version": 1,
        "columns": found.columns,
        "answer": answers[0] if len(answers := _records(found)) == 1 else None,
        "rows": [_as_record(row, found.columns) for row in found.rows],
        "unfinished_jobs": found.unfinished,
        "skipped_jobs": [
            {"job": job.name, **settings, "reason": why}
            for job, (settings, why) in found.skipped.items()
        ],
        "formats": [formats.as_json(one) for one in found.formats],
        "rankings": [{"settings": group.title, **words.as_json(group)} for group in found.groups],
    }


def _as_record(row: Row, columns: Sequence[str]) -> Json:
    figures: Mapping[str, object] = row.summary
    return {
        "job": row.folder.name,
        "status": row.summary["status"],
        "is_best": row.rank == 1,
        "rank": row.rank,
        "told_from_best": row.figures is not None and row.figures.told_from_best,
        **{column: row.settings.get(column) for column in columns},
        **{name: figures.get(name) for name in MEASURES},
        "speedup": row.speedup,
    }


def _are_ranked(found: Comparison) -> bool:
    """Returns whether the tables of the rankings show all rows with all figures."""
    ranked = [run.folder for group in found.groups for one in group.jobs for run in one.job.runs]
    has_latencies = any(row.summary.get("request_rate") is not None for row in found.rows)
    return len(ranked) == len(found.rows) and not has_latencies and not found.skipped


def _as_study(found: Comparison, folder: Path) -> Study:
    shared = [
        f"{key} {found.rows[0].summary.get(key)}"
        for key in COMMON
        if key not in found.columns and len({str(row.summary.get(key)) for row in found.rows}) == 1
    ]
    return Study(
        question=f"Comparison of {len(found.rows)} runs of {folder.name}",
        facts=", ".join(shared),
        notes=_notes(found),
        verdicts=_answers(found),
        sections=[
            *(formats.section(one) for one in found.formats),
            *(section(group, _title(group), with_speeds=True) for group in found.groups),
            *([] if _are_ranked(found) else [Section(title="", blocks=[_table(found)])]),
        ],
    )
