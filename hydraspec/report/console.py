"""What a person watching a run sees: a live progress bar on a terminal, a few plain lines
elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table

from hydraspec.errors import printable
from hydraspec.metrics.files import Json
from hydraspec.metrics.lossless import verdict_words
from hydraspec.metrics.meter import Meter
from hydraspec.metrics.sinks import Side, Sink
from hydraspec.metrics.statistics import MIN_REQUESTS
from hydraspec.types import Completion, StepRecord

TOO_FEW = f"fewer than {MIN_REQUESTS} requests"
SECONDS_BETWEEN_DRAWS = 0.1  # the display is drawn between steps only, so that no step pays for it


def run_console(*, quiet: bool) -> Console:
    """Where a run prints; `quiet` drops all of it, a terminal's bar too."""
    return Console(quiet=quiet, force_terminal=False if quiet else None)


def table_console(width: int, *, quiet: bool = False) -> Console:
    """The terminal; where there is none, `width` columns."""
    console = run_console(quiet=quiet)
    return console if console.is_terminal else Console(width=width, quiet=quiet)


class ConsoleSink(Sink):
    """Progress over requests with tokens per second and the running acceptance length; a table
    at the end.
    """

    def __init__(self, console: Console, *, method: str, sizes: Mapping[Side, int]) -> None:
        """sizes: requests each side will decode over the whole run."""
        self._console = console
        self._labels = {Side.method: method, Side.baseline: "none (baseline)"}
        self._sizes = sizes
        self._last_draw = 0.0
        self._progress: Progress | None = None
        self._tasks: dict[Side, TaskID] = {}
        if console.is_terminal:
            self._progress = self._start_progress()

    def on_round(self, side: Side, number: int, num_rounds: int) -> None:
        if self._progress is None:
            self._console.print(f"round {number} of {num_rounds}: {escape(self._labels[side])}")

    def on_step(self, side: Side, record: StepRecord, meter: Meter) -> None:
        now = time.monotonic()
        if self._progress is not None and now - self._last_draw > SECONDS_BETWEEN_DRAWS:
            self._last_draw = now
            self._draw(side, meter)

    def on_completion(self, side: Side, completion: Completion, meter: Meter) -> None:
        if self._progress is not None:
            self._progress.advance(self._tasks[side])

    def on_summary(self, summary: Json) -> list[str]:
        self.close()
        print_summary(self._console, summary)
        return []

    def close(self) -> None:
        if self._progress is not None:
            self._progress.refresh()
            self._progress.stop()
            self._progress = None

    def _start_progress(self) -> Progress:
        progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rates]}"),
            console=self._console,
            auto_refresh=False,
        )
        width = max(len(self._labels[side]) for side in self._sizes)
        for side, size in self._sizes.items():
            label = escape(self._labels[side].ljust(width))
            self._tasks[side] = progress.add_task(label, total=size, rates="")
        progress.start()
        return progress

    def _draw(self, side: Side, meter: Meter) -> None:
        assert self._progress is not None
        rates = f"{number(meter.totals.output_tokens_per_second, 0)} tok/s"
        if meter.totals.num_drafts:
            rates += f"  acceptance length {number(meter.totals.acceptance_length)}"
        self._progress.update(self._tasks[side], rates=rates)
        self._progress.refresh()


def number(value: float | None, digits: int = 2) -> str:
    """A figure for people; a dash where there is none."""
    return "-" if value is None else f"{value:,.{digits}f}"


def interval(estimate: Mapping[str, Any] | None, unit: str = "") -> str:
    """ "2.67 (2.58 to 2.75)", with the 95 % interval, or that there is none."""
    if estimate is None or estimate["mean"] is None:
        return "-"
    text = f"{estimate['mean']:.2f}{unit}"
    if not estimate["ci95"]:
        return f"{text} (n < {MIN_REQUESTS}, no interval)"
    low, high = estimate["ci95"]
    return f"{text} ({low:.2f} to {high:.2f})"


def print_summary(console: Console, summary: Mapping[str, Any]) -> None:
    """The final table, the verdict and the warnings."""
    baseline = summary["baseline"]
    table = Table(title=_title(summary), title_justify="left", title_style="bold")
    table.add_column("")
    table.add_column(summary["method"], justify="right")
    if baseline:
        table.add_column("none (baseline)", justify="right")
    for label, *cells in _table_rows(summary, baseline):
        table.add_row(label, *(cells if baseline else cells[:1]))
    console.print(table)
    for step in _step_lines(summary, baseline):
        console.print(step, soft_wrap=True)
    if summary["status"] != "ok":
        console.print(f"[bold]status: {summary['status']}[/]")
    style = "bold red" if summary["lossless"]["verdict"] == "diverged" else ""
    words = escape(printable(verdict_words(summary["lossless"])))
    console.print(f"Lossless: {words}", style=style, soft_wrap=True)
    for warning in summary["warnings"]:
        console.print(f"Warning: {escape(printable(warning))}", style="yellow", soft_wrap=True)


def _step_lines(summary: Mapping[str, Any], baseline: Mapping[str, Any] | None) -> Iterator[str]:
    """Where a decode step's wall time goes on a device, a line for each side that was profiled."""
    for name, side in ((summary["method"], summary), ("none", baseline or {})):
        if times := side.get("step_profile_ms"):
            yield (
                f"Decode step of {escape(name)}: {number(times['step_ms'])} ms "
                f"(device {number(times['device_ms'])}; host: schedule "
                f"{number(times['schedule_ms'])}, launch {number(times['launch_ms'])})"
            )


def _title(summary: Mapping[str, Any]) -> str:
    drafts = summary["num_speculative_tokens"]
    method = f"{summary['method']}, K={drafts}" if drafts else summary["method"]
    return escape(f"{summary['target']} with {method} on {summary['engine']}")


def _table_rows(summary: Mapping[str, Any], baseline: Mapping[str, Any] | None) -> list[list[str]]:
    other = baseline or {}
    rows = [["requests", str(summary["num_requests"]), str(other.get("num_requests", "-"))]]
    if summary["num_errors"]:
        rows.append(["errors", str(summary["num_errors"]), str(other.get("num_errors", "-"))])
    if summary["num_drafts"]:
        rates = "  ".join(number(rate) for rate in summary["acceptance_rate_per_position"])
        rows += [
            ["acceptance length", interval(summary["acceptance_length"]), "-"],
            [
                "  mean over requests",
                number(summary["acceptance_length"]["mean_over_requests"]),
                "-",
            ],
            ["acceptance rate by position", rates, "-"],
        ]
    for label, key, digits in (
        ("decode tokens per second", "output_tokens_per_second", 0),
        ("time per output token, ms", "time_per_output_token_ms", 2),
        ("time to first token, ms", "time_to_first_token_ms", 1),
    ):
        rows.append([label, number(summary[key], digits), number(other.get(key), digits)])
    if summary["accuracy"]:
        cells = [side["accuracy"] if side else None for side in (summary, baseline)]
        rows.append(["exact match", *(number(c["exact_match"], 3) if c else "-" for c in cells)])
    if summary["speedup"]:
        rows.append(["speedup", interval(summary["speedup"], "x"), "1"])
    return rows
