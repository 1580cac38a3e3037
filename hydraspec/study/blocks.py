"""Blocks: the parts of a report over runs, the same on the page and in W&B."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hydraspec.study.charts import Chart

Kind = Literal["good", "bad", "plain", ""]  # best, worse than none, no drafts, none of these


@dataclass(slots=True, frozen=True, kw_only=True)
class Line:
    """A row of a table; `link` is the folder of the run to whose page one cell leads, `tones` are
    colours of the cells, see maps.tone."""

    cells: Sequence[str]
    tones: Sequence[str] = ()
    link: Path | None = None
    kind: Kind = ""

    @property
    def is_best(self) -> bool:
        """Returns whether the line is highlighted as the best one."""
        return self.kind == "good"


@dataclass(slots=True, frozen=True, kw_only=True)
class Table:
    """A table: cells under column names, as many in every line.

    Attributes:
        linked: index of the column whose cells are links.
        num_left: number of leading columns of names, which a console aligns left.
    """

    header: Sequence[str]
    lines: Sequence[Line]
    linked: int = 0
    num_left: int = 1

    @property
    def cells(self) -> list[Sequence[str]]:
        """The header, then the cells of each line, as rows of text."""
        return [self.header, *(line.cells for line in self.lines)]


@dataclass(slots=True, frozen=True, kw_only=True)
class Panel:
    """A panel that W&B draws from its own runs in place of a chart.

    `metrics` are keys of the runs' summaries, or with kind "line" keys of their curves. A "scatter"
    has two metrics, x and y.
    """

    kind: Literal["scatter", "bar", "line"]
    title: str
    metrics: Sequence[str]


@dataclass(slots=True, frozen=True, kw_only=True)
class Block:
    """A titled part of a report: any of sentences, chart and table, in this order. W&B shows
    `panels` in place of the chart. A page shows `all_sentences` folded, if these are more than
    `sentences`. A `narrow` block may stand beside another block, with its table folded.
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
    """Blocks about some of the runs, such as those of one target and load; the title is empty where
    there is one section. `folders` are those of these runs, empty for a section about all runs."""

    title: str
    blocks: Sequence[Block]
    folders: Sequence[Path] = ()


@dataclass(slots=True, frozen=True, kw_only=True)
class Verdict:
    """The answer for a group of runs, the reasons, and what to do: sentences or commands."""

    kind: Kind
    about: str
    sentence: str
    reasons: Sequence[str] = ()
    to_do: Sequence[str] = ()

    @property
    def text(self) -> str:
        """The verdict with reasons and next steps as one line."""
        about = [f"{self.about}:"] if self.about else []
        following = [f"Next: {each}" for each in self.to_do]
        return " ".join([*about, self.sentence, *self.reasons, *following])


@dataclass(slots=True, frozen=True, kw_only=True)
class Study:
    """A report: the question, the answers, and the sections with the figures."""

    question: str
    sections: Sequence[Section]
    facts: str = ""
    verdicts: Sequence[Verdict] = ()
    notes: Sequence[str] = ()
