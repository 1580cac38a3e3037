"""Comparison of any runs: on the console, and as compare.json, .csv, .md and .html."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from hydraspec.errors import printable
from hydraspec.metrics.files import pretty_json, write_whole
from hydraspec.metrics.run_files import (
    COMPARISON,
    COMPARISON_CSV,
    COMPARISON_MARKDOWN,
    COMPARISON_REPORT,
)
from hydraspec.study import group_blocks, html, words
from hydraspec.study.answers import verdict
from hydraspec.study.blocks import Kind, Section, Study, Table, Verdict
from hydraspec.study.console import WIDE, print_block, table_console
from hydraspec.study.decision import decide
from hydraspec.study.groups import check_summary
from hydraspec.study.jobs import check_alike, pool
from hydraspec.study.ranking import Group, fitting_measure, rank
from hydraspec.study.runs import read_runs
from hydraspec.study.speedups import speedups

# What the figure says of the job → kind, relation to the reference, and what to do.
HEADLINES: dict[str, tuple[Kind, str, str]] = {
    "better": ("good", "is faster", "Use {other}."),
    "worse": ("bad", "is slower", "Use {reference}."),
    "cannot_tell": (
        "",
        "cannot be told from it",
        "Use either; more prompts tell smaller differences.",
    ),
}


def compared(folders: Sequence[Path], *, smallest_effect: float | None = None) -> Group:
    """The ranking of the runs in these folders; of two jobs the first one is the reference.
    `smallest_effect` is that of `Group`.

    Raises:
        ConfigurationError: the runs cannot be compared; the message names the difference.
    """
    found = read_runs(folders)
    for run in found:
        check_summary(run)
    jobs = pool(found, apart=True)
    check_alike(jobs)
    reference = jobs[0] if len(jobs) == 2 else None
    group = rank(jobs, reference=reference, by=fitting_measure(jobs))
    group.smallest_effect = smallest_effect
    return group


def tell(group: Group, console: Console | None = None) -> None:
    """Print the group's title and the answer; nothing where there is no answer."""
    console = console or table_console(WIDE)
    made = decide(group)
    lines = [group.title, *made.sentences()] if made else []
    for line in filter(None, lines):
        console.print(printable(line), markup=False, soft_wrap=True, highlight=False)


def show(group: Group, *, title: str = "Comparison", console: Console | None = None) -> None:
    """Print the table of jobs, the table of categories, the comparison of two jobs in sentences,
    and the notes."""
    console = console or table_console(WIDE)
    blocks = (
        group_blocks.jobs(group, title=title, with_speeds=False),
        group_blocks.by_category(group, brief=True),
    )
    for block in blocks:
        if block:
            print_block(console, block)
    sentences = words.verdicts(group) if len(group.jobs) == 2 else ()  # else in the answer
    for line in (*sentences, *group_blocks.notes(group)):
        console.print(escape(printable(line)), soft_wrap=True)


def section(group: Group, title: str, *, with_speeds: bool = False) -> Section:
    """Section of a page for one ranking; `title` is that of the table of jobs, `with_speeds` as for
    `group_blocks.jobs`."""
    made = [
        speedups(group),
        group_blocks.jobs(group, title=title, with_speeds=with_speeds),
        group_blocks.by_category(group),
        group_blocks.slowest(group),
        group_blocks.acceptance_by_position(group),
    ]
    blocks = [block for block in made if block]
    if group.title:  # one of several: each chart and table says which
        named = (replace(block, title=f"{block.title}, {group.title}") for block in blocks)
        blocks = [b if b.title == title else n for b, n in zip(blocks, named, strict=True)]
    return Section(title="", blocks=blocks)


def write(group: Group, folder: Path, *, say: bool = False) -> None:
    """Create `folder` and write compare.json, .csv, .md and .html into it; `say` prints the path.

    Raises:
        OSError: a file cannot be written; the error has its path.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / COMPARISON, pretty_json(words.as_json(group)))
    write_tables(folder, [group])
    made = Study(
        question=_question(group),
        facts=_reference_words(group),
        verdicts=[headline(group)],
        sections=[section(group, "Jobs")],
    )
    where = folder / COMPARISON_REPORT
    write_whole(where, html.study_page(made, folder))
    if say:
        table_console(WIDE).print(f"Comparison: {where}", soft_wrap=True, markup=False)


def headline(group: Group) -> Verdict:
    """Verdict on a ranking: of two jobs, whether the other one beats the reference and by how much,
    then the answer, if there is one; of several, the answer."""
    if len(group.jobs) != 2 or group.reference is None:
        return verdict(group)
    against = _against_reference(group)
    if decide(group) is None:
        return against
    found = verdict(group)
    return replace(against, reasons=[found.sentence, *found.reasons], to_do=found.to_do)


def _against_reference(group: Group) -> Verdict:
    """Verdict on the second of two jobs against the first."""
    assert group.reference is not None
    (other,), reference = group.others, group.reference.job.title
    figure, title = other.against(group.by), other.job.title
    if figure is None:
        return Verdict(kind="", about="", sentence=f"{title} cannot be compared with {reference}.")
    kind, relation, use = HEADLINES[group.says(other)]
    return Verdict(
        kind=kind,
        about=f"Against the reference, {reference}",
        sentence=f"{title} {relation}{words.in_words(figure.ratio)}.",
        to_do=[use.format(other=title, reference=reference)],
    )


def _question(group: Group) -> str:
    if len(group.jobs) != 2 or group.reference is None:
        return f"Which of {len(group.jobs)} jobs is the best?"
    return f"Is {group.others[0].job.title} faster than {group.reference.job.title}?"


def _reference_words(group: Group) -> str:
    if group.reference is None:
        return ""
    chosen = "the first one given" if len(group.jobs) == 2 else "the best one"
    return f"Reference: {group.reference.job.title}, {chosen}"


def write_tables(folder: Path, groups: Sequence[Group]) -> None:
    """Write compare.csv and compare.md of the rankings; nothing without rankings.

    Raises:
        OSError: a file cannot be written; the error has its path.
    """
    tables = [words.table(group) for group in groups]
    if not tables:
        return
    table = Table(header=tables[0].header, lines=[line for each in tables for line in each.lines])
    said = dict.fromkeys(
        sentence
        for group in groups
        for sentence in (*words.verdicts(group), *group_blocks.notes(group))
    )
    write_whole(folder / COMPARISON_CSV, words.as_csv(table))
    write_whole(folder / COMPARISON_MARKDOWN, words.as_markdown(table, list(said)))
