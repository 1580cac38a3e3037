"""Console output: a live progress bar on a terminal, plain lines elsewhere, and tables."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table

from hydraspec.errors import printable
from hydraspec.metrics.accuracy import accuracy_name
from hydraspec.metrics.draft_figures import draft_share
from hydraspec.metrics.draft_lengths import drafts_name
from hydraspec.metrics.formats import formats_of, shared_words
from hydraspec.metrics.lossless import verdict_words
from hydraspec.metrics.meter import Meter
from hydraspec.metrics.sinks import Side, Sink
from hydraspec.metrics.summary import Baseline, Summary
from hydraspec.study.blocks import Block
from hydraspec.study.texts import (
    drafts_words,
    engine_words,
    interval,
    limit_words,
    number,
    percent,
    percentile_words,
)
from hydraspec.types import Completion, StepRecord

WIDE = 400  # columns where there is no terminal, so that figures are never cut
SECONDS_BETWEEN_DRAWS = 0.1  # at least; drawn between steps, so that no step is slowed


def run_console(*, quiet: bool) -> Console:
    """The console that a run prints to; `quiet` drops everything, the progress bar included."""
    return Console(quiet=quiet, force_terminal=False if quiet else None)


def table_console(width: int, *, quiet: bool = False) -> Console:
    """Console of the terminal, or of `width` columns where there is no terminal."""
    console = run_console(quiet=quiet)
    return console if console.is_terminal else Console(width=width, quiet=quiet)


def print_table(
    console: Console,
    title: str,
    header: Sequence[str],
    lines: Sequence[Sequence[str]],
    *,
    num_left: int = 0,
    best: Collection[int] = (),
) -> None:
    """Print a table of figures; headings may wrap, figures may not. The first `num_left` columns
    are aligned left, and the lines with an index in `best` are highlighted.
    """
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=0)
    table.pad_edge = False
    for i, heading in enumerate(header):
        width = max((len(line[i]) for line in lines), default=0)
        table.add_column(
            escape(heading),
            justify="left" if i < num_left else "right",
            min_width=min(width, 20),
        )
    for i, line in enumerate(lines):
        table.add_row(*map(escape, line), style="bold green" if i in best else "")
    console.print(table)


def print_block(console: Console, block: Block) -> None:
    """Print the block's table, if the block has one."""
    if (table := block.table) is None:
        return
    header = [printable(cell) for cell in table.header]
    lines = [[printable(cell) for cell in line.cells] for line in table.lines]
    best = {i for i, line in enumerate(table.lines) if line.is_best}
    print_table(console, block.title, header, lines, num_left=table.num_left, best=best)


class ConsoleSink(Sink):
    """Sink that shows progress over requests, tokens per second and the acceptance length so far,
    and prints a table at the end.
    """

    def __init__(
        self,
        console: Console,
        *,
        method: str,
        sizes: Mapping[Side, int],
        logged: Collection[str] = (),
    ) -> None:
        """`sizes` is the number of requests that each side decodes over the whole run; warnings in
        `logged` are not printed again."""
        self._console, self._logged = console, logged
        self._labels = {Side.method: method, Side.baseline: "none (baseline)"}
        self._sizes = sizes
        self._last_draw = 0.0
        self._is_idle = False
        self._progress: Progress | None = None
        self._tasks: dict[Side, TaskID] = {}
        if console.is_terminal:
            self._progress = self._start_progress()

    def on_round(self, side: Side, number: int, num_rounds: int) -> None:
        if self._progress is None:
            self._console.print(f"round {number} of {num_rounds}: {escape(self._labels[side])}")

    def on_step(self, side: Side, record: StepRecord, meter: Meter) -> None:
        now = time.monotonic()
        self._is_idle = record.num_running + record.num_waiting == 0
        if self._progress is not None and now - self._last_draw > SECONDS_BETWEEN_DRAWS:
            self._last_draw = now
            self._draw(side, meter)

    def on_completion(self, side: Side, completion: Completion, meter: Meter) -> None:
        if self._progress is not None:
            self._progress.advance(self._tasks[side])
            if self._is_idle:  # it may be long until the next step draws
                self._draw(side, meter)

    def on_summary(self, summary: Summary) -> list[str]:
        self.close()
        print_summary(self._console, summary, self._logged)
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


def print_summary(console: Console, summary: Summary, logged: Collection[str] = ()) -> None:
    """Print the final table, step times, the lossless verdict, the assessment, and the warnings but
    for those that are logged."""
    sides: list[Summary | Baseline] = [summary]
    names = [summary["method"]]
    if summary["baseline"]:
        sides, names = [summary, summary["baseline"]], [summary["method"], "none (baseline)"]
    table = Table(title=_title(summary), title_justify="left", title_style="bold")
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right")
    for label, *cells in _table_rows(summary, sides):
        table.add_row(label, *cells[: len(sides)])
    console.print(table)
    if formats := shared_words([formats_of(summary)]):
        console.print(f"N{escape(printable(formats))[1:]}", soft_wrap=True)
    for name, side in zip((summary["method"], "none"), sides, strict=False):
        if times := side["step_profile_ms"]:
            console.print(
                f"Decode step of {escape(name)}: {number(times['step_ms'])} ms "
                f"(device {number(times['device_ms'])}; host: schedule "
                f"{number(times['schedule_ms'])}, launch {number(times['launch_ms'])})",
                soft_wrap=True,
            )
    if summary["status"] != "ok":
        console.print(f"[bold]status: {summary['status']}[/]")
    style = "bold red" if summary["lossless"]["verdict"] == "diverged" else ""
    words = escape(printable(verdict_words(summary["lossless"])))
    console.print(f"Lossless: {words}", style=style, soft_wrap=True)
    if assessment := summary["assessment"]:
        sentence = escape(printable(assessment["sentence"]))
        style = {"worth_it": "bold green", "slower": "bold red"}.get(assessment["says"], "")
        console.print(f"Assessment: {sentence}", style=style, soft_wrap=True)
    for warning in summary["warnings"]:
        if warning not in logged:
            console.print(f"Warning: {escape(printable(warning))}", style="yellow", soft_wrap=True)


