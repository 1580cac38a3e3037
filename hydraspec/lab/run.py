"""One run, from configuration to verdict.

Measures nothing and writes nothing itself: it puts the rooms in order.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import hydraspec
from hydraspec import factory
from hydraspec.config.schema import RunConfig, TrackerMode, Verification
from hydraspec.engine.base import Engine
from hydraspec.lab import environment, summary, verdict, workloads
from hydraspec.lab.cautions import accuracy_caution, cautions
from hydraspec.lab.folder import RunFolder
from hydraspec.lab.rounds import Measurement
from hydraspec.lab.surroundings import interrupts_held_back
from hydraspec.lab.workloads import Workload
from hydraspec.metrics.files import Json
from hydraspec.metrics.lossless import Lossless
from hydraspec.metrics.run_files import REPORT, STEPS, TRACE
from hydraspec.metrics.sinks import Side, Sink, StepsFile, TraceFile
from hydraspec.metrics.tracker import TrackerOptions, WandbSink
from hydraspec.report import page as report
from hydraspec.report.console import ConsoleSink, run_console
from hydraspec.report.samples import SampleSink
from hydraspec.types import NotFiniteError, WorkloadError


def run(
    config: RunConfig,
    *,
    run_dir: Path,
    overrides: Sequence[str],
    resolved: Mapping[str, object],
    quiet: bool = False,
) -> Json:
    """Run a configuration and return its summary, which is also `run_dir`/summary.json.

    `config` says what runs: see lab.resolution. `resolved` is the same as plain containers and
    `overrides` what was typed; both are only recorded. `quiet` prints nothing. The status is
    "failed" if no request finished. An interrupt or an error while decoding is raised again once
    what had finished is saved.

    Raises:
        WorkloadError: before anything is decoded, with file and line.
        CheckpointError, ConfigurationError: from the engine.
        OSError: with the path, if the run folder cannot be written.
    """
    folder = RunFolder(run_dir)
    replaces = folder.holds_older_run
    if not replaces:
        folder.begin(resolved, overrides)
    workload = workloads.read(config)
    # It starts while the engine loads, but not among an older run's files.
    tracker = None if replaces else _tracker(config, folder, resolved)
    engine: Engine | None = None
    try:
        started = time.perf_counter()
        engine = factory.build_engine(config)
        workload = _tokenised(config, engine, workload)
        load_s = time.perf_counter() - started
        if replaces:
            folder.begin(resolved, overrides)
        folder.write_environment(environment.describe(engine.info))
        prepared = _Prepared(
            config=config,
            resolved=resolved,
            folder=folder,
            engine=engine,
            workload=workload,
            tracker=(tracker := tracker or _tracker(config, folder, resolved)),
            load_s=load_s,
            quiet=quiet,
        )
        with closing(_Run(prepared)) as measured:
            return measured.execute()
    finally:
        if tracker is not None:
            tracker.close()
        if engine is not None:
            engine.close()


@dataclass(slots=True, frozen=True, kw_only=True)
class _Prepared:
    """What a run has once its engine is loaded and its workload tokenised."""

    config: RunConfig
    resolved: Mapping[str, object]
    folder: RunFolder
    engine: Engine
    workload: Workload
    tracker: WandbSink | None
    load_s: float
    quiet: bool


class _Run:
    """Measures a prepared run and saves it, whatever happens."""

    def __init__(self, prepared: _Prepared) -> None:
        self.config, self.resolved, self.folder = (
            prepared.config,
            prepared.resolved,
            prepared.folder,
        )
        self.engine, self.tracker, self.load_s = prepared.engine, prepared.tracker, prepared.load_s
        self.requests = prepared.workload.requests
        self.started, self.when = time.perf_counter(), time.strftime("%Y-%m-%d %H:%M")
        self.console = run_console(quiet=prepared.quiet)
        engines = {Side.method: self.engine}
        if self.config.baseline and self.config.method.name != "none":
            engines[Side.baseline] = self.engine.baseline()
        self.files = self._file_sinks()
        self.samples = SampleSink(self.requests)
        self.progress = ConsoleSink(
            self.console,
            method=self.engine.info.method,
            sizes=dict.fromkeys(engines, len(self.requests)),
        )
        watching: list[Sink] = [*self.files, self.samples, self.progress]
        if self.tracker is not None:
            watching.append(self.tracker)
        self.measurement = Measurement(
            engines, self.requests, watching, concurrency=self.config.workload.concurrency
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
            self.measurement.profile()
            lossless = self._judge()
        except KeyboardInterrupt:
            self._save("interrupted", self._judge_what_there_is())
            raise
        except Exception as error:
            self._save_despite(error)
            raise
        if lossless.not_finite_in is not None:
            self._save("failed", lossless)
            raise self._not_finite(lossless.not_finite_in, lossless)
        finished = any(c.finished for c in self.measurement.meters[Side.method].completed)
        return self._save("ok" if finished else "failed", lossless)

    def close(self) -> None:
        """Give the terminal back, also where saving failed."""
        self.progress.close()

    # ------------------------------------------------------------------ verdict

    def _judge(self) -> Lossless:
        if Side.baseline not in self.measurement.engines:
            plain = self.config.method.name == "none"
            reason = "method=none is the baseline" if plain else "baseline=false"
            broken = verdict.look_at_logits(
                self.requests, self.measurement.completions(Side.method), self.engine
            )
            return replace(self._not_checked(reason), not_finite_in=broken)
        return verdict.judge(
            self.requests,
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
            return self._not_checked("interrupted before the outputs were compared")

    def _not_checked(self, reason: str) -> Lossless:
        return verdict.not_checked(reason, self.requests, self.measurement.completions(Side.method))

    def _not_finite(self, name: str, lossless: Lossless) -> NotFiniteError:
        """The error of a run whose engine did not notice: at the token that was looked at."""
        if (found := lossless.first_beyond_margin) and found.request == name:
            position = found.position
        else:
            index = next(r.index for r in self.requests if r.id == name)
            position = len(self.measurement.completions(Side.method)[index].output_token_ids) - 1
        return NotFiniteError(name, position, self.engine.info.dtype)

    # ------------------------------------------------------------------ saving

    def _save_despite(self, error: Exception) -> None:
        """Save what had finished before an error, if the disk allows; the error itself matters
        more.
        """
        lossless, reason = (
            self._not_checked("the run ended early"),
            f"{type(error).__name__}: {error}",
        )
        if isinstance(error, NotFiniteError):
            lossless, reason = replace(lossless, not_finite_in=error.request_id), error.finding
        try:
            self._save("failed", lossless, warnings=[f"the run ended early: {reason}"])
        except OSError as other:
            error.add_note(f"and what had finished could not be saved: {other}")

    def _save(self, status: str, lossless: Lossless, warnings: Sequence[str] = ()) -> Json:
        """Write every file, then tell tracker and console; an interrupt waits until files are
        whole. The console is told even where a file cannot be written.
        """
        meter = self.measurement.meters[Side.method]
        rows = summary.request_rows(self.requests, meter)
        result: Json = None
        try:
            with interrupts_held_back():
                result = self._summarise(status, lossless, warnings)
                for sink in self.files:
                    sink.close()
                self.folder.write_requests(rows)
                self._write(result, rows)
            if self.tracker is not None and (failures := self.tracker.on_summary(result)):
                result["warnings"] += failures
                with interrupts_held_back():
                    self._write(result, rows)
        finally:
            if result is not None:
                self.progress.on_summary(result)
        self.console.print(f"Report: {self.folder.path / REPORT}", soft_wrap=True)
        return result

    def _summarise(self, status: str, lossless: Lossless, warnings: Sequence[str]) -> Json:
        info = self.engine.info
        failures = summary.failure_warnings(
            self.measurement.completions(Side.method), self.measurement.completions(Side.baseline)
        )
        result = summary.build(
            config=self.config,
            info=info,
            requests=self.requests,
            meter=self.measurement.meters[Side.method],
            baseline=self.measurement.meters.get(Side.baseline),
            observed=self.measurement.observed,
            lossless=lossless,
            status=status,
            facts={
                "num_threads": torch.get_num_threads(),
                "memory_bytes": {**info.memory_bytes, "peak_rss": environment.peak_rss_bytes()},
                "load_s": self.load_s,
                "run_s": time.perf_counter() - self.started,
            },
            warnings=[
                *self.config.warnings,
                *info.warnings,
                *warnings,
                *summary.build_warnings(self.measurement.observed),
                *failures,
                *verdict.remarks(lossless, info),
                *accuracy_caution(
                    self.requests,
                    self.measurement.completions(Side.method),
                    self.measurement.completions(Side.baseline),
                ),
            ],
        )
        result["warnings"] += cautions(self.config, result)
        return result

    def _write(self, result: Json, rows: Sequence[Json]) -> None:
        self.folder.write_summary(result)
        made = f"{self.when}, hydraspec {hydraspec.__version__}, torch {torch.__version__}"
        samples = self.samples.samples({row["id"]: row for row in rows})
        page = report.render(result, resolved=self.resolved, samples=samples, made=made)
        self.folder.write_report(page)

    def _file_sinks(self) -> list[Sink]:
        sinks: list[Sink] = []
        if self.config.metrics.steps:
            sinks.append(StepsFile(self.folder.path / STEPS))
        if self.config.metrics.trace:
            ids = {r.index: r.id for r in self.requests}
            sinks.append(TraceFile(self.folder.path / TRACE, ids))
        return sinks


def _tokenised(config: RunConfig, engine: Engine, workload: Workload | None) -> Workload:
    if workload is None:
        workload = workloads.random_requests(config, engine.info.vocab_size)
    workloads.check_configured_stops(config, engine.info.vocab_size)
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
