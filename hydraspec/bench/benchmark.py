"""The interface of benchmarks: the rows that each measures, and its columns in the table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hydraspec.config.schema import RunConfig
from hydraspec.engine.base import Engine
from hydraspec.metrics.files import Json
from hydraspec.metrics.statistics import ratio
from hydraspec.study.blocks import Block
from hydraspec.types import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A chart of a report: a figure of each part against rates, turns, batches or passes."""

    title: str
    note: str
    x_name: str
    y_name: str
    points: Callable[[Json], Sequence[tuple[float | None, float | None]]]  # (x, y) of a part


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table, whose cells hold numbers side by side, or a word.

    Attributes:
        of: gives the numbers, or the word, for a part's line.
        digits: decimal places of the numbers.
        ratio_digits: decimal places of ratios of two engines in a line below; None: no ratios.
    """

    heading: str
    of: Callable[[Json], Sequence[float | None] | str]
    digits: int = 0
    ratio_digits: int | None = None

    def cell(self, line: Json) -> str:
        """The text of the cell in a part's line."""
        found = self.of(line)
        return found if isinstance(found, str) else _side_by_side(found, self.digits)

    def ratio_cell(self, ours: Json, theirs: Json) -> str:
        """The text of the cell below two engines' lines: ours / theirs; empty without ratios."""
        a, b = self.of(ours), self.of(theirs)
        if self.ratio_digits is None or isinstance(a, str) or isinstance(b, str):
            return ""
        return _side_by_side(list(map(ratio_of, a, b)), self.ratio_digits)


class Benchmark(ABC):
    """A choice of the config group `bench`. A part is an engine with a method, in several rows."""

    question: str  # title of a report over the benchmark; {} is the target
    curves: Sequence[Curve]
    heading: str  # of the table in bench.html
    unit: str  # name of what a row measures
    units: str
    keys: Sequence[str]  # keys of config.bench that say what is measured
    engine_keys: Sequence[str] = ()  # keys of config.engine that do so
    needs_times = False  # of each request's tokens, for which vLLM records its steps

    def settings(self, config: RunConfig) -> Json:
        """The settings in bench.json that say what is measured, by key."""
        found = {key: getattr(config.bench, key) for key in self.keys}
        return {**found, **{key: getattr(config.engine, key) for key in self.engine_keys}}

    @abstractmethod
    def num_rows(self, config: RunConfig) -> int:
        """Number of rows of a complete part."""

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
        """Overrides that the earlier parts add to the command of the next one's process."""
        return []

    @abstractmethod
    def summary_line(self, part: Json) -> str:
        """The main figures of a part that has rows, in words."""

    @abstractmethod
    def comparison_line(self, ours: Json, theirs: Json) -> str:
        """A comparison of a part with another engine's part with the same method, in words."""

    @abstractmethod
    def title(self, result: Json) -> str:
        """The rest of the table's title, after target and dtype."""

    @abstractmethod
    def columns(self, result: Json) -> list[Column]:
        """The columns that only this benchmark has."""

    def lines(self, part: Json) -> list[Json]:
        """A part's lines in the table, in the form that `columns` read."""
        return [part]

    def blocks(self, part: Json) -> Iterator[Block]:
        """Yield further parts of a report over a part with rows."""
        yield from ()

    @abstractmethod
    def ratios(self, ours: Json, theirs: Json) -> Json:
        """Times of one part over those of another, where both were measured."""


def figure(value: float | None, digits: int) -> str:
    """A number in a cell; a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def ratio_of(ours: float | None, theirs: float | None) -> float | None:
    """ours / theirs; None where one is missing, or theirs is 0."""
    return None if ours is None or theirs is None else ratio(ours, theirs)


def _side_by_side(values: Sequence[float | None], digits: int) -> str:
    return " / ".join(figure(value, digits) for value in values)
