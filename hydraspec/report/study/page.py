"""study.html: a report over runs as one self-contained page."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from rich.console import Console

from hydraspec.errors import printable
from hydraspec.metrics.files import write_whole
from hydraspec.metrics.run_files import REPORT, STUDY
from hydraspec.report import html
from hydraspec.report.console import table_console
from hydraspec.report.study import groups
from hydraspec.report.study.blocks import Study
from hydraspec.report.study.contents import study

WIDE = 400  # columns where no terminal sets a limit


def read(folders: Sequence[Path], *, asked: str | None = None) -> Study:
    """The report of the runs in these folders; `asked` is its question, if given.

    Raises:
        ConfigurationError: one message that names the folder: it is none, holds no run with
            figures, or runs have nothing in common.
    """
    return study(groups.read(folders), asked=asked)


def write(made: Study, folder: Path) -> Path:
    """Write the page into `folder`, which is made; returns where it is.

    Raises:
        OSError: with the path, if it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / STUDY
    write_whole(path, render(made, folder))
    return path


def tell(made: Study, path: Path, console: Console | None = None) -> None:
    """Print the question, its answers, and where the page is."""
    console = console or table_console(WIDE)
    lines = [made.question]
    for verdict in made.verdicts:
        lines.append(f"{verdict.about}: {verdict.sentence}" if verdict.about else verdict.sentence)
    for line in (*lines, *made.notes, f"Report: {path}"):
        console.print(printable(line), soft_wrap=True, markup=False, highlight=False)


def render(made: Study, folder: Path) -> str:
    """The page, with links that are right in `folder`."""

    def href(run: Path) -> str:
        return quote(os.path.relpath(run / REPORT, folder).replace(os.sep, "/"))

    when = f"made {time.strftime('%Y-%m-%d %H:%M')}"
    return html.render("study.html", study=made, href=href, made=when)
