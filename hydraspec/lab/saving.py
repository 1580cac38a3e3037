"""Saving a run: from its measurement to its files, whatever ended it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from hydraspec.config.schema import RunConfig
from hydraspec.engine.base import Engine, EngineInfo
from hydraspec.lab import prediction, summary, verdict
from hydraspec.lab.recorder import Recorder
from hydraspec.lab.rounds import Measurement
from hydraspec.lab.run_warnings import warnings_of
from hydraspec.metrics.sinks import Side
from hydraspec.metrics.summary import Lossless, RunFacts, Status, Summary
from hydraspec.metrics.tracker import WandbSink
from hydraspec.types import NotFiniteError
from hydraspec.workloads.reading import Workload


@dataclass(slots=True, frozen=True, kw_only=True)
class Loaded:
    """What a run has before its first step."""

    config: RunConfig
    typed: Sequence[str]  # its overrides
    engines: Mapping[Side, Engine]
    workload: Workload
    expected: prediction.Expected
    tracker: WandbSink | None
    decode: Callable[[Sequence[int]], str] | None  # text of tokens, where the run shows any
    facts: Callable[[EngineInfo], RunFacts]  # as they are at its end


def save(
    loaded: Loaded,
    measurement: Measurement,
    recorder: Recorder,
    status: Status,
    lossless: Lossless,
    warnings: Sequence[str] = (),
) -> Summary:
    """Write the run's files and its page, tell tracker and console; returns the summary.

    Raises:
        CannotWriteError: see RunFolder.
    """
    rows = summary.request_rows(loaded.workload.requests, measurement)
    return recorder.save(partial(_summarise, loaded, measurement, status, lossless, warnings), rows)


def save_despite(
    error: Exception, loaded: Loaded, measurement: Measurement, recorder: Recorder
) -> None:
    """Save what had finished before an error, if the disk allows; the error itself matters more."""
    try:
        save_early(error, loaded, measurement, recorder)
    except OSError as other:
        error.add_note(f"and what had finished could not be saved: {other}")


def save_early(
    error: Exception, loaded: Loaded, measurement: Measurement, recorder: Recorder
) -> None:
    """Save what had finished before an error.

    Raises:
        CannotWriteError: see RunFolder.
    """
    lossless = verdict.not_checked(
        "the run ended early", loaded.workload.requests, measurement.method.completions
    )
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, NotFiniteError):
        lossless["not_finite_in"], reason = error.request_id, error.finding
    warnings = [f"the run ended early: {reason}"]
    save(loaded, measurement, recorder, "failed", lossless, warnings)


def _summarise(
    loaded: Loaded,
    measurement: Measurement,
    status: Status,
    lossless: Lossless,
    warnings: Sequence[str],
) -> Summary:
    info = measurement.method.engine.info
    result = summary.build(
        loaded.config,
        measurement,
        lossless,
        status=status,
        facts=loaded.facts(info),
        expected=loaded.expected,
    )
    known = (*loaded.config.warnings, *loaded.workload.warnings, *info.warnings, *warnings)
    found = warnings_of(loaded.config, result, measurement, loaded.typed)
    result["warnings"] = list(dict.fromkeys((*known, *found)))
    return result
