"""Blocks: the parts that a report over runs is made of, the same on the page and in W&B."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hydraspec.study.charts import Chart

Kind = Literal["good", "bad", "plain", ""]  # a winner, a loser, no drafts, or neither


@dataclass(slots=True, frozen=True, kw_only=True)
class Line:
    """A row of a table; `link` is the run's folder, whose page one of its cells leads to."""

    cells: Sequence[str]
    link: Path | None = None
    kind: Kind = ""

    @property
    def is_best(self) -> bool:
        """Returns whether it stands out."""
        return self.kind == "good"


@dataclass(slots=True, frozen=True, kw_only=True)
class Table:
    """Cells under column names, as many in every line.

    Attributes:
        linked: the column of the links.
        num_left: columns of names, which a console aligns left.
    """

    header: Sequence[str]
    lines: Sequence[Line]
    linked: int = 0
    num_left: int = 1

    @property
    def cells(self) -> list[Sequence[str]]:
        """The header, then the cells of each line."""
        return [self.header, *(line.cells for line in self.lines)]


@dataclass(slots=True, frozen=True, kw_only=True)
class Panel:
    """A panel that W&B draws from its own runs in place of a chart.

    `metrics` are keys of the runs' summaries, or of their curves with kind "line"; "scatter" has
    two, x and y.
    """

    kind: Literal["scatter", "bar", "line"]
    title: str
    metrics: Sequence[str]


@dataclass(slots=True, frozen=True, kw_only=True)
class Block:
    """A titled part: sentences, chart and table, in this order, as far as it has them. W&B has
    `panels` in place of the chart; a page holds `all_sentences` folded, where there are more. A
    `narrow` one may stand beside another, with its table folded.
    """

    title: str
    note: str = ""
    sentences: Sequence[str] = ()
    all_sentences: Sequence[str] = ()
    chart: Chart | None = None
    table: Table | None = None
    panels: Sequence[Panel] = ()
    narrow: bool = False


@dataclass(slots=True, frozen=True, kw_only=True)
class Section:
    """Blocks of runs with the same target and load; no title where there is one section. `folders`
    holds the folders of its runs, none where it is about all."""

    title: str
    blocks: Sequence[Block]
    folders: Sequence[Path] = ()


@dataclass(slots=True, frozen=True, kw_only=True)
class Verdict:
    """The answer for a group of runs, its reasons, and what to do: sentences or commands."""

    kind: Kind
    about: str
    sentence: str
    reasons: Sequence[str] = ()
    to_do: Sequence[str] = ()

    @property
    def text(self) -> str:
        """All of it in a line."""
        about = [f"{self.about}:"] if self.about else []
        following = [f"Next: {each}" for each in self.to_do]
        return " ".join([*about, self.sentence, *self.reasons, *following])


@dataclass(slots=True, frozen=True, kw_only=True)
class Study:
    """A report: the question, its answers and what they rest on."""

    question: str
    sections: Sequence[Section]
    facts: str = ""
    verdicts: Sequence[Verdict] = ()
    notes: Sequence[str] = ()
