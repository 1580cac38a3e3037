"""What a run has finished, kept where another process can read it: the process that decodes may be
killed or stand still, and several ranks have one that is left then.

JSON lines: what the run knew when it began, then a line per round, step and completion. Of a step's
tokens the counts are kept alone, which is all that metrics take from them.
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
from hydraspec.metrics.meter import Meter
from hydraspec.metrics.run_files import JOURNAL
from hydraspec.metrics.sinks import Side, Sink
from hydraspec.metrics.summary import RunFacts
from hydraspec.types import Completion, PrefixCaching, RequestStep, StepRecord

ROUND, STEP, COMPLETION = "round", "step", "completion"
OF_COMPLETION = tuple(each.name for each in fields(Completion))
OF_STEP = tuple(each.name for each in fields(StepRecord) if each.name != "requests")


@dataclass(slots=True, frozen=True)
class Beginning:
    """What a run knew before its first step; `at_s`: see Event."""

    infos: Mapping[Side, EngineInfo]
    facts: RunFacts
    warnings: Sequence[str]
    at_s: float = field(default_factory=time.perf_counter)


@dataclass(slots=True, frozen=True, kw_only=True)
class Event:
    """A round that began (its number), a step or a completion; `at_s`: time.perf_counter(), which
    all processes of a host share."""

    side: Side
    what: int | StepRecord | Completion
    at_s: float


class Journal(Sink):
    """Writes it. A disk that is full ends the journal, not the run."""

    def __init__(self, folder: Path, beginning: Beginning) -> None:
        self._path = folder / JOURNAL
        self._file: TextIO | None = None
        with suppress(OSError):
            self._file = self._path.open("w", encoding="utf-8")
        infos = {side.value: plain(info) for side, info in beginning.infos.items()}
        self._write([infos, beginning.facts, beginning.warnings, beginning.at_s])
        self._flush()

    def on_round(self, side: Side, number: int, num_rounds: int) -> None:
        self._write([ROUND, side.value, time.perf_counter(), number])

    def on_step(self, side: Side, record: StepRecord, meter: Meter) -> None:
        parts = [_counts(part) for part in record.requests]
        own = [getattr(record, name) for name in OF_STEP]
        self._write([STEP, side.value, time.perf_counter(), own, parts])

    def on_completion(self, side: Side, completion: Completion, meter: Meter) -> None:
        own = [getattr(completion, name) for name in OF_COMPLETION]
        self._write([COMPLETION, side.value, time.perf_counter(), own])
        self._flush()

    def remove(self) -> None:
        """The run has saved what it finished."""
        self.close()
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def close(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
        self._file = None

    def _write(self, line: object) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(line, separators=(",", ":"), default=plain) + "\n")
        except OSError:
            self.close()

    def _flush(self) -> None:
        """A completion is read from then on, also if this process is killed."""
        if self._file is None:
            return
        try:
            self._file.flush()
        except OSError:
            self.close()


def read(folder: Path) -> tuple[Beginning, Iterator[Event]] | None:
    """The journal of a run folder: how the run began, and its events; None where there is none, or
    no whole first line."""
    try:
        lines = (folder / JOURNAL).read_text(encoding="utf-8").splitlines(keepends=True)
    except OSError:
        return None
    whole = [line for line in lines if line.endswith("\n")]  # the last one may have been cut
    if not whole:
        return None
    infos, *known = json.loads(whole[0])
    beginning = Beginning({Side(side): _info(info) for side, info in infos.items()}, *known)
    return beginning, (_event(json.loads(line)) for line in whole[1:])


def _counts(part: RequestStep) -> list[int]:
    num_drafts = sum(token >= 0 for token in part.draft_token_ids)
    return [
        *(part.index, part.num_rows, int(part.is_prefill), part.num_computed_tokens),
        *(num_drafts, part.num_accepted, len(part.output_token_ids)),
    ]


def _request_step(counts: list[int]) -> RequestStep:
    index, num_rows, is_prefill, num_computed, num_drafts, num_accepted, num_emitted = counts
    return RequestStep(
        index=index,
        num_rows=num_rows,
        is_prefill=bool(is_prefill),
        num_computed_tokens=num_computed,
        draft_token_ids=[0] * num_drafts,
        num_accepted=num_accepted,
        output_token_ids=[0] * num_emitted,
    )


def _event(line: list[Any]) -> Event:
    kind, side, at_s, *own = line
    what: int | StepRecord | Completion
    if kind == ROUND:
        (what,) = own
    elif kind == STEP:
        values, parts = own
        named = dict(zip(OF_STEP, values, strict=True))
        what = StepRecord(**named, requests=[_request_step(part) for part in parts])
    else:
        what = Completion(**dict(zip(OF_COMPLETION, own[0], strict=True)))
    return Event(side=Side(side), what=what, at_s=at_s)


def _info(known: Mapping[str, Any]) -> EngineInfo:
    """Without its costs, for which only one warning asks."""
    caching = known["prefix_caching"]
    objects = {"prefix_caching": caching and PrefixCaching(**caching), "costs": None}
    return EngineInfo(**{**known, **objects})
