"""The contents of a report over runs, in order: blocks by family, by group and over all runs.

Each block is made by a function of a family, a group or all runs, which returns None where there
is nothing to show.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from hydraspec.errors import printable
from hydraspec.metrics.files import write_whole
from hydraspec.metrics.run_files import STUDY
from hydraspec.study import formats, html, wandb_report
from hydraspec.study.accepted import accepted, by_output_place, over_targets_tokens
from hydraspec.study.answers import facts, question, verdict
from hydraspec.study.blocks import Block, Section, Study, Verdict
from hydraspec.study.console import WIDE, table_console
from hydraspec.study.families import pareto, setup_verdicts, setups
from hydraspec.study.group_blocks import (
    acceptance_by_position,
    by_category,
    jobs,
    lossless,
    predictions,
    time_breakdown,
)
from hydraspec.study.groups import Family, Runs
from hydraspec.study.ranking import Group, JobFigures
from hydraspec.study.settings import environments, settings, warned
from hydraspec.study.speedups import speedups

BY_FAMILY: Sequence[Callable[[Family], Block | None]] = (setups, pareto)
BY_GROUP: Sequence[Callable[[Group], Block | None]] = (
    speedups,
    jobs,
    predictions,
    acceptance_by_position,
    by_category,
    by_output_place,
    over_targets_tokens,
    *(accepted(key) for key in ("by_context", "by_token_class", "by_target_entropy")),
    lossless,
    time_breakdown,
)
BY_ALL: Sequence[Callable[[Runs], Block | None]] = (warned, settings, environments)


def study(runs: Runs, *, asked: str | None = None) -> Study:
    """The report over runs; `asked` is its question, instead of one made from the settings."""
    compared = formats.found_in(runs.groups)
    sections = [formats.section(one) for one in compared]
    for family in runs.families:
        shared = [make(family) for make in BY_FAMILY]
        if len(family.groups) > 1:
            members = [one for group in family.groups for one in group.jobs]
            sections.append(_section(family.title, shared, members))
            shared = []
        for group in family.groups:
            first, *others = (make(group) for make in BY_GROUP)
            sections.append(_section(group.title, [first, *shared, *others], group.jobs))
    several = len(runs.jobs) > 1
    sections.append(_section("All runs" if several else "", [make(runs) for make in BY_ALL]))
    return Study(
        question=asked or question(runs),
        facts=facts(runs),
        verdicts=[formats.verdict(one) for one in compared]
        or [one for family in runs.families for one in _verdicts(family)],
        notes=_notes(runs),
        sections=[section for section in sections if section.blocks],
    )


def _verdicts(family: Family) -> list[Verdict]:
    return [*setup_verdicts(family), *(verdict(group) for group in family.groups)]


def _section(
    title: str, blocks: Sequence[Block | None], jobs: Sequence[JobFigures] = ()
) -> Section:
    folders = [run.folder for one in jobs for run in one.job.runs]
    return Section(title=title, blocks=[block for block in blocks if block], folders=folders)


def _notes(runs: Runs) -> list[str]:
    left_out = [f"Left out: {one}." for one in runs.left_out]
    unranked = [group.unranked for group in runs.groups if group.unranked]
    warned = []
    for run in runs.runs:
        if run.summary["status"] != "ok":
            warned.append(f"{run.name}: the run is {run.summary['status']}.")
        if num_errors := run.summary["num_errors"]:
            warned.append(f"{run.name}: {num_errors} requests ended with an error.")
    return [*left_out, *unranked, *warned]


# ---------------------------------------------------------------- the page and what is printed


def write(made: Study, runs: Runs | None, folder: Path) -> list[Path]:
    """Create `folder` and write the page into it, and the W&B Report where its package is
    installed. Returns the paths of the files.

    Raises:
        OSError: a file cannot be written; the error has its path.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / STUDY
    write_whole(path, html.study_page(made, folder))
    if not wandb_report.is_installed():
        return [path]
    return [path, wandb_report.write(made, runs, folder)]


def tell(made: Study, paths: Sequence[Path]) -> None:
    """Print the question, the answers, the notes and the paths of the report."""
    console = table_console(WIDE)
    lines = [made.question, *(one.text for one in made.verdicts)]
    for line in (*lines, *made.notes, *(f"Report: {path}" for path in paths)):
        console.print(printable(line), soft_wrap=True, markup=False, highlight=False)
