"""Logging to Weights & Biases, in a separate thread with bounded waits: a failure is a warning.

No step waits for it: curves are thinned, and wandb is called from the tracker's thread only. Curves
are `steps/<side>/<name>`; final figures have the names of summary.json, joined by slashes.
"""

from __future__ import annotations

import inspect
import queue
import threading
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydraspec.metrics import media
from hydraspec.metrics.counters import DraftLengthCounts, RunningTotals
from hydraspec.metrics.files import Json, plain
from hydraspec.metrics.meter import Meter
from hydraspec.metrics.sinks import Side, Sink
from hydraspec.metrics.summary import Summary
from hydraspec.types import PHASES, StepRecord

SECONDS_BETWEEN_POINTS = 0.25
# Final figures by which people sort and filter runs, at most 40; the others are lines of a table.
SORTED = (
    *("status", "target", "method", "num_speculative_tokens", "num_speculative_tokens_used/mean"),
    *("speedup/mean", "speedup/ci95/0", "speedup/ci95/1", "speedup_measured/mean"),
    *("acceptance_length/mean", "acceptance_rate"),
    *(f"acceptance_rate_per_position/{position}" for position in range(6)),
    *("output_tokens_per_second", "time_per_output_token_ms", "tokens_per_second_per_user"),
    *("time_to_first_token_ms", "latency_ms/ttft/p99", "latency_ms/inter_token/p99"),
    *("latency_ms/queue/p99", "goodput/share", "goodput/requests_per_second"),
    *("lossless/verdict", "assessment/says", "accuracy/exact_match"),
    *("baseline/output_tokens_per_second", "baseline/time_per_output_token_ms"),
    *(f"time_breakdown_ms/{phase}" for phase in PHASES),
    *("num_requests", "num_errors", "num_preemptions", "prefix_cache/hit_rate"),
)
INIT_TIMEOUT_SECONDS = 15.0
FINISH_TIMEOUT_SECONDS = 30.0


@dataclass(slots=True, frozen=True, kw_only=True)
class TrackerOptions:
    """The place where a run is logged. `mode` is "offline" or "online"; without `notes` a run gets
    its summary's assessment."""

    project: str
    entity: str | None
    group: str | None
    mode: str
    name: str
    job_type: str = "run"
    tags: Sequence[str] = ()
    notes: str | None = None
    init_timeout_seconds: float = INIT_TIMEOUT_SECONDS
    finish_timeout_seconds: float = FINISH_TIMEOUT_SECONDS


