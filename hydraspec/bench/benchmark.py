"""The parts in which benchmarks differ: the rows they measure, and their columns in the table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hydraspec.config.schema import RunConfig
from hydraspec.engine.base import Engine
from hydraspec.metrics.files import Json
from hydraspec.types import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A figure of each part against rates, turns, batches or passes: a chart of a report."""

    title: str
    note: str
    x_name: str
    y_name: str
    points: Callable[[Json], Sequence[tuple[float | None, float | None]]]  # of a part


class Benchmark(ABC):
    """One choice of the group `bench`. A part is an engine with a method, and has several rows."""

    question: str  # the title of a report over it, {} is the target
    curves: Sequence[Curve]
    heading: str  # of the table in bench.html
    unit: str  # what a row is of
    units: str
    needs_times = False  # of each request's tokens: vLLM then records its steps, too

    @abstractmethod
    def settings(self, config: RunConfig) -> Json:
        """The keys of bench.json that say what is measured."""

    @abstractmethod
    def num_rows(self, config: RunConfig) -> int:
        """Rows of a part that is whole."""

    @abstractmethod
    def rows(self, config: RunConfig, engine: Engine) -> Iterator[Json]:
        """Measure the rows of a part, one after another."""

    @abstractmethod
    def heavy_requests(self, config: RunConfig, engine: Engine) -> list[Request]:
        """Requests that keep the device busy while its clocks are read."""

    def figures(self, config: RunConfig, engine: Engine, rows: Sequence[Json]) -> Json:
        """Further keys of a part, measured once after its rows."""
        return {}

    def carried(self, config: RunConfig, parts: Sequence[Json]) -> list[str]:
        """What the earlier parts set for the next one's process, as overrides."""
        return []

    @abstractmethod
    def said(self, part: Json) -> str:
        """The main figures of a part that has rows, in words."""

    @abstractmethod
    def told(self, ours: Json, theirs: Json) -> str:
        """One part beside that of another engine with the same method, in words."""

    # ------------------------------------------------------------------ the table

    @abstractmethod
    def title(self, result: Json) -> str:
        """What is measured, after target and dtype."""

    @abstractmethod
    def columns(self, result: Json) -> list[str]:
        """Headings of the columns that only this benchmark has."""

    def num_lines(self, result: Json) -> int:
        """Lines of a part; those of several engines stand directly below each other."""
        return 1

    @abstractmethod
    def cells(self, part: Json, line: int, result: Json) -> list[str]:
        """The cells of a part's line in these columns; empty: it has no such line."""

    @abstractmethod
    def ratios(self, ours: Json, theirs: Json) -> Json:
        """Times of one part over those of another, where both were measured."""

    @abstractmethod
    def ratio_cells(self, ratios: Json, line: int, result: Json) -> list[str]:
        """The cells of these ratios, likewise."""


def figure(value: float | None, digits: int) -> str:
    """A number in a cell; a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"
