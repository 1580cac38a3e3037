"""Comparison of the jobs of a sweep: a table, compare.html and compare.json.

Reads summaries and runs nothing; templates/compare.html has the words of the page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from hydraspec.errors import ConfigurationError, printable
from hydraspec.metrics.accuracy import accuracy_name
from hydraspec.metrics.draft_lengths import drafts_of
from hydraspec.metrics.files import Json, pretty_json, write_whole
from hydraspec.metrics.lossless import distribution_says
from hydraspec.metrics.run_files import (
    BENCH,
    COMPARISON,
    COMPARISON_REPORT,
    REPORT,
    job_number,
    read_summary,
)
from hydraspec.metrics.splits import split_words
from hydraspec.metrics.summary import Summary
from hydraspec.study import html, words
from hydraspec.study.compare import show_ranking, write_tables
from hydraspec.study.console import print_table, table_console
from hydraspec.study.ranked_blocks import ranking_blocks
from hydraspec.study.ranking import BEST, EQUAL, Ranked, Ranking, rank
from hydraspec.study.runs import Job, by_key, check_alike, read_run
from hydraspec.study.settings import typed_settings
from hydraspec.study.texts import number, percent, plus_minus

ALWAYS = ("method", "num_speculative_tokens")
# Typed keys that a summary records under their last name; others are shown as typed.
RECORDED = {
    *("target", "target.dtype", "method", "method.num_speculative_tokens", "method.verification"),
    *("method.draft_sampling", "engine", "engine.device", "engine.num_threads", "workload"),
    *("workload.concurrency", "workload.request_rate", "workload.burstiness"),
    *("sampling.temperature", "seed", "parallelism"),
}
MEASURES = (
    "acceptance_length",
    "acceptance_rate",
    "output_tokens_per_second",
    "time_per_output_token_ms",
    "latency_ms",
    "goodput",
    "speedup",
    "lossless",
    "accuracy",
    "num_requests",
    "warnings",
)
TITLES = {"num_speculative_tokens": "K", "concurrency": "at once", "request_rate": "requests/s"}
DISTRIBUTIONS = {
    "same": "same distribution",
    "different": "ANOTHER DISTRIBUTION",
    "cannot_tell": "distribution cannot be told",
}
WIDE = 400  # columns where no terminal sets a limit: figures are never cut
HEADINGS = ("acceptance length", "tok/s", "ms/token", "speedup", "lossless")
LATENCIES = ("queue p99, ms", "ttft p99, ms", "inter-token p99, ms", "goodput")  # with arrivals


@dataclass(slots=True, kw_only=True)
class Row:
    """One job that ran.

    Attributes:
        ranked: by paired speedup among jobs that differ in the method only; runs that differ in
            seed share one. None where there is nothing to rank.
    """

    job: str  # its folder's name
    folder: Path
    summary: Summary
    settings: dict[str, object]  # the settings of ALWAYS, and those typed for this job
    ranked: Ranked | None = None

    @property
    def rank(self) -> int | None:
        """Its rank, from 1."""
        return self.ranked.rank if self.ranked else None

    @property
    def mark(self) -> str:
        """BEST, EQUAL or nothing."""
        return self.ranked.mark if self.ranked else ""


@dataclass(slots=True, kw_only=True)
class Comparison:
    """A sweep's rows, the settings that differ between them, and jobs that left no summary.

    Attributes:
        rankings: title and ranking of jobs that differ in the method only.
        unranked: why jobs could not be ranked.
    """

    rows: list[Row]
    columns: list[str]
    unfinished: list[str]
    rankings: list[tuple[str, Ranking]]
    unranked: list[str]


def compare(sweep_dir: Path, *, console: Console | None = None) -> None:
    """Print the comparison and write compare.html, .json, .csv and .md into `sweep_dir`.

    A job that took over an equal job's result (`reused_from` in its summary) has no row. Jobs that
    differ only in settings of the method are ranked by paired speedup; the best is marked, and all
    that cannot be told from it.

    Raises:
        OSError: with the path, if the folder cannot be written.
    """
    comparison = read(sweep_dir)
    console = console or table_console(WIDE)
    if not comparison.rows:
        console.print(f"no job of {sweep_dir} left a summary: nothing to compare", soft_wrap=True)
        return
    page = sweep_dir / COMPARISON_REPORT
    write_whole(sweep_dir / COMPARISON, pretty_json(_as_json(comparison)))
    write_whole(page, _as_page(comparison, sweep_dir))
    write_tables(sweep_dir, [ranking for _, ranking in comparison.rankings])
    _print(comparison, console)
    console.print(f"Comparison: {page}", soft_wrap=True, markup=False)


def read(sweep_dir: Path) -> Comparison:
    """Collect the jobs of a sweep folder."""
    folders = sorted((f for f in sweep_dir.iterdir() if f.is_dir()), key=job_number)
    rows, unfinished = [], []
    for folder in folders:
        summary = read_summary(folder)
        if summary is None:
            is_run = folder.name.isdigit() and not (folder / BENCH).is_file()
            unfinished += [folder.name] if is_run else []
        elif "reused_from" not in summary:
            settings = _settings(summary, typed_settings(folder))
            row = Row(job=folder.name, folder=folder, summary=summary, settings=settings)
            rows.append(row)
    columns = _varying(rows)
    rankings, unranked = _ranked(rows, columns)
    return Comparison(
        rows=rows,
        columns=columns or list(ALWAYS),
        unfinished=unfinished,
        rankings=rankings,
        unranked=unranked,
    )


def _settings(summary: Summary, typed: Mapping[str, str]) -> dict[str, object]:
    settings: dict[str, object] = dict(
        zip(ALWAYS, (summary["method"], drafts_of(summary)), strict=True)
    )
    for key, value in typed.items():
        if key in RECORDED:
            name = key.rpartition(".")[2]
            settings.setdefault(name, summary.get(name, value))
        else:  # "baseline" and "cudagraph" are more in a summary than what was typed
            settings.setdefault(key, value)
    return settings


def _ranked(
    rows: Sequence[Row], columns: Sequence[str]
) -> tuple[list[tuple[str, Ranking]], list[str]]:
    """A ranking for each combination of settings that are neither the method's nor the seed, and
    why others could not be ranked. Sets `ranked` of the rows."""
    others = [c for c in columns if c not in (*ALWAYS, "seed") and not c.startswith("method.")]
    finished = [row for row in rows if row.summary["status"] == "ok"]
    groups = by_key(finished, [_labels(row, others) for row in finished])
    rankings, unranked = [], []
    for title, group in groups.items():
        try:
            ranking = _rank(group, columns)
        except ConfigurationError as error:
            where = f" with {title}" if title else ""
            unranked.append(f"Not ranked{where}: {str(error).splitlines()[0]}.")
            continue
        if ranking is not None:
            rankings.append((title, ranking))
    return rankings, unranked


def _rank(group: Sequence[Row], columns: Sequence[str]) -> Ranking | None:
    """The ranking of rows over the same prompts, None of a single job.

    Raises:
        ConfigurationError: they cannot be compared.
    """
    settings = [column for column in columns if column != "seed"]
    pools = by_key(group, [_labels(row, settings) for row in group])
    if len(pools) < 2:
        return None
    jobs = {"+".join(row.job for row in pooled): (label, pooled) for label, pooled in pools.items()}
    made = [
        Job(name=name, label=label, runs=[read_run(row.folder) for row in pooled])
        for name, (label, pooled) in jobs.items()
    ]
    check_alike(made)
    ranking = rank(made)
    for each in ranking.ranked:
        for row in jobs[each.job.name][1]:
            row.ranked = each
    return ranking


# ---------------------------------------------------------------- as text, JSON and HTML


def _verdict(summary: Summary) -> str:
    """Of greedy requests, and of sampled ones where their distribution was tested."""
    greedy = summary["lossless"]["verdict"].replace("not_checked", "-")
    if (sampled := summary["lossless"].get("distribution")) is None:
        return greedy
    says = DISTRIBUTIONS[distribution_says(sampled)]
    return says if greedy == "-" else f"{greedy}, {says}"


def _cells(row: Row, columns: Sequence[str], *, arrivals: bool) -> list[str]:
    summary = row.summary
    accuracy = summary["accuracy"]
    verdict = _verdict(summary)
    return [
        row.job,
        *(_shown(column, row.settings.get(column)) for column in columns),
        plus_minus(summary["acceptance_length"]),
        number(summary["output_tokens_per_second"], 0),
        number(summary["time_per_output_token_ms"]),
        plus_minus(summary["speedup"]),
        verdict if summary["status"] == "ok" else f"{verdict} ({summary['status']})",
        number(accuracy["exact_match"], 3) if accuracy else "-",
        *(_latency_cells(summary) if arrivals else ()),
    ]


def _latency_cells(summary: Summary) -> list[str]:
    found, limits = summary["latency_ms"], summary["goodput"]
    latencies = (found["queue"], found["ttft"], found["inter_token"])
    share = percent(limits["share"]) if limits else "-"
    return [*(number(latency["p99"], 1) for latency in latencies), share]


def _have_arrivals(rows: Sequence[Row]) -> bool:
    """Returns whether requests arrive over time in any of the runs, some of which may be older."""
    return any(row.summary.get("request_rate") is not None for row in rows)


def _shown(column: str, value: object) -> str:
    if column == "parallelism":
        value = split_words(value) or value  # of an older run: as typed
    return "-" if value is None else str(value)


def _header(comparison: Comparison, *, arrivals: bool) -> list[str]:
    settings = (TITLES.get(column, column) for column in comparison.columns)
    correct = accuracy_name(row.summary["accuracy"] for row in comparison.rows)
    return ["job", *settings, *HEADINGS, correct, *(LATENCIES if arrivals else ())]


def _notes(comparison: Comparison) -> list[str]:
    notes = [
        f"{BEST}: the highest paired speedup among jobs that differ in the method only; {EQUAL}: "
        "cannot be told from it.",
        "±: half a 95 % interval, bootstrap over requests; ±-: too few requests for one.",
    ]
    notes += comparison.unranked
    if comparison.unfinished:
        notes.append(f"Without a result: job {', '.join(comparison.unfinished)}.")
    return notes


def _print(comparison: Comparison, console: Console) -> None:
    arrivals = _have_arrivals(comparison.rows)
    lines = [_cells(row, comparison.columns, arrivals=arrivals) for row in comparison.rows]
    best = {i for i, row in enumerate(comparison.rows) if row.mark}
    for i in best:
        lines[i][0] = f"{comparison.rows[i].mark} {lines[i][0]}"
    header = _header(comparison, arrivals=arrivals)
    print_table(console, "Comparison", header, lines, best=best)
    for title, ranking in comparison.rankings:
        show_ranking(console, ranking, _ranking_title(title))
    for note in _notes(comparison):
        console.print(printable(note), markup=False, soft_wrap=True)


def _ranking_title(title: str) -> str:
    return f"Jobs by paired speedup{f', {title}' if title else ''}"


def _as_json(comparison: Comparison) -> Json:
    return {
        "schema_version": 1,
        "columns": comparison.columns,
        "rows": [_as_record(row, comparison.columns) for row in comparison.rows],
        "unfinished_jobs": comparison.unfinished,
        "rankings": [
            {"settings": title, **words.as_json(ranking)} for title, ranking in comparison.rankings
        ],
    }


def _as_record(row: Row, columns: Sequence[str]) -> Json:
    figures: Mapping[str, object] = row.summary
    return {
        "job": row.job,
        "status": row.summary["status"],
        "is_best": row.rank == 1,
        "rank": row.rank,
        "told_from_best": row.ranked is not None and row.ranked.told_from_best,
        **{column: row.settings.get(column) for column in columns},
        **{name: figures.get(name) for name in MEASURES},
    }


def _as_page(comparison: Comparison, folder: Path) -> str:
    rows, arrivals = comparison.rows, _have_arrivals(comparison.rows)
    return html.render(
        "compare.html",
        title=f"Comparison {folder.name}",
        common=_common(comparison),
        header=_header(comparison, arrivals=arrivals),
        lines=[(row, _cells(row, comparison.columns, arrivals=arrivals)[1:]) for row in rows],
        notes=_notes(comparison),
        report=REPORT,
        rankings=[
            ranking_blocks(made, _ranking_title(title)) for title, made in comparison.rankings
        ],
        href=partial(html.link_to_page, folder=folder),
    )


def _common(comparison: Comparison) -> str:
    """The settings that all rows share."""
    keys = ("target", "engine", "workload", "concurrency", "dtype", "device")
    parts = []
    for key in keys:
        values = {str(row.summary.get(key)) for row in comparison.rows}
        if len(values) == 1 and key not in comparison.columns:
            parts.append(f"{key} {values.pop()}")
    return ", ".join(parts)


def _varying(rows: Sequence[Row]) -> list[str]:
    names = dict.fromkeys(name for row in rows for name in (*ALWAYS, *row.settings))
    return [name for name in names if len({str(row.settings.get(name)) for row in rows}) > 1]


def _labels(row: Row, columns: Sequence[str]) -> str:
    return ", ".join(_label(column, row.settings.get(column)) for column in columns)


def _label(column: str, value: object) -> str:
    shown = _shown(column, value)
    if column in ("method", "parallelism"):
        return shown
    if column == "num_speculative_tokens":
        return f"K={shown}"
    return f"{TITLES.get(column, column.rpartition('.')[2])} {shown}"
