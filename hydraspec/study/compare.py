"""A comparison of any runs: on the console, and as compare.json, .csv, .md and .html."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
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
from hydraspec.study import html, words
from hydraspec.study.console import print_block, table_console
from hydraspec.study.ranked_blocks import by_category, notes, ranked_jobs, ranking_blocks, told
from hydraspec.study.ranking import Ranking, fitting_measure, rank
from hydraspec.study.runs import check_alike, pool, read_runs

WIDE = 400  # columns where no terminal sets a limit: figures are never cut
NUM_LEFT = 3  # columns of names


def compared(folders: Sequence[Path]) -> Ranking:
    """The ranking of the runs in these folders.

    Raises:
        ConfigurationError: they cannot be compared; the message names the difference.
    """
    jobs = pool(read_runs(folders))
    check_alike(jobs)
    reference = jobs[0] if len(jobs) == 2 else None
    return rank(jobs, reference=reference, by=fitting_measure(jobs))


def show(ranking: Ranking, console: Console | None = None) -> None:
    """Print the table, the category x job matrix and the sentences."""
    console = console or table_console(WIDE)
    show_ranking(console, ranking, "Comparison")


def show_ranking(console: Console, ranking: Ranking, title: str) -> None:
    """Print the table of jobs, that of categories, and what is told."""
    print_block(console, ranked_jobs(ranking, title), num_left=NUM_LEFT)
    if categories := by_category(ranking):
        named = replace(categories, title="Speedup / acceptance length by category")
        print_block(console, named, num_left=1)
    for line in (*told(ranking).sentences, *notes(ranking)):
        console.print(escape(printable(line)), soft_wrap=True)


def write(ranking: Ranking, folder: Path, *, say: bool = False) -> None:
    """Write the four files into `folder`, which is made; `say` prints where.

    Raises:
        OSError: with the path, if it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / COMPARISON, pretty_json(words.as_json(ranking)))
    write_tables(folder, [ranking])
    page = html.render(
        "runs.html",
        title="Comparison",
        rankings=[ranking_blocks(ranking, "Jobs")],
        href=partial(html.link_to_page, folder=folder),
    )
    write_whole(folder / COMPARISON_REPORT, page)
    if say:
        where = folder / COMPARISON_REPORT
        table_console(WIDE).print(f"Comparison: {where}", soft_wrap=True, markup=False)


def write_tables(folder: Path, rankings: Sequence[Ranking]) -> None:
    """compare.csv and compare.md of one or several rankings, where there is one.

    Raises:
        OSError: with the path, if they cannot be written.
    """
    tables = [words.table(ranking) for ranking in rankings]
    if not tables:
        return
    header, rows = tables[0][0], [row for _, rows in tables for row in rows]
    said = dict.fromkeys(
        sentence for one in rankings for sentence in (*words.verdicts(one), *notes(one))
    )
    write_whole(folder / COMPARISON_CSV, words.as_csv(header, rows))
    write_whole(folder / COMPARISON_MARKDOWN, words.as_markdown(header, rows, list(said)))
