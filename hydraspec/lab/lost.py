"""Saving what a run had finished whose process is gone, from its journal."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from hydraspec.config import to_dict
from hydraspec.config.schema import RunConfig
from hydraspec.engine.base import Engine, EngineInfo
from hydraspec.lab import journal, prediction, saving
from hydraspec.lab.folder import RunFolder
from hydraspec.lab.recorder import Recorder
from hydraspec.lab.rounds import Measurement
from hydraspec.metrics.run_files import JOURNAL, SUMMARY, written_since
from hydraspec.metrics.sinks import Side
from hydraspec.types import Request, Span
from hydraspec.workloads import generated
from hydraspec.workloads import reading as workloads

GONE = "the process of this engine is gone"

log = logging.getLogger(__name__)


def save_finished(
    config: RunConfig,
    *,
    run_dir: Path,
    overrides: Sequence[str],
    error: Exception,
    since_s: float,
    quiet: bool,
) -> None:
    """Save what a run had finished by the time its process was lost, as it would have with `error`.

    Nothing where it left no journal in this folder after `since_s` (time.time()): it had not begun,
    or the folder is another host's. What goes wrong here is logged: the error itself matters more.
    Steps and traces stay as they are, and so does what the tracker was told. Figures over steps are
    those up to the last request that was finished.
    """
    path = run_dir / JOURNAL
    try:
        if not written_since(path, since_s):
            return
        folder = RunFolder(run_dir, to_dict(config), overrides)
        if written_since(run_dir / SUMMARY, since_s):
            folder.remove_journal()
            return
        _save(config, folder, overrides, error, quiet=quiet)
    except Exception as other:
        log.warning("%s: what had finished could not be saved: %s", path, other)


def _save(
    config: RunConfig,
    folder: RunFolder,
    overrides: Sequence[str],
    error: Exception,
    *,
    quiet: bool,
) -> None:
    found = journal.read(folder.path)
    if found is None:
        return
    beginning, events = found
    info, facts = beginning.infos[Side.method], beginning.facts
    workload = workloads.read(config) or generated.random_requests(config, info.vocab_size)
    workload.warnings = list(beginning.warnings)
    loaded = saving.Loaded(
        config=config,
        typed=overrides,
        engines={side: _Gone(info) for side, info in beginning.infos.items()},
        workload=workload,
        expected=prediction.read(config),
        tracker=None,
        decode=None,
        facts=lambda _: facts,
    )
    recorder = Recorder(
        folder,
        workload.requests,
        metrics=replace(config.metrics, steps=False, trace=False, all_positions=False),
        method=info.method,
        sides=list(beginning.infos),
        tracker=None,
        decode=None,
        quiet=quiet,
    )
    with closing(recorder):
        measurement = Measurement(
            loaded.engines,
            workload.requests,
            recorder.sinks,
            concurrency=config.workload.concurrency,
        )
        facts["run_s"] += _replay(events, measurement, beginning.at_s) - beginning.at_s
        saving.save_early(error, loaded, measurement, recorder)


def _replay(events: Iterable[journal.Event], measurement: Measurement, at_s: float) -> float:
    """Have a measurement count the events; returns when the last one was, `at_s` without any."""
    began_s, before_s = at_s, 0.0
    for event in events:
        measured, at_s = measurement.sides[event.side], event.at_s
        meter, what = measured.meter, event.what
        if what is None:
            began_s, before_s = at_s, measured.rounds_s
            meter.begin_run()
            continue
        measured.rounds_s = before_s + at_s - began_s
        if isinstance(what, journal.FirstSteps):
            meter.first_steps(what.indices)
        else:
            meter.counters[what.completion.index], meter.steps = what.counters, what.steps
            measurement.record(event.side, what.completion)
    return at_s


class _Gone(Engine):
    """What is left of the lost process's engine: its facts."""

    def __init__(self, info: EngineInfo) -> None:
        self.info = info

    def tokenize(self, requests: Sequence[Request]) -> NoReturn:
        raise RuntimeError(GONE)

    def run(self, requests: Sequence[Request], *, concurrency: int | None) -> NoReturn:
        raise RuntimeError(GONE)

    def baseline(self) -> NoReturn:
        raise RuntimeError(GONE)

    def next_token_logits(self, token_ids: Sequence[int], spans: tuple[Span, ...] = ()) -> NoReturn:
        raise RuntimeError(GONE)
