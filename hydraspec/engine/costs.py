"""Milliseconds of decode steps by their requests, drafts and context: how they are timed, and the
table that a run saves and later runs read. The module uses no engine.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from hydraspec.errors import ConfigurationError
from hydraspec.types import Request, StepRecord

SCHEMA_VERSION = 2  # 1 had no contexts
READABLE = (1, SCHEMA_VERSION)
# A row per context and batch, batches of the first context first; a column per number of drafts.
Grid = tuple[tuple[float, ...], ...]


@dataclass(slots=True, frozen=True)
class StepCost:
    """Time of one decode step, in milliseconds."""

    step_ms: float  # the whole step: verifying the drafts, sampling, drafting the next ones
    draft_ms: float | None  # the part of it that is drafting; None: not measured
    ragged_ms: float | None = None  # see CostTable

    @property
    def verify_ms(self) -> float | None:
        """All but drafting; None where drafting was not measured."""
        return None if self.draft_ms is None else self.step_ms - self.draft_ms


@dataclass(slots=True, frozen=True, kw_only=True)
class CostTable:
    """Decode steps of one engine at measured batches and numbers of drafts, and where they are
    given at measured context lengths.

    An entry is of a step in which every request has K drafts to verify and drafts K. With K=0 in a
    table of an engine without a drafter it is the cost of the baseline's step.

    Raises:
        ValueError: not ascending, other shapes, times that are not positive and finite, drafting
            that takes longer than its step, or rates that are not from 0 to 1.
    """

    batches: tuple[int, ...]  # requests in a step, ascending
    drafts: tuple[int, ...]  # drafts per request (K), ascending
    step_ms: Grid  # an empty row: not measured, as the KV of such a batch does not fit
    draft_ms: Grid | None = None  # the part of step_ms that is drafting; None: not measured
    # What steps take longer in which requests verify one of two numbers of drafts, by their mean,
    # drafting of the larger number apart if draft_ms is known; None: not measured.
    ragged_ms: Grid | None = None
    # Share of draft i accepted after i accepted ones, in the measured steps; empty: unknown.
    rates: tuple[float, ...] = ()
    contexts: tuple[int, ...] = ()  # tokens of a request in the KV cache, ascending; empty: unknown

    def __post_init__(self) -> None:
        self._check_axes()
        for name in ("step_ms", "draft_ms", "ragged_ms"):
            if (grid := getattr(self, name)) is not None:
                self._check_grid(name, grid)
        for steps, parts in zip(self.step_ms, self.draft_ms or (), strict=False):
            if any(part > step for step, part in zip(steps, parts, strict=True)):
                raise ValueError("draft_ms is more than the step's whole time")
        if self.rates and len(self.rates) < self.drafts[-1]:
            raise ValueError(f"rates is not of {self.drafts[-1]} drafts")
        if not all(0 <= rate <= 1 for rate in self.rates):
            raise ValueError("rates has one that is not from 0 to 1")

    def _check_axes(self) -> None:
        axes = [("batches", self.batches, 1), ("drafts", self.drafts, 0)]
        axes += [("contexts", self.contexts, 1)] if self.contexts else []
        for name, values, least in axes:
            if not values or list(values) != sorted(set(values)) or values[0] < least:
                raise ValueError(f"{name} {list(values)} are not ascending numbers from {least}")

    def _check_grid(self, name: str, grid: Grid) -> None:
        widths, num_batches = [len(row) for row in grid], len(self.batches)
        planes = f"{len(self.contexts)} contexts of " if self.contexts else ""
        known = [width for width in widths if width or not self.contexts]
        is_whole = len(grid) == max(1, len(self.contexts)) * num_batches
        if not is_whole or known != [len(self.drafts)] * len(known):
            raise ValueError(
                f"{name} is not {planes}{num_batches} batches by {len(self.drafts)} drafts"
            )
        if not all(any(widths[i : i + num_batches]) for i in range(0, len(grid), num_batches)):
            raise ValueError(f"{name} has a context without any batch")
        if grid is not self.step_ms and widths != [len(row) for row in self.step_ms]:
            raise ValueError(f"{name} is not of the batches that step_ms has")
        least_ms = math.ulp(0.0) if grid is self.step_ms else 0.0
        if not all(least_ms <= each < math.inf for row in grid for each in row):
            raise ValueError(f"{name} has a time that is not positive and finite")

    def at(self, batch: float, num_drafts: float, context: float | None = None) -> StepCost:
        """The cost of a step of `batch` requests with `num_drafts` each and `context` tokens each
        in the KV cache (None: the shortest measured): linear between measured neighbours, and
        outside the measured range that of the nearest edge. At a context with fewer batches than
        others the largest one there is that edge."""
        where = batch, num_drafts, context
        draft_ms, ragged_ms = (
            None if grid is None else self._between(grid, *where)
            for grid in (self.draft_ms, self.ragged_ms)
        )
        return StepCost(self._between(self.step_ms, *where), draft_ms, ragged_ms)

    def _between(self, grid: Grid, batch: float, num_drafts: float, context: float | None) -> float:
        def at_context(index: int) -> float:
            rows = grid[index * len(self.batches) : (index + 1) * len(self.batches)]
            known = [(at, row) for at, row in zip(self.batches, rows, strict=True) if row]
            by_batch = [np.interp(num_drafts, self.drafts, row) for _, row in known]
            return float(np.interp(batch, [at for at, _ in known], by_batch))

        if context is None or len(self.contexts) < 2:
            return at_context(0)
        longer = min(max(bisect_right(self.contexts, context), 1), len(self.contexts) - 1)
        ends = self.contexts[longer - 1 : longer + 1]
        return float(np.interp(context, ends, [at_context(longer - 1), at_context(longer)]))

    def as_json(self) -> dict[str, Any]:
        """The content of a file that `from_json` takes."""
        content = {"schema_version": SCHEMA_VERSION, **asdict(self)}
        for optional in ("rates", "contexts", "ragged_ms"):
            if not content[optional]:
                del content[optional]
        return content


def over_contexts(tables: Mapping[int, CostTable], rates: Sequence[float] = ()) -> CostTable:
    """One table of those measured at each context, by its tokens. All have the same drafts; batches
    that some lack are not measured there."""
    contexts = sorted(tables)
    batches = sorted({batch for table in tables.values() for batch in table.batches})

    def grid(of: Callable[[CostTable], Grid | None]) -> Grid | None:
        rows: list[tuple[float, ...]] = []
        for context in contexts:
            if (found := of(tables[context])) is None:
                return None
            by_batch = dict(zip(tables[context].batches, found, strict=True))
            rows += [by_batch.get(batch, ()) for batch in batches]
        return tuple(rows)

    step_ms = grid(lambda table: table.step_ms)
    assert step_ms is not None
    return CostTable(
        batches=tuple(batches),
        drafts=tables[contexts[0]].drafts,
        step_ms=step_ms,
        draft_ms=grid(lambda table: table.draft_ms),
        ragged_ms=grid(lambda table: table.ragged_ms),
        rates=tuple(rates),
        contexts=tuple(contexts),
    )


Size = tuple[int, int]  # of a step: its requests, and the drafts of each
HALF = -1  # in place of the drafts of each: half of the requests verify K drafts, the others none


def full_size(record: StepRecord) -> Size | None:
    """The size of a step in which every request verified as many drafts as the step was planned
    for; None for any other step."""
    widths = {-1 if part.is_prefill else part.num_rows - 1 for part in record.requests}
    width = widths.pop() if len(widths) == 1 else -1
    if width < 0 or record.draft_length not in (None, width):
        return None
    return len(record.requests), width


def half_size(record: StepRecord) -> Size | None:
    """The size of a step in which half of the requests verify the drafts that the step was planned
    for, the others none; None for any other step."""
    widths = sorted(-1 if part.is_prefill else part.num_rows - 1 for part in record.requests)
    half, most = len(widths) // 2, record.draft_length
    is_half = half and most and widths == [0] * (len(widths) - half) + [most] * half
    return (len(widths), HALF) if is_half else None


def timed_size(record: StepRecord) -> Size | None:
    """The size of a step whose time is a cost: `full_size` or `half_size`."""
    return full_size(record) or half_size(record)


@dataclass(slots=True)
class StepTimes:
    """Milliseconds of decode steps in which every request verifies and proposes K drafts, and of
    those with `half_size`.

    Attributes:
        fastest, slowest: shares of the times of a size that its typical time leaves out.
        step_ms: whole steps.
        draft_ms: drafting in these steps; a size is absent where phases are not timed.
    """

    fastest: float = 0.0
    slowest: float = 0.0
    step_ms: dict[Size, list[float]] = field(default_factory=lambda: defaultdict(list))
    draft_ms: dict[Size, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, record: StepRecord) -> None:
        """Keep the times of a step of a `timed_size`: the device's where it has a clock, since
        where the host is late one step of its own is too short."""
        if (size := timed_size(record)) is None:
            return
        step_ms = record.total_ms if record.device_ms is None else record.device_ms
        self.step_ms[size].append(step_ms)
        if (drafting := record.phase_ms.get("propose")) is not None:
            self.draft_ms[size].append(drafting)

    def typical(self, times: Sequence[float]) -> float:
        """Mean of `times` without the shares `fastest` and `slowest`."""
        first, count = int(self.fastest * len(times)), len(times)
        return mean(sorted(times)[first : count - int(self.slowest * count)])

    def table(
        self, batches: Sequence[int], drafts: Sequence[int], rates: Sequence[float] = ()
    ) -> CostTable:
        """Typical times of every size of a grid; each size must have been added."""

        def grid(times: Mapping[Size, Sequence[float]]) -> Grid:
            return tuple(tuple(self.typical(times[b, k]) for k in drafts) for b in batches)

        has_phases = any(drafts) and all(self.draft_ms.get((b, k)) for b in batches for k in drafts)
        return CostTable(
            batches=tuple(batches),
            drafts=tuple(drafts),
            step_ms=grid(self.step_ms),
            draft_ms=grid(self.draft_ms) if has_phases else None,
            rates=tuple(rates),
        )


def filled_to(request: Request, context: int) -> Request:
    """The request with a prompt of `context` tokens, its own again and again, all but the last of
    which have KV that was never computed."""
    ids = request.prompt_token_ids or [0]
    repeated = (ids * -(-context // len(ids)))[:context]
    return replace(request, prompt_token_ids=repeated, spans=(), images=(), num_filled=context - 1)


def from_json(found: object, source: str) -> CostTable:
    """The table in the content of a JSON file; `source` names it in messages.

    Raises:
        ConfigurationError: the content is no such table.
    """
    try:
        if not isinstance(found, Mapping) or found.get("schema_version") not in READABLE:
            raise ValueError(f"schema_version is not {' or '.join(map(str, READABLE))}")
        draft_ms, ragged_ms = found["draft_ms"], found.get("ragged_ms")
        return CostTable(
            batches=tuple(_whole(each) for each in found["batches"]),
            drafts=tuple(_whole(each) for each in found["drafts"]),
            step_ms=_grid(found["step_ms"]),
            draft_ms=None if draft_ms is None else _grid(draft_ms),
            ragged_ms=None if ragged_ms is None else _grid(ragged_ms),
            rates=tuple(float(each) for each in found.get("rates", ())),
            contexts=tuple(_whole(each) for each in found.get("contexts", ())),
        )
    except (KeyError, TypeError, ValueError) as error:
        problem = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ConfigurationError(
            f"{source}: no table of step costs ({problem})\n"
            "  allowed: a table that HydraSpec wrote\n  to do: measure it again"
        ) from error


def read(path: Path) -> CostTable:
    """The table in a file.

    Raises:
        ConfigurationError: no such file, or no table in it.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(
            f"{path}: {error.strerror or error}\n  allowed: a file of step costs\n"
            "  to do: give the path of one"
        ) from error
    except ValueError:
        found = None
    return from_json(found, str(path))


def _whole(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{value!r} is no whole number")
    return value


def _grid(rows: Sequence[Sequence[float]]) -> Grid:
    return tuple(tuple(float(each) for each in row) for row in rows)
