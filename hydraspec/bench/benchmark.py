"""The parts in which benchmarks differ: the rows they measure, and their columns in the table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from hydraspec.config.schema import RunConfig
from hydraspec.engine.base import Engine
from hydraspec.metrics.files import Json
from hydraspec.types import Request


class Benchmark(ABC):
    """One choice of the group `bench`. A part is an engine with a method, and has several rows."""

    heading: str  # of the table in bench.html
    unit: str  # what a row is of
    units: str

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

    # ------------------------------------------------------------------ the table

    @abstractmethod
    def title(self, result: Json) -> str:
        """What is measured, after target and dtype."""

    @abstractmethod
    def columns(self, result: Json) -> list[str]:
        """Headings of the columns that only this benchmark has."""

    @abstractmethod
    def cells(self, rows: Sequence[Json], result: Json) -> list[str]:
        """The cells of a part in these columns."""

    @abstractmethod
    def ratios(self, ours: Sequence[Json], theirs: Sequence[Json]) -> Json:
        """Times of one part over those of another, where both were measured."""

    @abstractmethod
    def ratio_cells(self, ratios: Json, result: Json) -> list[str]:
        """The cells of these ratios."""


def figure(value: float | None, digits: int) -> str:
    """A number in a cell; a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"