def _title(summary: Summary) -> str:
    method = summary["method"]
    if summary["num_speculative_tokens"]:
        method = f"{method}, {drafts_name(summary)}"
    engine = engine_words(summary["engine"], summary["parallelism"])
    return escape(f"{summary['target']} with {method} on {engine}")


def _table_rows(summary: Summary, sides: Sequence[Summary | Baseline]) -> Iterator[list[str]]:
    """Yields the rows of the table: a label, the method's cell, and the baseline's if it ran."""
    yield ["requests", *(str(side["num_requests"]) for side in sides)]
    if summary["num_errors"]:
        yield ["errors", *(str(side["num_errors"]) for side in sides)]
    if summary.get("num_image_tokens"):
        yield ["image tokens", *(str(side.get("num_image_tokens", 0)) for side in sides)]
    if summary["num_drafts"]:
        length = summary["acceptance_length"]
        rates = "  ".join(number(rate) for rate in summary["acceptance_rate_per_position"])
        yield ["acceptance length", interval(length), "-"]
        yield ["  mean over requests", number(length["mean_over_requests"]), "-"]
        yield ["acceptance rate by position", rates, "-"]
    yield from _grammar_rows(summary)
    if words := drafts_words(summary):
        yield ["steps by drafts, 0 to K", words, "-"]
    yield [
        "decode tokens per second",
        *(number(side["output_tokens_per_second"], 0) for side in sides),
    ]
    yield [
        "time per output token, ms",
        *(number(side["time_per_output_token_ms"]) for side in sides),
    ]
    yield [
        "time to first token, ms",
        *(number(side["time_to_first_token_ms"], 1) for side in sides),
    ]
    if summary["by_turn"]:
        yield ["  of first, of later turns", *(_first_and_later(side) for side in sides)]
    yield from _share_rows(summary)
    yield from _latency_rows(summary, sides)
    yield from _cache_rows(sides)
    if summary["accuracy"]:
        found = [side["accuracy"] for side in sides]
        yield [accuracy_name(found), *(number(f["exact_match"], 3) if f else "-" for f in found)]
    if summary["speedup"]:
        yield ["speedup", interval(summary["speedup"], "x"), "1"]
    if predicted := summary["prediction"]:
        yield ["  predicted", f"{predicted['speedup']:.2f}x", "-"]


def _grammar_rows(summary: Summary) -> Iterator[list[str]]:
    """Yields rows on the grammars of outputs; no row for a run without one."""
    if found := summary.get("grammars"):
        yield ["jump-forward tokens", str(summary.get("num_jump_forward_tokens", 0)), "-"]
        yield ["compiling grammars, ms", number(found["compile_ms"], 1), "-"]


def _share_rows(summary: Summary) -> Iterator[list[str]]:
    """Yields the row with drafting's share of a step; no row where phases were not measured."""
    share = draft_share(summary["time_breakdown_ms"]) if summary["num_drafts"] else None
    if share is not None:
        yield ["drafting's share of a step", percent(share), "-"]


def _latency_rows(summary: Summary, sides: Sequence[Summary | Baseline]) -> Iterator[list[str]]:
    """Yields rows of percentiles and goodput; no row for a run without arrivals and limits."""
    limits = summary["goodput"]
    if summary["request_rate"] is None and limits is None:
        return
    latencies = [side["latency_ms"] for side in sides]
    yield ["p50 / p90 / p99, ms: queue", *(percentile_words(f["queue"]) for f in latencies)]
    yield ["  time to first token", *(percentile_words(f["ttft"]) for f in latencies)]
    yield ["  between deliveries", *(percentile_words(f["inter_token"]) for f in latencies)]
    if limits is not None:
        found = [side["goodput"] for side in sides]
        yield [
            f"goodput: {limit_words(limits)}",
            *(percent(g["share"] if g else None) for g in found),
        ]
        rates = (number(g["requests_per_second"] if g else None) for g in found)
        yield ["  requests per second", *rates]


def _cache_rows(sides: Sequence[Summary | Baseline]) -> Iterator[list[str]]:
    """Yields rows on the prefix cache's hits and on preemptions; no row where there were none."""
    caches = [side["prefix_cache"] for side in sides]
    if any(cache and (cache["hit_tokens"] or cache["recomputed_tokens"]) for cache in caches):
        yield ["prefix cache hit rate", *(percent(c and c["hit_rate"]) for c in caches)]
        yield ["  of eligible prefixes", *(percent(c and c["eligible_hit_rate"]) for c in caches)]
    if any(cache and cache["recomputed_tokens"] for cache in caches):
        counts = (str(cache["recomputed_tokens"]) if cache else "-" for cache in caches)
        yield ["  tokens recomputed", *counts]
    if any(side["num_preemptions"] for side in sides):
        yield ["preemptions", *(str(side["num_preemptions"]) for side in sides)]


def _first_and_later(side: Summary | Baseline) -> str:
    turns = side["by_turn"]
    if turns is None:
        return "-"
    first, later = turns[0], turns[-1]  # the last entry is of all later turns
    times = (turn["time_to_first_token_ms"] for turn in (first, later))
    return ", ".join(number(time, 1) for time in times)
