"""The output of a run, whatever ended it: files, console and tracker."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from hydraspec.config.schema import RunConfig
from hydraspec.engine.base import Engine, EngineInfo, notes_of
from hydraspec.lab import prediction, summary, verdict
from hydraspec.lab.folder import RunFolder
from hydraspec.lab.rounds import Measurement
from hydraspec.lab.run_warnings import warnings_of
from hydraspec.metrics.files import Json
from hydraspec.metrics.run_facts import RunFacts
from hydraspec.metrics.run_files import POSITIONS, REPORT, STEPS, TRACE
from hydraspec.metrics.sinks import Side, Sink, StepsFile
from hydraspec.metrics.step_blocks import step_costs_file
from hydraspec.metrics.summary import Lossless, Status, Summary
from hydraspec.metrics.trace import PositionsFile, TraceFile
from hydraspec.metrics.tracker import WandbSink
from hydraspec.signals import interrupts_held_back
from hydraspec.study import run_page
from hydraspec.study.console import ConsoleSink, run_console
from hydraspec.study.samples import SampleSink
from hydraspec.study.worst import worst_requests
from hydraspec.types import NotFiniteError, PositionScores
from hydraspec.version import __version__
from hydraspec.workloads.reading import Workload

log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True, kw_only=True)
class Loaded:
    """Parts of a run that are ready before its first step."""

    config: RunConfig
    typed: Sequence[str]  # the run's overrides
    engines: Mapping[Side, Engine]
    workload: Workload
    logged: Sequence[str] = ()  # warnings of the summary that are in the log already
    expected: prediction.Expected
    tracker: WandbSink | None
    decode: Callable[[Sequence[int]], str] | None  # text of tokens, where the run shows any
    facts: Callable[[EngineInfo], RunFacts]  # returns the facts at the time of the call


class Recorder:
    """The sinks of a run, and the writing of its results.

    Attributes:
        sinks: sinks that get the records of the measured rounds.
    """

    def __init__(self, folder: RunFolder, loaded: Loaded, *, quiet: bool) -> None:
        self._folder, self._loaded = folder, loaded
        self._started = time.strftime("%Y-%m-%d %H:%M")
        self._console = run_console(quiet=quiet)
        metrics, requests = loaded.config.metrics, loaded.workload.requests
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
        self._samples = SampleSink(requests)
        self._progress = ConsoleSink(
            self._console,
            method=loaded.engines[Side.method].info.method,
            sizes=dict.fromkeys(loaded.engines, len(requests)),
            logged=loaded.logged,
        )
        self.sinks: list[Sink] = [*self._files, self._samples, self._progress]
        if loaded.tracker is not None:
            self.sinks.append(loaded.tracker)

    def add_scores(self, scores: PositionScores) -> None:
        """Write the drafts from every place of a request's output to trace and position files."""
        for file in self._scored:
            file.add_scores(scores)

    def save(
        self,
        measurement: Measurement,
        status: Status,
        lossless: Lossless,
        warnings: Sequence[str] = (),
    ) -> Summary:
        """Write every file, then pass the summary to tracker and console, and return it; an
        interrupt waits until files are whole. The console gets it even if a file cannot be written.

        Raises:
            CannotWriteError: see RunFolder.
        """
        rows = summary.request_rows(self._loaded.workload.requests, measurement)
        tracker, result = self._loaded.tracker, None
        try:
            with interrupts_held_back():
                result = self._summarise(measurement, status, lossless, warnings)
                for file in (*self._files, *self._scored):
                    file.close()
                self._folder.write_requests(rows)
                blocks = {side.value: of.meter.blocks for side, of in measurement.sides.items()}
                self._folder.write_step_costs(step_costs_file(blocks))
                self._write(result, rows)
                self._folder.remove_unsaved()
            if tracker is not None:
                tracker.on_requests(rows)
                if failures := tracker.on_summary(result):
                    result["warnings"] += failures
                    with interrupts_held_back():
                        self._write(result, rows)
        finally:
            if result is not None:
                self._progress.on_summary(result)
        self._console.print(f"Report: {self._folder.path / REPORT}", soft_wrap=True)
        return result

    def save_early(self, error: Exception, measurement: Measurement) -> None:
        """Save the requests that had finished before an error, with the status "failed".

        Raises:
            CannotWriteError: see RunFolder.
        """
        requests, completions = self._loaded.workload.requests, measurement.method.completions
        lossless = verdict.not_checked("the run ended early", requests, completions)
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, NotFiniteError):
            lossless["not_finite_in"], reason = error.request_id, error.finding
        self.save(measurement, "failed", lossless, [f"the run ended early: {reason}"])

    def close(self) -> None:
        """Release the terminal, also if saving failed."""
        self._progress.close()

    def _summarise(
        self,
        measurement: Measurement,
        status: Status,
        lossless: Lossless,
        warnings: Sequence[str],
    ) -> Summary:
        loaded, baseline = self._loaded, measurement.baseline
        info = measurement.method.engine.info
        notes = notes_of(info, None if baseline is None else baseline.engine.info)
        result = summary.build(
            loaded.config,
            measurement,
            lossless,
            status=status,
            facts=loaded.facts(info),
            expected=loaded.expected,
        )
        known = (*loaded.config.warnings, *loaded.workload.warnings, *notes, *warnings)
        found = warnings_of(loaded.config, result, measurement, loaded.typed)
        result["warnings"] = list(dict.fromkeys((*known, *found)))
        return result

    def _write(self, result: Summary, rows: Sequence[Json]) -> None:
        try:
            page = self._page(result, rows)
        except Exception as error:  # it must hide neither the figures nor what ended the run
            log.exception("%s could not be made", REPORT)
            fault = f"{REPORT} could not be made: {type(error).__name__}: {error}"
            result["warnings"].append(f"{fault}; please report this run")
            page = None
        try:
            if page is not None:
                self._folder.write_report(page)
        finally:  # the summary comes last, as a run that has one counts as saved
            self._folder.write_summary(result)

    def _page(self, result: Summary, rows: Sequence[Json]) -> str:
        loaded, path = self._loaded, self._folder.path
        trace = path / TRACE if loaded.config.metrics.trace else None
        return run_page.render(
            result,
            resolved=self._folder.resolved,
            samples=self._samples.samples({row["id"]: row for row in rows}),
            worst=worst_requests(rows, trace, loaded.decode),
            made=f"{self._started}, hydraspec {__version__}, torch {torch.__version__}",
        )
