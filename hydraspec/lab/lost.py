"""Requests written as they finish, so that another process can save a run whose process is lost.

While a run lasts, requests.jsonl has a line for each request that ended on either side, with all
counts up to then, and .unsaved.json has the facts that the run knew before its first step.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO, cast

from hydraspec.config import to_dict
from hydraspec.config.schema import RunConfig
from hydraspec.engine.base import Engine, EngineInfo
from hydraspec.lab import prediction
from hydraspec.lab.folder import RunFolder
from hydraspec.lab.recorder import Loaded, Recorder
from hydraspec.lab.rounds import Measurement
from hydraspec.metrics.counters import RequestCounters, StepSums
from hydraspec.metrics.files import Json, plain
from hydraspec.metrics.meter import Meter
from hydraspec.metrics.run_facts import RunFacts
from hydraspec.metrics.run_files import REQUESTS, SUMMARY, UNSAVED, written_since
from hydraspec.metrics.sinks import Side, Sink
from hydraspec.types import Completion, PrefixCaching, Request, Span, TokenLogprob
from hydraspec.workloads import generated
from hydraspec.workloads import reading as workloads

log = logging.getLogger(__name__)

OF_COMPLETION = tuple(each.name for each in fields(Completion))
OF_COUNTERS = tuple(each.name for each in fields(RequestCounters) if each.name != "inter_token_ms")


@dataclass(slots=True, frozen=True)
class Beginning:
    """Facts that a run knew before its first step: the content of .unsaved.json."""

    infos: Mapping[Side, EngineInfo]
    facts: RunFacts
    warnings: Sequence[str]
    at_s: float = field(default_factory=time.perf_counter)  # one clock for all processes of a host


class FinishedRequests(Sink):
    """Sink that writes a line of requests.jsonl for each request as it ends. If a line cannot be
    written the sink stops, and the run goes on: at its end the run writes the whole file again.

    Raises:
        CannotWriteError: .unsaved.json cannot be written.
    """

    def __init__(
        self, folder: RunFolder, requests: Sequence[Request], beginning: Beginning
    ) -> None:
        self._folder = folder
        self._ids = {request.index: request.id for request in requests}
        self._file: TextIO | None = None
        self._is_over = False
        self._round = 0
        self._num_events = 0  # events in the round's record of the prefix cache that are written
        infos = {side.value: info for side, info in beginning.infos.items()}
        folder.write_unsaved({**plain(beginning), "infos": plain(infos)})

    def on_round(self, side: Side, number: int, num_rounds: int) -> None:
        self._round, self._num_events = number, 0

    def on_completion(self, side: Side, completion: Completion, meter: Meter) -> None:
        counters = meter.counters[completion.index]
        events = [] if meter.prefix_hits is None else meter.prefix_hits.runs[-1]
        begun = [index for index, has_ended in events[self._num_events :] if not has_ended]
        self._num_events = len(events)
        self._write(
            {
                "id": self._ids[completion.index],
                "side": side.value,
                "round": self._round,
                **{name: getattr(completion, name) for name in OF_COMPLETION},
                **{name: getattr(counters, name) for name in OF_COUNTERS},
                "begun": begun,
                "steps": meter.steps,
                "at_s": time.perf_counter(),
            }
        )

    def close(self) -> None:
        """Stop writing and remove .unsaved.json: the run is saved, or cannot be saved."""
        self._end()
        self._folder.remove_unsaved()

    def _end(self) -> None:
        self._is_over = True
        if self._file is not None:
            with suppress(OSError):
                self._file.close()

    def _write(self, line: Json) -> None:
        """Add a line, which can be read even if this process is killed directly afterwards."""
        if self._is_over:
            return
        try:
            if self._file is None:
                self._file = (self._folder.path / REQUESTS).open("w", encoding="utf-8")
            self._file.write(json.dumps(line, default=plain) + "\n")
            self._file.flush()
        except OSError:
            self._end()


def save_finished(
    config: RunConfig,
    *,
    run_dir: Path,
    overrides: Sequence[str],
    error: Exception,
    since_s: float,
    quiet: bool,
) -> None:
    """Save the requests that a run had finished when its process was lost, as the run itself would
    have done after `error`.

    Nothing is saved if no run began in this folder after `since_s` (time.time()), or if that run is
    saved. An error in saving is logged, as `error` matters more. Files of steps and traces, and the
    tracker's record, stay as they are. Figures over steps end with the last finished request.
    """
    try:
        if not written_since(run_dir / UNSAVED, since_s):
            return
        folder = RunFolder(run_dir, to_dict(config), overrides)
        if written_since(run_dir / SUMMARY, since_s):
            folder.remove_unsaved()
            return
        _save(config, folder, overrides, error, quiet=quiet)
    except Exception as other:
        log.warning("%s: what had finished could not be saved: %s", run_dir, other)


def _save(
    config: RunConfig,
    folder: RunFolder,
    overrides: Sequence[str],
    error: Exception,
    *,
    quiet: bool,
) -> None:
    known = json.loads((folder.path / UNSAVED).read_text(encoding="utf-8"))
    infos = {Side(side): _info(facts) for side, facts in known.pop("infos").items()}
    beginning = Beginning(infos, **known)
    facts, vocab_size = beginning.facts, infos[Side.method].vocab_size
    workload = workloads.read(config) or generated.random_requests(config, vocab_size)
    workload.warnings = list(beginning.warnings)
    loaded = Loaded(
        config=replace(
            config,
            metrics=replace(config.metrics, steps=False, trace=False, all_positions=False),
        ),
        typed=overrides,
        # Facts are all that is left of the lost process's engines.
        engines={side: cast(Engine, SimpleNamespace(info=info)) for side, info in infos.items()},
        workload=workload,
        expected=prediction.read(config),
        tracker=None,
        decode=None,
        facts=lambda _: facts,
    )
    with closing(Recorder(folder, loaded, quiet=quiet)) as recorder:
        measurement = Measurement(loaded.engines, workload.requests, [], concurrency=None)
        lines = _lines(folder.path / REQUESTS)
        _count(lines, measurement)
        facts["run_s"] += (lines[-1]["at_s"] if lines else beginning.at_s) - beginning.at_s
        recorder.save_early(error, measurement)


def _lines(path: Path) -> list[dict[str, Any]]:
    """The lines that were written whole; the last one may have been cut."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def _count(lines: Iterable[dict[str, Any]], measurement: Measurement) -> None:
    """Count requests in `measurement` as the run had counted them when it wrote their lines."""
    rounds = set[tuple[str, int]]()
    for line in lines:
        measured = measurement.sides[Side(line["side"])]
        meter, index = measured.meter, line["index"]
        if (begun := (line["side"], line["round"])) not in rounds:
            rounds.add(begun)
            meter.begin_run()
        meter.first_steps(line["begun"])
        meter.counters[index] = _counters(line)
        meter.steps = StepSums.of_json(line["steps"])
        measured.completions[index] = _completion(line)
        meter.add_completion(measured.completions[index])


def _completion(line: Mapping[str, Any]) -> Completion:
    found = {name: line[name] for name in OF_COMPLETION}
    for name in ("logprobs", "prompt_logprobs"):
        found[name] = found[name] and [TokenLogprob.of(each) for each in found[name]]
    return Completion(**{**found, "spans": tuple(Span(**span) for span in line["spans"])})


def _counters(line: Mapping[str, Any]) -> RequestCounters:
    found = {name: line[name] for name in OF_COUNTERS}
    for name in ("drafts_by_place", "survival_bins"):
        found[name] = {int(place): counts for place, counts in line[name].items()}
    return RequestCounters(**found)


def _info(known: Mapping[str, Any]) -> EngineInfo:
    """The EngineInfo that .unsaved.json has, without costs, which only one warning needs."""
    caching = known["prefix_caching"]
    objects = {"prefix_caching": caching and PrefixCaching(**caching), "costs": None}
    return EngineInfo(**{**known, **objects})
