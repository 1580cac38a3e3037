"""A comparison of any runs: on the console, and as compare.json, .csv, .md and .html."""

from __future__ import annotations

from collections.abc import Sequence
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
from hydraspec.study.blocks import Section, Study, Table
from hydraspec.study.console import WIDE, print_block, table_console
from hydraspec.study.groups import check_summary
from hydraspec.study.jobs import check_alike, pool
from hydraspec.study.ranking import Group, fitting_measure, rank
from hydraspec.study.runs import read_runs


def compared(folders: Sequence[Path]) -> Group:
    """The ranking of the runs in these folders.

    Raises:
        ConfigurationError: they cannot be compared; the message names the difference.
    """
    found = read_runs(folders)
    for run in found:
        check_summary(run)
    jobs = pool(found, apart=True)
    check_alike(jobs)
    reference = jobs[0] if len(jobs) == 2 else None
    return rank(jobs, reference=reference, by=fitting_measure(jobs))


def show(group: Group, *, title: str = "Comparison", console: Console | None = None) -> None:
    """Print the table of jobs, that of categories, and the sentences."""
    console = console or table_console(WIDE)
    blocks = (
        group_blocks.jobs(group, title=title, with_speeds=False),
        group_blocks.by_category(group, brief=True),
    )
    for block in blocks:
        if block:
            print_block(console, block)
    sentences = words.verdicts(group, brief=len(group.jobs) > 2)
    for line in (*sentences, *group_blocks.notes(group)):
        console.print(escape(printable(line)), soft_wrap=True)


def section(group: Group, title: str) -> Section:
    """The parts of one ranking on a page; its table is titled by what its jobs share."""
    made = [
        group_blocks.jobs(group, title=title, with_speeds=False),
        group_blocks.told(group),
        group_blocks.by_category(group),
        group_blocks.slowest(group),
        group_blocks.speedups(group),
        group_blocks.lengths(group),
        group_blocks.acceptance_by_position(group),
    ]
    return Section(title="", blocks=[block for block in made if block])


def write(group: Group, folder: Path, *, say: bool = False) -> None:
    """Write the four files into `folder`, which is made; `say` prints where.

    Raises:
        OSError: with the path, if it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / COMPARISON, pretty_json(words.as_json(group)))
    write_tables(folder, [group])
    made = Study(question="Comparison", sections=[section(group, "Jobs")])
    where = folder / COMPARISON_REPORT
    write_whole(where, html.study_page(made, folder))
    if say:
        table_console(WIDE).print(f"Comparison: {where}", soft_wrap=True, markup=False)


def write_tables(folder: Path, groups: Sequence[Group]) -> None:
    """Write compare.csv and compare.md of one or several rankings, where there is one.

    Raises:
        OSError: with the path, if they cannot be written.
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
