"""Comparison of the jobs of a sweep: a table, compare.html and compare.json.

Reads summaries and runs nothing; templates/compare.html has the words of the page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml  # type: ignore[import-untyped]
from rich.console import Console

from hydraspec.metrics.files import Json, pretty_json, write_whole
from hydraspec.metrics.run_files import (
    COMPARISON,
    COMPARISON_REPORT,
    OVERRIDES,
    REPORT,
    read_summary,
)
from hydraspec.metrics.summary import Summary
from hydraspec.report import html
from hydraspec.report.charts import Bar, Chart, horizontal_bars
from hydraspec.report.console import print_table, table_console
from hydraspec.report.figures import number, plus_minus

ALWAYS = ("method", "num_speculative_tokens")
# Typed keys that a summary records under their last name; others are shown as typed.
RECORDED = {
    *("target", "target.dtype", "method", "method.num_speculative_tokens", "method.verification"),
    *("method.draft_sampling", "engine", "engine.device", "engine.num_threads", "workload"),
    *("workload.concurrency", "sampling.temperature", "seed"),
}
MEASURES = (
    "acceptance_length",
    "acceptance_rate",
    "output_tokens_per_second",
    "time_per_output_token_ms",
    "speedup",
    "lossless",
    "accuracy",
    "num_requests",
    "warnings",
)
TITLES = {"num_speculative_tokens": "K", "concurrency": "at once"}
WIDE = 400  # columns where no terminal sets a limit: figures are never cut
HEADINGS = ("acceptance length", "tok/s", "ms/token", "speedup", "lossless", "exact match")


@dataclass(slots=True, kw_only=True)
class Row:
    """One job that ran."""

    job: str  # its folder's name
    summary: Summary
    settings: dict[str, object]  # the settings of ALWAYS, and those typed for this job
    is_best: bool = False

    @property
    def throughput(self) -> float:
        return self.summary["output_tokens_per_second"] or 0.0


@dataclass(slots=True, kw_only=True)
class Comparison:
    """A sweep's rows, the settings that differ between them, and jobs that left no summary."""

    rows: list[Row]
    columns: list[str]
    unfinished: list[str]


def compare(sweep_dir: Path, *, console: Console | None = None) -> None:
    """Print the comparison and write compare.html and compare.json into `sweep_dir`.

    A job that took over an equal job's result (`reused_from` in its summary) has no row. Among jobs
    that differ only in settings of the method, the fastest is marked.

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
    write_whole(page, _as_page(comparison, sweep_dir.name))
    _print(comparison, console)
    console.print(f"Comparison: {page}", soft_wrap=True, markup=False)


def read(sweep_dir: Path) -> Comparison:
    """Collect the jobs of a sweep folder."""
    folders = sorted((f for f in sweep_dir.iterdir() if f.is_dir()), key=_job_number)
    rows, unfinished = [], []
    for folder in folders:
        summary = read_summary(folder)
        if summary is None:
            unfinished += [folder.name] if folder.name.isdigit() else []
        elif "reused_from" not in summary:
            settings = _settings(summary, _typed(folder / OVERRIDES))
            rows.append(Row(job=folder.name, summary=summary, settings=settings))
    columns = _varying(rows)
    _mark_best(rows, columns)
    return Comparison(
        rows=rows,
        columns=columns or list(ALWAYS),
        unfinished=unfinished,
    )


def _typed(path: Path) -> dict[str, str]:
    """Key and value of each override of a job."""
    try:
        overrides = yaml.safe_load(path.read_text(encoding="utf-8")) or []
    except (OSError, yaml.YAMLError):
        return {}
    pairs = (str(override).lstrip("+").partition("=") for override in overrides)
    return {key: value for key, _, value in pairs if not key.startswith(("hydra", "tracker"))}


def _settings(summary: Summary, typed: Mapping[str, str]) -> dict[str, object]:
    settings: dict[str, object] = {key: summary.get(key) for key in ALWAYS}
    for key, value in typed.items():
        name = key.rpartition(".")[2] if key in RECORDED else key
        settings[name] = summary.get(name, value)
    return settings


def _mark_best(rows: Sequence[Row], columns: Sequence[str]) -> None:
    """Mark the fastest job of each combination of settings that are not the method's."""
    others = [c for c in columns if c not in ALWAYS and not c.startswith("method.")]
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if row.summary["status"] == "ok":
            key = tuple(str(row.settings.get(column)) for column in others)
            groups.setdefault(key, []).append(row)
    for group in groups.values():
        if len(group) > 1:
            max(group, key=lambda row: row.throughput).is_best = True


