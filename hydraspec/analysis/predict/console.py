"""A prediction on the console: progress, the table, and what wins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from hydraspec.analysis.predict.words import best_of_all, best_rows, cells, header, sentences, title
from hydraspec.errors import printable
from hydraspec.metrics.files import Json
from hydraspec.metrics.run_files import PREDICTION, PREDICTION_REPORT
from hydraspec.study.console import print_table, run_console, table_console

WIDTH = 130


def progress(*, quiet: bool) -> Callable[[str], None]:
    """Prints a line of progress."""
    console = run_console(quiet=quiet)
    return lambda text: console.print(printable(text), markup=False, highlight=False)


def show(result: Json, folder: Path, *, quiet: bool) -> None:
    """Print the content of predict.json."""
    console = table_console(WIDTH, quiet=quiet)
    lines = [*map(cells(result), result["predictions"])]
    print_table(console, title(result), header(result), lines, best=best_rows(result))
    for text in sentences(result):
        console.print(printable(text), markup=False, highlight=False, soft_wrap=True)
    files = f"{folder / PREDICTION}, {PREDICTION_REPORT}"
    console.print(f"Details: {files}", markup=False, highlight=False, soft_wrap=True)


def show_best(results: Sequence[Json], *, quiet: bool) -> None:
    """Print which method and K wins at each concurrency, of several predictions."""
    console = run_console(quiet=quiet)
    for text in best_of_all(results) if len(results) > 1 else ():
        console.print(printable(text), style="bold", markup=False, highlight=False, soft_wrap=True)