class WandbSink(Sink):
    """Sink that logs config, curves, tables, histograms and the summary, in `<run folder>/wandb`.

    wandb starts in the background while the model loads; call `wait_until_ready` before anything
    is timed.
    """

    def __init__(
        self, options: TrackerOptions, run_dir: Path, config: Mapping[str, object]
    ) -> None:
        self._options = options
        self._run_dir = run_dir
        self._config = plain(config)
        self._run: Any = None
        self._failure: str | None = None
        self._warnings: list[str] = []
        self._ready, self._idle = threading.Event(), threading.Event()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._last_point = dict.fromkeys(Side, 0.0)
        self._last_totals = {side: RunningTotals() for side in Side}
        self._draft_lengths = {side: DraftLengthCounts() for side in Side}  # since the last point
        self._step_ms = array("d")  # of the method
        self._rows: Sequence[Json] = ()
        self._closed = False
        threading.Thread(target=self._work, name="wandb", daemon=True).start()

    def wait_until_ready(self) -> None:
        """Wait for wandb to start, or to give up: at most twice init_timeout_seconds."""
        limit = 2 * self._options.init_timeout_seconds  # online, then offline
        if not self._ready.wait(limit):
            self._give_up(f"wandb did not start within {limit:.0f} s")

    def add_config(self, **facts: object) -> None:
        """Log facts that are known only once the engine is loaded."""
        values = plain(facts)
        self._submit(lambda: self._run.config.update(values, allow_val_change=True))

    def on_step(self, side: Side, record: StepRecord, meter: Meter) -> None:
        """Log a point over the steps since the last one, at most four points a second and side."""
        if side is Side.method:
            self._step_ms.append(record.total_ms)
        self._draft_lengths[side].add(record)
        now = time.monotonic()
        if now - self._last_point[side] < SECONDS_BETWEEN_POINTS:
            return
        window = meter.totals.since(self._last_totals[side])
        self._last_point[side] = now
        self._last_totals[side] = replace(meter.totals)
        hits, lengths = meter.prefix_hits, self._draft_lengths[side].used(0)
        self._draft_lengths[side] = DraftLengthCounts()
        point = {
            "step": record.step,
            "acceptance_length": window.acceptance_length,
            "output_tokens_per_second": window.output_tokens_per_second,
            "step_ms": record.total_ms,
            "draft_length": lengths and lengths["mean"],
            "num_running": record.num_running,
            "num_waiting": record.num_waiting,
            "kv_usage": record.kv_usage,
            **{f"kv_usage/{name}": share for name, share in record.kv_usage_per_group.items()},
            "prefix_cache_hit_rate": hits and hits.hit_rate(),
        }
        values = {
            f"steps/{side.value}/{key}": value
            for key, value in plain(point).items()
            if value is not None
        }
        self._submit(lambda: self._run.log(values))

    def on_requests(self, rows: Sequence[Json]) -> None:
        """Keep the rows, from which `on_summary` makes a table and histograms."""
        self._rows = rows

    def on_summary(self, summary: Summary) -> list[str]:
        """Log the summary and finish, within finish_timeout_seconds. Returns warnings."""
        self._submit(lambda: self._log_summary(summary))
        self.close()
        return self._warnings

    def on_sweep(self, jobs: media.PlainTable, figures: Mapping[str, object]) -> list[str]:
        """Log a sweep's jobs and figures, and finish as `on_summary` does. Returns warnings."""
        found = plain(figures)

        def log() -> None:
            self._run.log({"jobs": _table(jobs)})
            self._run.summary.update(found)

        self._submit(log)
        self.close()
        return self._warnings

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._jobs.put(None)
        if self._failure is None and not self._idle.wait(self._options.finish_timeout_seconds):
            self._give_up(
                f"wandb did not finish within {self._options.finish_timeout_seconds:.0f} s"
            )

    # ------------------------------------------------------------------ on the tracker's thread

    def _work(self) -> None:
        try:
            self._start()
            self._ready.set()
            while (job := self._jobs.get()) is not None:
                job()
            self._run.finish()
        except BaseException as error:  # wandb itself may raise SystemExit or KeyboardInterrupt
            self._give_up(f"wandb failed: {described(error)}")
        self._ready.set()
        self._idle.set()

    def _start(self) -> None:
        """Start a run; if it cannot go online, record it offline with a warning."""
        try:
            self._run = self._init(self._options.mode)
        except Exception as error:
            if self._options.mode == "offline":
                raise
            self._run = self._init("offline")
            self._warnings.append(
                f"wandb could not go online ({described(error)}): recorded offline in "
                f"{self._run_dir}/wandb; send it with: wandb sync"
            )
        for side in Side:
            step = f"steps/{side.value}/step"
            self._run.define_metric(step, hidden=True, summary="none")
            self._run.define_metric(f"steps/{side.value}/*", step_metric=step, summary="none")

    def _init(self, mode: str) -> Any:
        import wandb

        options = self._options
        if mode == "online":
            require_key(wandb)
        return wandb.init(
            project=options.project,
            entity=options.entity,
            group=options.group,
            name=options.name,
            job_type=options.job_type,
            tags=list(options.tags),
            notes=options.notes,
            dir=str(self._run_dir),
            config=self._config,
            settings=_settings(wandb, mode, options),
        )

    def _log_summary(self, summary: Summary) -> None:
        figures = final_figures(summary)
        tables = {
            "acceptance_by_position": media.position_table(summary),
            "figures": media.figure_table(figures, but=SORTED),
        }
        if self._rows:
            tables["requests"] = media.request_table(self._rows)
        found = {name: _table(table) for name, table in tables.items() if table}
        found |= {
            f"histograms/{name}": _histogram(bins)
            for name, bins in media.histograms(self._rows, self._step_ms)
        }
        if found:
            self._run.log(found)
        self._run.summary.update({name: figures[name] for name in SORTED if name in figures})
        assessment = summary.get("assessment")
        if self._options.notes is None and assessment:
            self._run.notes = assessment["sentence"]

    # ------------------------------------------------------------------ helpers

    def _submit(self, job: Callable[[], None]) -> None:
        if self._failure is None and not self._closed:
            self._jobs.put(job)

    def _give_up(self, reason: str) -> None:
        if self._failure is None:
            self._failure = reason
            where = f" (project {self._options.project}, mode {self._options.mode})"
            self._warnings.append(
                f"{reason}{where}; the run went on without it, its files are complete"
            )


def _settings(wandb: Any, mode: str, options: TrackerOptions) -> Any:
    """Settings that print nothing and collect nothing about the machine or the checkout: no
    console, code, git, host or usage.
    """
    values = {
        "mode": mode,
        "silent": True,
        "console": "off",
        "disable_git": True,
        "disable_code": True,
        "save_code": False,
        "disable_job_creation": True,
        "x_disable_stats": True,
        "x_disable_meta": True,
        "x_disable_machine_info": True,
        "x_save_requirements": False,
        "reinit": "create_new",
        "init_timeout": options.init_timeout_seconds,
        "finish_timeout": options.finish_timeout_seconds,
        "finish_timeout_raises": True,
    }
    known = wandb.Settings.model_fields  # releases differ in the settings they know
    return wandb.Settings(**{key: value for key, value in values.items() if key in known})


def _table(table: media.PlainTable) -> Any:
    import wandb

    return wandb.Table(columns=list(table.columns), data=[list(row) for row in table.rows])


def _histogram(bins: media.Bins) -> Any:
    import wandb

    return wandb.Histogram(np_histogram=(list(bins.counts), list(bins.edges)))


def final_figures(summary: Mapping[str, Any]) -> dict[str, Any]:
    """A summary's values by slash-joined name, and the speed of one user, which charts need."""
    wait = summary.get("time_per_output_token_ms")
    per_user = {"tokens_per_second_per_user": 1000 / wait} if wait else {}
    return {**flattened(summary), **per_user}


def require_key(wandb: Any) -> None:
    """Raise RuntimeError without an API key, which wandb would prompt for."""
    can_ask_silently = "prompt" in inspect.signature(wandb.login).parameters
    if can_ask_silently and not wandb.login(prompt=False):
        raise RuntimeError("no API key is configured; log in first with: wandb login")


def described(error: BaseException) -> str:
    """Kind and first line of an error."""
    lines = str(error).strip().splitlines()
    return ": ".join([type(error).__name__, *lines[:1]])


def flattened(summary: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Numbers, strings and booleans of nested dicts and lists under slash-joined names; nulls
    are left out.
    """
    flat: dict[str, Any] = {}
    for key, value in summary.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat.update(flattened(value, f"{name}/"))
        elif isinstance(value, list):
            flat.update(flattened({str(i): item for i, item in enumerate(value)}, f"{name}/"))
        elif value is not None:
            flat[name] = value
    return flat
