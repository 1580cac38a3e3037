"""study.html: a report over runs as one self-contained page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hydraspec.errors import printable
from hydraspec.metrics.files import write_whole
from hydraspec.metrics.run_files import STUDY
from hydraspec.study import html, wandb_report
from hydraspec.study.blocks import Study
from hydraspec.study.console import WIDE, table_console
from hydraspec.study.groups import Runs


def write(made: Study, runs: Runs | None, folder: Path) -> list[Path]:
    """Write the page into `folder`, which is made, and the W&B Report where its package is
    installed; returns where they are.

    Raises:
        OSError: with the path, if one cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / STUDY
    write_whole(path, html.study_page(made, folder))
    if not wandb_report.is_installed():
        return [path]
    return [path, wandb_report.write(made, runs, folder)]


def tell(made: Study, paths: Sequence[Path]) -> None:
    """Print the question, its answers, and where the report is."""
    console = table_console(WIDE)
    lines = [made.question]
    for verdict in made.verdicts:
        lines.append(f"{verdict.about}: {verdict.sentence}" if verdict.about else verdict.sentence)
    for line in (*lines, *made.notes, *(f"Report: {path}" for path in paths)):
        console.print(printable(line), soft_wrap=True, markup=False, highlight=False)
