"""Accepted drafts by context, token class, target entropy and place in the output, as
tables on the console and as blocks of a group of jobs.

All blocks but `by_output_place` need runs with metrics.trace=true or metrics.all_positions=true. A
job of pooled runs shows the figures of its first run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from hydraspec.metrics.summary import StartFigures, TeacherForced
from hydraspec.study.blocks import Block, Line, Table
from hydraspec.study.charts import counted_bars
from hydraspec.study.console import print_table
from hydraspec.study.jobs import Job
from hydraspec.study.ranking import Group
from hydraspec.study.texts import ci_words, number, percent

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
    """A way to divide the places: a line per bucket or class."""

    key: str
    lines: Sequence[tuple[str, StartFigures]]

    @property
    def title(self) -> str:
        """The title of the part's table."""
        return TITLES[self.key]

    @property
    def cells(self) -> list[tuple[str, ...]]:
        """The rows of the part's table, with the columns of HEADER."""
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
    """Yields the ways to divide the places that `figures` has: the contents of doctor.json or
    replay.json, or a summary's `teacher_forced`."""
    for key in TITLES:
        found = figures.get(key)
        if isinstance(found, Mapping):
            yield Part(key=key, lines=list(found.items()))
        elif found:
            lines = [(bucket_words(row, is_whole=key in WHOLE), row) for row in found]
            yield Part(key=key, lines=lines)


def part_blocks(figures: Mapping[str, Any]) -> list[Block]:
    """Blocks with a chart for each way to divide the places that `figures` has."""
    made = []
    for part in parts(figures):
        found = [
            (name, of["accepted_per_start"], of["ci95"], of["num_starts"])
            for name, of in part.lines
        ]
        if chart := counted_bars(found, "var(--second)", description=part.title):
            made.append(Block(title=part.title, note=NOTE, chart=chart, narrow=True))
    return made


def bucket_words(row: Mapping[str, Any], *, is_whole: bool) -> str:
    """Name of a bucket, such as "below 16", "16 to 31", "0.1 to 0.5" or "from 512"."""
    low, below = row["from"], row["below"]
    if low is None:
        return f"below {below:g}"
    if below is None:
        return f"from {low:g}"
    return f"{low:g} to {below - is_whole:g}"


def print_parts(console: Console, figures: Mapping[str, Any]) -> None:
    """Print a short table for each way to divide the places."""
    for part in parts(figures):
        print_table(console, part.title, HEADER, part.cells, num_left=1)


# ---------------------------------------------------------------- blocks of a group of jobs

FORCED = ("job", "places", "the draft, by position", "among the five likeliest")
CEILINGS = ("acceptance length", "oracle features", "any of five", "draft vocabulary")


def by_output_place(group: Group) -> Block | None:
    """Table of acceptance length by place in the output, in bins that double; None without it."""
    found = [
        (
            job.title,
            {
                f"{of['first']} to {of['last']}": number(of["acceptance_length"]["mean"])
                + ci_words(of["acceptance_length"]["ci95"])
                for of in job.summary.get("acceptance_by_output_place") or []
            },
        )
        for job in _jobs(group)
    ]
    note = "Place of a verification's first output token, from 0, with 95 % intervals."
    return _columns("Acceptance length by place in the output", note, found)


def over_targets_tokens(group: Group) -> Block | None:
    """Table of how often drafts are the target's token, and of the acceptance lengths that could be
    reached; None where no job has these figures."""
    lines = [
        Line(
            cells=[
                job.title,
                number(forced["num_places"], 0),
                *(_by_step(forced, key) for key in ("top_1", "top_5")),
                *(number(length) for length in _ceilings(forced)),
            ]
        )
        for job, forced in _forced(group)
    ]
    if not lines:
        return None
    return Block(
        title="Drafts over the target's own tokens",
        note="From every place of the outputs: how often the target's token is the draft, or among "
        "the drafter's five likeliest. Then acceptance lengths: as it is; if every draft read the "
        "target's states of its place; if any of five drafts counted; if every token that the "
        "drafter can name were right.",
        table=Table(header=[*FORCED, *CEILINGS], lines=lines),
    )


def accepted(key: str) -> Callable[[Group], Block | None]:
    """Maker of the block for one way to divide the places; `key` is one of TITLES."""

    def make(group: Group) -> Block | None:
        found = [
            (job.title, _cells(part))
            for job, forced in _forced(group)
            for part in parts(forced)
            if part.key == key
        ]
        return _columns(f"Drafts accepted {_small(TITLES[key])}", f"{NOTE}.", found)

    return make


def _columns(title: str, note: str, found: Sequence[tuple[str, dict[str, str]]]) -> Block | None:
    """Table with a line per job and a column per bucket; None without buckets."""
    widest_first = sorted((cells for _, cells in found), key=len, reverse=True)
    columns = list(dict.fromkeys(name for cells in widest_first for name in cells))
    if not columns:
        return None
    lines = [
        Line(cells=[job, *(cells.get(name, "-") for name in columns)])
        for job, cells in found
        if cells
    ]
    return Block(title=title, note=note, table=Table(header=["job", *columns], lines=lines))


def _cells(part: Part) -> dict[str, str]:
    return {
        name: number(of["accepted_per_start"]) + ci_words(of["ci95"]) for name, of in part.lines
    }


def _by_step(forced: TeacherForced, key: str) -> str:
    rates = [step["top_1"] if key == "top_1" else step["top_5"] for step in forced["by_step"]]
    return " / ".join(percent(rate) for rate in rates)


def _ceilings(forced: TeacherForced) -> list[float]:
    of = forced["ceilings"]
    return [of["acceptance"], of["oracle_features"], of["top_5"], of["draft_vocabulary"]]


def _jobs(group: Group) -> list[Job]:
    return [one.job for one in group.jobs if not one.job.is_plain]


def _forced(group: Group) -> list[tuple[Job, TeacherForced]]:
    # Runs of earlier versions have no such key.
    found = [(job, job.summary.get("teacher_forced")) for job in _jobs(group)]
    return [(job, forced) for job, forced in found if forced]


def _small(title: str) -> str:
    return title[:1].lower() + title[1:]
