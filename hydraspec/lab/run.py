"""One run, from configuration to verdict. Measures nothing and writes nothing itself: it puts the rooms in order."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console

from hydraspec import factory
from hydraspec.config.schema import RunConfig, TrackerMode, Verification
from hydraspec.engine.base import Engine
from hydraspec.lab import environment, report, summary, verdict, workloads
from hydraspec.lab.folder import STEPS, TRACE, RunFolder
from hydraspec.lab.rounds import Measurement
from hydraspec.lab.verdict import NOT_CHECKED, Lossless
from hydraspec.lab.workloads import Workload
from hydraspec.metrics.console import ConsoleSink
from hydraspec.metrics.files import Json
from hydraspec.metrics.sinks import Side, Sink, StepsFile, TraceFile
from hydraspec.metrics.tracker import TrackerOptions, WandbSink
from hydraspec.types import WorkloadError


def run(
    config: RunConfig, *, run_dir: Path, overrides: Sequence[str], resolved: Mapping[str, object]
) -> Json:
    """Run a configuration and return its summary, which is also `run_dir`/summary.json.

    `resolved` is the configuration as plain containers and `overrides` what was typed; both are
    only recorded. The status is "failed" if no request finished. An interrupt or an error while
    decoding is raised again once what had finished is saved.

    Raises:
        WorkloadError: before anything is decoded, with file and line.
        CheckpointError, ConfigurationError: from the engine.
        OSError: with the path, if the run folder cannot be written.
    """
    folder = RunFolder(run_dir)
    folder.write_config(resolved, overrides)
    workload = workloads.read(config)
    tracker = _tracker(config, folder, resolved)
    engine: Engine | None = None
    try:
        started = time.perf_counter()
        engine = factory.build_engine(config)
        load_s = time.perf_counter() - started
        workload = _tokenised(config, engine, workload)
        folder.write_environment(environment.describe(engine.info))
        return _Run(config, folder, engine, workload, tracker, load_s).execute()
    finally:
        if tracker is not None:
            tracker.close()
        if engine is not None:
            engine.close()


class _Run:
    """A run whose engine is loaded and whose workload is tokenised."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        engine: Engine,
        workload: Workload,
        tracker: WandbSink | None,
        load_s: float,
    ) -> None:
        self.config, self.folder, self.engine, self.workload = config, folder, engine, workload
        self.tracker = tracker
        self.load_s = load_s
        self.started = time.perf_counter()
        self.console = Console()
        engines = {Side.method: engine}
        if config.baseline and config.method.name != "none":
            engines[Side.baseline] = engine.baseline()
        self.console_sink = ConsoleSink(
            self.console,
            method=engine.info.method,
            sizes=dict.fromkeys(engines, len(workload.requests)),
        )
        self.sinks = self._file_sinks()
        watching: list[Sink] = [*self.sinks, self.console_sink, *([tracker] if tracker else [])]
        self.measurement = Measurement(
            engines, workload.requests, watching, concurrency=config.workload.concurrency
        )

    def execute(self) -> Json:
        """Measure, then save; what was measured until an interrupt or an error is saved too."""
        if self.tracker is not None:
            self.tracker.add_config(
                draft_spec=self.engine.info.draft_spec, memory_bytes=self.engine.info.memory_bytes
            )
            self.tracker.wait_until_ready()
        try:
            self.measurement.warm_up()
            self.measurement.run()
            lossless = self._judge()
        except KeyboardInterrupt:
            self._save("interrupted", self._judge_what_there_is())
            raise
        except Exception as error:
            self._save_despite(error)
            raise
        finished = any(c.finished for c in self.measurement.meters[Side.method].completed)
        return self._save("ok" if finished else "failed", lossless)

    # ------------------------------------------------------------------ verdict

    def _judge(self) -> Lossless:
        if Side.baseline not in self.measurement.engines:
            return NOT_CHECKED
        return verdict.judge(
            self.workload.requests,
            self.measurement.completions(Side.method),
            self.measurement.completions(Side.baseline),
            self.engine,
            synthetic=self.config.method.verification is Verification.synthetic,
        )

    def _judge_what_there_is(self) -> Lossless:
        """The verdict after an interrupt; a second one, or an engine left unusable, skips it."""
        try:
            return self._judge()
        except (KeyboardInterrupt, Exception):
            return NOT_CHECKED

    # ------------------------------------------------------------------ saving

    def _save_despite(self, error: Exception) -> None:
        """Save what had finished before an error, if the disk allows; the error itself matters more."""
        reason = f"{type(error).__name__}: {error}"
        try:
            self._save("failed", NOT_CHECKED, warnings=[f"the run ended early: {reason}"])
        except OSError:
            self.console_sink.close()

    def _save(self, status: str, lossless: Lossless, warnings: Sequence[str] = ()) -> Json:
        """Write every file, then tell tracker and console; an interrupt waits until files are whole."""
        meter = self.measurement.meters[Side.method]
        rows = summary.request_rows(self.workload.requests, meter)
        with _interrupts_held_back():
            for sink in self.sinks:
                sink.close()
            self.folder.write_requests(rows)
            result = self._summarise(status, lossless, warnings)
            self._write(result, rows)
        if self.tracker is not None and (failures := self.tracker.on_summary(result)):
            result["warnings"] += failures
            with _interrupts_held_back():
                self._write(result, rows)
        self.console_sink.on_summary(result)
        self.console.print(f"Report: {self.folder.path / 'report.html'}", soft_wrap=True)
        return result

    def _summarise(self, status: str, lossless: Lossless, warnings: Sequence[str]) -> Json:
        info = self.engine.info
        return summary.build(
            config=self.config,
            info=info,
            requests=self.workload.requests,
            meter=self.measurement.meters[Side.method],
            baseline=self.measurement.meters.get(Side.baseline),
            lossless=lossless,
            status=status,
            facts={
                "num_threads": torch.get_num_threads(),
                "memory_bytes": {**info.memory_bytes, "peak_rss": environment.peak_rss_bytes()},
                "load_s": self.load_s,
                "run_s": time.perf_counter() - self.started,
            },
            warnings=[*self.config.warnings, *info.warnings, *warnings],
        )

    def _write(self, result: Json, rows: Sequence[Json]) -> None:
        self.folder.write_summary(result)
        sampled = report.sample(rows)
        trace = self.folder.read_trace([row["id"] for row in sampled])
        prompts = {r.id: r for r in self.workload.requests}
        self.folder.write_report(report.render(result, self.config, sampled, trace, prompts))

    def _file_sinks(self) -> list[Sink]:
        sinks: list[Sink] = []
        if self.config.metrics.steps:
            sinks.append(StepsFile(self.folder.path / STEPS))
        if self.config.metrics.trace:
            ids = {r.index: r.id for r in self.workload.requests}
            sinks.append(TraceFile(self.folder.path / TRACE, ids))
        return sinks


def _tokenised(config: RunConfig, engine: Engine, workload: Workload | None) -> Workload:
    if workload is None:
        workload = workloads.random_requests(config, engine.info.vocab_size)
    workload.check_vocabulary(engine.info.vocab_size)
    try:
        engine.tokenize(workload.requests)
    except WorkloadError as error:
        raise workloads.explain(error, workload) from error
    return workload


def _tracker(
    config: RunConfig, folder: RunFolder, resolved: Mapping[str, object]
) -> WandbSink | None:
    tracker = config.tracker
    if tracker.name == "none" or tracker.mode is TrackerMode.disabled:
        return None
    options = TrackerOptions(
        project=tracker.project,
        entity=tracker.entity,
        group=tracker.group,
        mode=tracker.mode.value,
        name=f"{config.target.name}-{config.method.name}-{config.method.num_speculative_tokens}",
    )
    return WandbSink(options, folder.path, resolved)


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Let a Ctrl-C wait until the files are written; it is raised at the end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if received:
            raise KeyboardInterrupt
