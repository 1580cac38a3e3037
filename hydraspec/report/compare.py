"""A sweep's jobs side by side: a table, compare.html and compare.json.

Reads summaries, runs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape as plain_markup
from rich.table import Table

from hydraspec.errors import printable
from hydraspec.metrics.files import Json, pretty_json, write_whole
from hydraspec.metrics.run_files import OVERRIDES, REPORT, read_summary
from hydraspec.report.charts import Bar, horizontal_bars
from hydraspec.report.console import number, table_console
from hydraspec.report.style import card, page, table

ALWAYS = ("method", "num_speculative_tokens")
# What is typed, and the summary's key for what it came to; other keys are shown as typed.
RECORDED = {
    "target": "target",
    "method": "method",
    "method.num_speculative_tokens": "num_speculative_tokens",
    "method.verification": "verification",
    "method.draft_sampling": "draft_sampling",
    "engine": "engine",
    "engine.device": "device",
    "engine.num_threads": "num_threads",
    "target.dtype": "dtype",
    "workload": "workload",
    "workload.concurrency": "concurrency",
    "sampling.temperature": "temperature",
    "seed": "seed",
}
MEASURES = (
    "acceptance_length",
    "acceptance_rate",
    "output_tokens_per_second",
    "time_per_output_token_ms",
    "speedup",
    "lossless",
    "accuracy",
)
TITLES = {"num_speculative_tokens": "K", "concurrency": "at once"}
WIDE = 400  # columns where no terminal sets a limit: figures are never cut
HEADINGS = ("acceptance length", "tok/s", "ms/token", "speedup", "lossless", "exact match")


@dataclass(slots=True, kw_only=True)
class Row:
    """One job that ran."""

    job: str  # its folder's name
    summary: Json
    settings: dict[str, object]  # every setting that was typed in some job, and those of ALWAYS
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

    A job that took over an equal job's result (`reused_from` in its summary) is shown once, as that
    job. The fastest job is marked, for each combination of the settings that are not the method's.

    Raises:
        OSError: with the path, if the folder cannot be written.
    """
    comparison = read(sweep_dir)
    console = console or table_console(WIDE)
    if not comparison.rows:
        console.print(f"no job of {sweep_dir} left a summary: nothing to compare", soft_wrap=True)
        return
    write_whole(sweep_dir / "compare.json", pretty_json(_as_json(comparison)))
    write_whole(sweep_dir / "compare.html", printable(_as_page(comparison, sweep_dir)))
    _print(comparison, console)
    console.print(f"Comparison: {sweep_dir / 'compare.html'}", soft_wrap=True, markup=False)


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


def _settings(summary: Json, typed: Mapping[str, str]) -> dict[str, object]:
    settings: dict[str, object] = {key: summary.get(key) for key in ALWAYS}
    for key, value in typed.items():
        name = RECORDED.get(key, key)
        settings[name] = summary.get(name, value)
    return settings


def _mark_best(rows: Sequence[Row], columns: Sequence[str]) -> None:
    around = [c for c in columns if c not in ALWAYS and not c.startswith("method.")]
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if row.summary["status"] == "ok":
            key = tuple(str(row.settings.get(column)) for column in around)
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
        _plus_minus(summary["acceptance_length"]),
        number(summary["output_tokens_per_second"], 0),
        number(summary["time_per_output_token_ms"]),
        _plus_minus(summary["speedup"]),
        verdict if summary["status"] == "ok" else f"{verdict} ({summary['status']})",
        number(accuracy["exact_match"], 3) if accuracy else "-",
    ]


def _plus_minus(estimate: Mapping[str, Any] | None) -> str:
    """The mean and half the 95 % interval, or a dash: short enough for a column."""
    if estimate is None or estimate["mean"] is None:
        return "-"
    if not estimate["ci95"]:
        return f"{number(estimate['mean'])} ±-"
    low, high = estimate["ci95"]
    return f"{estimate['mean']:.2f} ±{(high - low) / 2:.2f}"


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
    shown = Table(
        title="Comparison",
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
    )
    lines = [_cells(row, comparison.columns) for row in comparison.rows]
    for i, heading in enumerate(_header(comparison.columns)):
        width = max(len(cells[i]) for cells in lines)  # headings may wrap, figures may not
        shown.add_column(plain_markup(heading), justify="right", min_width=min(width, 20))
    for row, cells in zip(comparison.rows, lines, strict=True):
        cells[0] = f"* {cells[0]}" if row.is_best else cells[0]
        style = "bold green" if row.is_best else ""
        shown.add_row(*map(plain_markup, cells), style=style)
    console.print(shown)
    for note in _notes(comparison):
        console.print(note.replace("Marked", "*"), markup=False)


def _as_json(comparison: Comparison) -> Json:
    rows = [
        {
            "job": row.job,
            "status": row.summary["status"],
            "is_best": row.is_best,
            **{column: row.settings.get(column) for column in comparison.columns},
            **{name: row.summary[name] for name in MEASURES},
            "num_requests": row.summary["num_requests"],
            "warnings": row.summary["warnings"],
        }
        for row in comparison.rows
    ]
    return {
        "schema_version": 1,
        "columns": comparison.columns,
        "rows": rows,
        "unfinished_jobs": comparison.unfinished,
    }


def _as_page(comparison: Comparison, sweep_dir: Path) -> str:
    cells = [_cells(row, comparison.columns) for row in comparison.rows]
    best = {i for i, row in enumerate(comparison.rows) if row.is_best}
    links = " ".join(
        f'<a href="{escape(row.job)}/{REPORT}">{escape(row.job)}</a>' for row in comparison.rows
    )
    body = (
        f"<h1>Comparison of {len(comparison.rows)} runs</h1>"
        f'<p class="muted">{escape(_common(comparison))}</p>'
        + card("Results", table(_header(comparison.columns), cells, best=best))
        + f'<p class="muted small">{escape(" ".join(_notes(comparison)))} Reports: {links}</p>'
        + f'<div class="pair">{_speedups(comparison)}{_lengths(comparison)}</div>'
    )
    return page(f"Comparison {sweep_dir.name}", body)


def _common(comparison: Comparison) -> str:
    """What all rows share, of the things worth a line."""
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
    """What tells the rows apart, short enough for a chart."""
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


def _speedups(comparison: Comparison) -> str:
    rows = [row for row in comparison.rows if row.summary["speedup"]]
    if not rows:
        return ""
    bars = [
        Bar(
            label=label,
            value=row.summary["speedup"]["mean"],
            text=f"{row.summary['speedup']['mean']:.2f}",
            color="var(--good)" if row.is_best else "var(--method)",
            ci95=row.summary["speedup"]["ci95"],
        )
        for row, label in zip(rows, _labels(rows), strict=True)
    ]
    chart = horizontal_bars(bars, description="Speedup of each job", mark=1.0)
    return card("Speedup over method=none", chart, note="Each against its own baseline; dashed: 1")


def _lengths(comparison: Comparison) -> str:
    rows = [row for row in comparison.rows if row.summary["num_drafts"]]
    if not rows:
        return ""
    bars = [
        Bar(
            label=label,
            value=row.summary["acceptance_length"]["mean"],
            text=number(row.summary["acceptance_length"]["mean"]),
            color="var(--second)",
            ci95=row.summary["acceptance_length"]["ci95"],
        )
        for row, label in zip(rows, _labels(rows), strict=True)
    ]
    chart = horizontal_bars(bars, description="Acceptance length of each job", mark=1.0)
    return card("Acceptance length", chart, note="Tokens per verification; dashed: none accepted")
