"""Measured milliseconds of decode steps, by requests in the step and drafts per request.

Plain numbers that engines measure, a run saves and predictions read; knows no engine.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hydraspec.errors import ConfigurationError

SCHEMA_VERSION = 1
Grid = tuple[tuple[float, ...], ...]  # a row per batch, a column per number of drafts


@dataclass(slots=True, frozen=True)
class StepCost:
    """Time of one decode step, in milliseconds."""

    step_ms: float  # the whole step: verifying the drafts, sampling, drafting the next ones
    draft_ms: float | None  # of it drafting; None: not measured
    outside: bool = False  # nothing was measured so far out: the nearest measured one's

    @property
    def verify_ms(self) -> float | None:
        """All but drafting; None where drafting was not measured."""
        return None if self.draft_ms is None else self.step_ms - self.draft_ms


@dataclass(slots=True, frozen=True, kw_only=True)
class CostTable:
    """Decode steps of one engine at measured batches and numbers of drafts.

    An entry is of a step in which every request has K drafts to verify and drafts K. With K=0 in a
    table of an engine without a drafter it is the cost of the baseline's step.

    Raises:
        ValueError: not ascending, other shapes, times that are not positive and finite, drafting
            that takes longer than its step, or rates that are not from 0 to 1.
    """

    batches: tuple[int, ...]  # requests in a step, ascending
    drafts: tuple[int, ...]  # drafts per request (K), ascending
    step_ms: Grid
    draft_ms: Grid | None = None  # of step_ms; None: not measured
    # Of draft i, that it was accepted after i accepted ones, in the measured steps; empty: unknown.
    rates: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name, values, least in (("batches", self.batches, 1), ("drafts", self.drafts, 0)):
            if not values or list(values) != sorted(set(values)) or values[0] < least:
                raise ValueError(f"{name} {list(values)} are not ascending numbers from {least}")
        for name, grid in (("step_ms", self.step_ms), ("draft_ms", self.draft_ms)):
            if grid is None:
                continue
            if [len(row) for row in grid] != [len(self.drafts)] * len(self.batches):
                raise ValueError(
                    f"{name} is not {len(self.batches)} batches by {len(self.drafts)} drafts"
                )
            least_ms = math.ulp(0.0) if grid is self.step_ms else 0.0
            if not all(least_ms <= each < math.inf for row in grid for each in row):
                raise ValueError(f"{name} has a time that is not positive and finite")
        for steps, parts in zip(self.step_ms, self.draft_ms or (), strict=False):
            if any(part > step for step, part in zip(steps, parts, strict=True)):
                raise ValueError("draft_ms is more than the step's whole time")
        if self.rates and len(self.rates) < self.drafts[-1]:
            raise ValueError(f"rates is not of {self.drafts[-1]} drafts")
        if not all(0 <= rate <= 1 for rate in self.rates):
            raise ValueError("rates has one that is not from 0 to 1")

    def at(self, batch: float, num_drafts: int) -> StepCost:
        """The cost of a step of `batch` requests with `num_drafts` each: linear between measured
        neighbours. Outside the measured range it is that of the nearest edge, and says so.
        """
        row, is_out = _place(self.batches, batch)
        column, is_wider = _place(self.drafts, num_drafts)
        return StepCost(
            step_ms=_between(self.step_ms, row, column),
            draft_ms=None if self.draft_ms is None else _between(self.draft_ms, row, column),
            outside=is_out or is_wider,
        )

    def as_json(self) -> dict[str, Any]:
        """The content of a file that `from_json` takes."""
        content = {"schema_version": SCHEMA_VERSION, **asdict(self)}
        if not self.rates:
            del content["rates"]
        return content


def merged(tables: Sequence[CostTable]) -> CostTable:
    """The tables of engines with different K, ascending and of the same batches, as one."""
    first, rows = tables[0], range(len(tables[0].batches))
    assert all(table.batches == first.batches for table in tables), "measured at equal batches"
    drafting = [table.draft_ms for table in tables if table.draft_ms is not None]
    return CostTable(
        batches=first.batches,
        drafts=tuple(k for table in tables for k in table.drafts),
        step_ms=tuple(tuple(ms for table in tables for ms in table.step_ms[i]) for i in rows),
        draft_ms=tuple(tuple(ms for grid in drafting for ms in grid[i]) for i in rows)
        if len(drafting) == len(tables)
        else None,
    )


def averaged(tables: Sequence[CostTable]) -> CostTable:
    """The mean of tables of the same steps, measured several times."""
    grids = [table.step_ms for table in tables]
    return CostTable(
        batches=tables[0].batches,
        drafts=tables[0].drafts,
        step_ms=tuple(
            tuple(sum(times) / len(times) for times in zip(*rows, strict=True))
            for rows in zip(*grids, strict=True)
        ),
    )


def from_json(found: object, source: str) -> CostTable:
    """The table in the content of a JSON file; `source` names it in messages.

    Raises:
        ConfigurationError: it is none.
    """
    try:
        if not isinstance(found, Mapping) or found.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(f"schema_version is not {SCHEMA_VERSION}")
        draft_ms = found["draft_ms"]
        return CostTable(
            batches=tuple(_whole(each) for each in found["batches"]),
            drafts=tuple(_whole(each) for each in found["drafts"]),
            step_ms=_grid(found["step_ms"]),
            draft_ms=None if draft_ms is None else _grid(draft_ms),
            rates=tuple(float(each) for each in found.get("rates", ())),
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


@dataclass(slots=True, frozen=True)
class _Place:
    low: int
    high: int
    share: float  # of the way from low to high


def _place(known: Sequence[int], wanted: float) -> tuple[_Place, bool]:
    """Where a value lies among ascending ones, and whether it lies outside."""
    if wanted <= known[0]:
        return _Place(0, 0, 0.0), wanted < known[0]
    if wanted >= known[-1]:
        last = len(known) - 1
        return _Place(last, last, 0.0), wanted > known[-1]
    high = bisect_right(known, wanted)
    below, above = known[high - 1], known[high]
    return _Place(high - 1, high, (wanted - below) / (above - below)), False


def _between(grid: Grid, row: _Place, column: _Place) -> float:
    low, high = (
        grid[r][column.low] * (1 - column.share) + grid[r][column.high] * column.share
        for r in (row.low, row.high)
    )
    return low * (1 - row.share) + high * row.share