def _job_number(folder: Path) -> tuple[int, str]:
    return (int(folder.name) if folder.name.isdigit() else 10**9, folder.name)


# ---------------------------------------------------------------- as text, JSON and HTML


def _cells(row: Row, columns: Sequence[str]) -> list[str]:
    summary = row.summary
    accuracy = summary["accuracy"]
    verdict = summary["lossless"]["verdict"].replace("not_checked", "-")
    return [
        row.job,
        *(_shown(row.settings.get(column)) for column in columns),
        plus_minus(summary["acceptance_length"]),
        number(summary["output_tokens_per_second"], 0),
        number(summary["time_per_output_token_ms"]),
        plus_minus(summary["speedup"]),
        verdict if summary["status"] == "ok" else f"{verdict} ({summary['status']})",
        number(accuracy["exact_match"], 3) if accuracy else "-",
    ]


def _shown(value: object) -> str:
    return "-" if value is None else str(value)


def _header(columns: Sequence[str]) -> list[str]:
    return ["job", *(TITLES.get(column, column) for column in columns), *HEADINGS]


def _notes(comparison: Comparison) -> list[str]:
    notes = [
        "Marked: the most tokens per second among jobs that differ in the method only.",
        "±: half a 95 % interval, bootstrap over requests; ±-: too few requests for one.",
    ]
    if comparison.unfinished:
        notes.append(f"Without a result: job {', '.join(comparison.unfinished)}.")
    return notes


def _print(comparison: Comparison, console: Console) -> None:
    lines = [_cells(row, comparison.columns) for row in comparison.rows]
    best = {i for i, row in enumerate(comparison.rows) if row.is_best}
    for i in best:
        lines[i][0] = f"* {lines[i][0]}"
    print_table(console, "Comparison", _header(comparison.columns), lines, best=best)
    for note in _notes(comparison):
        console.print(note.replace("Marked", "*"), markup=False)


def _as_json(comparison: Comparison) -> Json:
    return {
        "schema_version": 1,
        "columns": comparison.columns,
        "rows": [_as_record(row, comparison.columns) for row in comparison.rows],
        "unfinished_jobs": comparison.unfinished,
    }


def _as_record(row: Row, columns: Sequence[str]) -> Json:
    figures: Mapping[str, object] = row.summary
    return {
        "job": row.job,
        "status": row.summary["status"],
        "is_best": row.is_best,
        **{column: row.settings.get(column) for column in columns},
        **{name: figures[name] for name in MEASURES},
    }


def _as_page(comparison: Comparison, name: str) -> str:
    rows = comparison.rows
    return html.render(
        "compare.html",
        title=f"Comparison {name}",
        common=_common(comparison),
        header=_header(comparison.columns),
        lines=[(_cells(row, comparison.columns), row.is_best) for row in rows],
        notes=_notes(comparison),
        jobs=[row.job for row in rows],
        report=REPORT,
        speedups=_chart(rows, "speedup", "Speedup of each job"),
        lengths=_chart(rows, "acceptance_length", "Acceptance length of each job"),
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


def _labels(rows: Sequence[Row]) -> list[str]:
    """The settings in which the rows differ, cut to fit a chart."""
    columns = _varying(rows) or [ALWAYS[0]]
    labels = []
    for row in rows:
        parts = [_label(column, row.settings.get(column)) for column in columns]
        labels.append(", ".join(parts)[:26])
    return labels


def _label(column: str, value: object) -> str:
    if column == "method":
        return _shown(value)
    return f"{TITLES.get(column, column.rpartition('.')[2])} {_shown(value)}"


def _chart(
    rows: Sequence[Row], key: Literal["speedup", "acceptance_length"], description: str
) -> Chart | None:
    """A bar for each job that has this figure, with a line at 1."""
    shown = [row for row in rows if (found := row.summary[key]) and found["mean"] is not None]
    if not shown:
        return None
    color = "var(--method)" if key == "speedup" else "var(--second)"
    bars = [
        Bar(
            label=label,
            value=found["mean"] or 0.0,
            text=number(found["mean"]),
            color="var(--good)" if key == "speedup" and row.is_best else color,
            ci95=found["ci95"],
        )
        for row, label in zip(shown, _labels(shown), strict=True)
        if (found := row.summary[key])
    ]
    return horizontal_bars(bars, description=description, mark=1.0)
