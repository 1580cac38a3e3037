"""Where a drafter is accepted, as tables: the figures of metrics.draft_figures by context, token
class, target entropy and place in the output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from hydraspec.metrics.summary import StartFigures
from hydraspec.study.console import print_table
from hydraspec.study.texts import ci_words, number

HEADER = ("", "drafts accepted a start", "95 % interval", "starts")
NOTE = "Drafts accepted from each place, teacher-forced, with 95 % intervals over texts"
TITLES = {
    "by_context": "By tokens before the draft",
    "by_token_class": "By what the target's next token is",
    "by_target_entropy": "By entropy of the target's distribution, nats",
    "by_output_place": "By place in the output",
}
WHOLE = ("by_context", "by_output_place")  # buckets of whole numbers


@dataclass(slots=True, frozen=True, kw_only=True)
class Part:
    """One way to divide the places: a line per bucket or class."""

    key: str
    lines: Sequence[tuple[str, StartFigures]]

    @property
    def title(self) -> str:
        """Of its table."""
        return TITLES[self.key]

    @property
    def cells(self) -> list[tuple[str, ...]]:
        """Rows under HEADER."""
        return [
            (
                name,
                number(of["accepted_per_start"]),
                ci_words(of["ci95"]).strip(" ()") or "-",
                number(of["num_starts"], 0),
            )
            for name, of in self.lines
        ]


def parts(figures: Mapping[str, Any]) -> Iterator[Part]:
    """Those that `figures` (of doctor.json, replay.json, or `teacher_forced` of a summary) has."""
    for key in TITLES:
        found = figures.get(key)
        if isinstance(found, Mapping):
            yield Part(key=key, lines=list(found.items()))
        elif found:
            lines = [(bucket_words(row, is_whole=key in WHOLE), row) for row in found]
            yield Part(key=key, lines=lines)


def bucket_words(row: Mapping[str, Any], *, is_whole: bool) -> str:
    """ "below 16", "16 to 31" or "0.1 to 0.5", "from 512"."""
    low, below = row["from"], row["below"]
    if low is None:
        return f"below {below:g}"
    if below is None:
        return f"from {low:g}"
    return f"{low:g} to {below - is_whole:g}"


def print_parts(console: Console, figures: Mapping[str, Any]) -> None:
    """A short table for each."""
    for part in parts(figures):
        print_table(console, part.title, HEADER, part.cells, num_left=1)
