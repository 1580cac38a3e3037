"""What a run writes and prints: its files, the console and the tracker."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from hydraspec.config.schema import MetricsConfig
from hydraspec.lab.folder import RunFolder
from hydraspec.metrics.files import Json
from hydraspec.metrics.run_files import POSITIONS, REPORT, STEPS, TRACE
from hydraspec.metrics.sinks import Side, Sink, StepsFile
from hydraspec.metrics.summary import Summary
from hydraspec.metrics.trace import PositionsFile, TraceFile
from hydraspec.metrics.tracker import WandbSink
from hydraspec.signals import interrupts_held_back
from hydraspec.study import run_page as report
from hydraspec.study.console import ConsoleSink, run_console
from hydraspec.study.samples import SampleSink
from hydraspec.study.worst import worst_requests
from hydraspec.types import PositionScores, Request
from hydraspec.version import __version__


class Recorder:
    """The sinks of a run, and the writing of its results.

    Attributes:
        sinks: what watches the measured rounds.
    """

    def __init__(
        self,
        folder: RunFolder,
        requests: Sequence[Request],
        *,
        metrics: MetricsConfig,
        method: str,
        sides: Sequence[Side],
        tracker: WandbSink | None,
        decode: Callable[[Sequence[int]], str] | None,
        quiet: bool,
    ) -> None:
        """decode: the text of token ids, None without a tokenizer."""
        self._folder, self._tracker = folder, tracker
        self._started = time.strftime("%Y-%m-%d %H:%M")
        self._console = run_console(quiet=quiet)
        self._files: list[Sink] = []
        if metrics.steps:
            self._files.append(StepsFile(folder.path / STEPS))
        self._scored: list[TraceFile | PositionsFile] = []
        if metrics.trace:
            trace = TraceFile(folder.path / TRACE, requests)
            self._files.append(trace)
            self._scored.append(trace)
        if metrics.all_positions:
            self._scored.append(PositionsFile(folder.path / POSITIONS, requests))
        self._decode = decode
        self._trace = folder.path / TRACE if metrics.trace else None
        self._samples = SampleSink(requests)
        sizes = dict.fromkeys(sides, len(requests))
        self._progress = ConsoleSink(self._console, method=method, sizes=sizes)
        self.sinks: list[Sink] = [*self._files, self._samples, self._progress]
        if tracker is not None:
            self.sinks.append(tracker)

    def add_scores(self, scores: PositionScores) -> None:
        """Record the drafts from every place of a request's output, in the files that show them."""
        for file in self._scored:
            file.add_scores(scores)

    def save(self, summarise: Callable[[], Summary], rows: Sequence[Json]) -> Summary:
        """Write every file, then tell tracker and console; an interrupt waits until files are
        whole. The console is told even where a file cannot be written.
        """
        summary: Summary | None = None
        try:
            with interrupts_held_back():
                summary = summarise()
                for file in (*self._files, *self._scored):
                    file.close()
                self._folder.write_requests(rows)
                self._write(summary, rows)
                self._folder.remove_unsaved()
            if self._tracker is not None:
                self._tracker.on_requests(rows)
                if failures := self._tracker.on_summary(summary):
                    summary["warnings"] += failures
                    with interrupts_held_back():
                        self._write(summary, rows)
        finally:
            if summary is not None:
                self._progress.on_summary(summary)
        self._console.print(f"Report: {self._folder.path / REPORT}", soft_wrap=True)
        return summary

    def close(self) -> None:
        """Give the terminal back, also where saving failed."""
        self._progress.close()

    def _write(self, summary: Summary, rows: Sequence[Json]) -> None:
        try:
            self._folder.write_report(self._page(summary, rows))
        finally:  # last, as a run that has a summary is saved
            self._folder.write_summary(summary)

    def _page(self, summary: Summary, rows: Sequence[Json]) -> str:
        made = f"{self._started}, hydraspec {__version__}, torch {torch.__version__}"
        samples = self._samples.samples({row["id"]: row for row in rows})
        return report.render(
            summary,
            resolved=self._folder.resolved,
            samples=samples,
            worst=worst_requests(rows, self._trace, self._decode),
            made=made,
        )
