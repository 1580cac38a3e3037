"""What a run has finished, kept where another process can read it: the process that decodes may be
killed or stand still, and several ranks have one that is left then.

JSON lines: what the run knew when it began, then a line for each round, for requests that have
their first step, and for each completion with all that was counted until then. Steps have no lines,
so that even a long run's journal is read within a moment.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TextIO

from hydraspec.engine.base import EngineInfo
from hydraspec.metrics.files import plain
from hydraspec.metrics.meter import Meter, RequestCounters
from hydraspec.metrics.run_files import JOURNAL
from hydraspec.metrics.sinks import Side, Sink
from hydraspec.metrics.step_sums import StepSums
from hydraspec.metrics.summary import RunFacts
from hydraspec.types import Completion, PrefixCaching, Span, StepRecord

OF_COMPLETION = tuple(each.name for each in fields(Completion))
OF_COUNTERS = tuple(each.name for each in fields(RequestCounters) if each.name != "inter_token_ms")


@dataclass(slots=True, frozen=True)
class Beginning:
    """What a run knew before its first step; `at_s`: see Event."""

    infos: Mapping[Side, EngineInfo]
    facts: RunFacts
    warnings: Sequence[str]
    at_s: float = field(default_factory=time.perf_counter)


@dataclass(slots=True, frozen=True)
class FirstSteps:
    """Requests that had their first step, by index."""

    indices: Sequence[int]


@dataclass(slots=True, frozen=True)
class Finished:
    """A completion, with the counters of its request and of all steps as they were then."""

    completion: Completion
    counters: RequestCounters
    steps: StepSums


@dataclass(slots=True, frozen=True)
class Event:
    """None: a round began. `at_s`: time.perf_counter(), which all processes of a host share."""

    side: Side
    at_s: float
    what: FirstSteps | Finished | None


class Journal(Sink):
    """Writes it. A disk that is full ends the journal, not the run."""

    def __init__(self, folder: Path, beginning: Beginning) -> None:
        self._begun: dict[Side, set[int]] = {side: set() for side in Side}
        self._file: TextIO | None = None
        with suppress(OSError):
            self._file = (folder / JOURNAL).open("w", encoding="utf-8")
        infos = {side.value: info for side, info in beginning.infos.items()}
        self._write(infos, beginning.facts, beginning.warnings, beginning.at_s)

    def on_round(self, side: Side, number: int, num_rounds: int) -> None:
        self._write(side.value, time.perf_counter())

    def on_step(self, side: Side, record: StepRecord, meter: Meter) -> None:
        begun = self._begun[side]
        new = [part.index for part in record.requests if part.index not in begun]
        if new:
            begun.update(new)
            self._write(side.value, time.perf_counter(), new)

    def on_completion(self, side: Side, completion: Completion, meter: Meter) -> None:
        counters = meter.counters[completion.index]
        self._write(
            *(side.value, time.perf_counter()),
            [getattr(completion, name) for name in OF_COMPLETION],
            [getattr(counters, name) for name in OF_COUNTERS],
            meter.steps.as_json(),
        )

    def close(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
        self._file = None

    def _write(self, *line: object) -> None:
        """Add a line, which is read also if this process is killed from then on."""
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(line, separators=(",", ":"), default=plain) + "\n")
            self._file.flush()
        except OSError:
            self.close()


def read(folder: Path) -> tuple[Beginning, Iterator[Event]] | None:
    """The journal of a run folder: how the run began, and its events; None where there is no whole
    first line.

    Raises:
        OSError: there is none.
    """
    lines = (folder / JOURNAL).read_text(encoding="utf-8").splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]  # the last one may have been cut
    if not whole:
        return None
    infos, *known = json.loads(whole[0])
    beginning = Beginning({Side(side): _info(info) for side, info in infos.items()}, *known)
    return beginning, (_event(*json.loads(line)) for line in whole[1:])


def _event(side: str, at_s: float, *own: Any) -> Event:
    what: FirstSteps | Finished | None = None
    if len(own) == 1:
        what = FirstSteps(own[0])
    elif own:
        completion, counters, steps = own
        what = Finished(
            _completion(dict(zip(OF_COMPLETION, completion, strict=True))),
            _counters(dict(zip(OF_COUNTERS, counters, strict=True))),
            StepSums.of_json(steps),
        )
    return Event(Side(side), at_s, what)


def _completion(found: dict[str, Any]) -> Completion:
    spans = tuple(Span(**span) for span in found["spans"])
    return Completion(**{**found, "spans": spans})


def _counters(found: dict[str, Any]) -> RequestCounters:
    found["drafts_by_place"] = {int(place): n for place, n in found["drafts_by_place"].items()}
    return RequestCounters(**found)


def _info(known: Mapping[str, Any]) -> EngineInfo:
    """Without its costs, for which only one warning asks."""
    caching = known["prefix_caching"]
    objects = {"prefix_caching": caching and PrefixCaching(**caching), "costs": None}
    return EngineInfo(**{**known, **objects})
