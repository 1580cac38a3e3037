"""`python -m hydraspec.report`: arguments, files and exit status."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hydraspec.cli.complain import status_over_folders, tell
from hydraspec.config.benches import is_bench
from hydraspec.config.schema import RunConfig
from hydraspec.errors import UserError
from hydraspec.metrics.run_files import STUDY_SPEC

COMMAND = "hydraspec.report"
DESCRIPTION = """\
Make a report over runs: the question and its answer in a sentence, throughput of one user against
that of all, speedup with intervals, acceptance by position and category, lossless verdicts, where
time goes, and the settings that differ; of benchmarks (bench=…) their figures by rate, turn, pass
or batch. Runs of several targets, workloads or loads are told apart;
those of the same are ranked."""
STATUSES = (
    "Exit status: 0; 2 if the folders make no report; 1 if a file cannot be written, or W&B does "
    "not take the report."
)

log = logging.getLogger(__name__)


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m hydraspec.report", description=DESCRIPTION, epilog=STATUSES
    )
    parser.add_argument(
        "folders", nargs="+", metavar="FOLDER", help="of a run, a sweep or a benchmark"
    )
    parser.add_argument(
        "--write",
        metavar="FOLDER",
        help="where study.html goes: by default into the one folder that is given, else into a "
        "new one in outputs/reports",
    )
    parser.add_argument("--question", metavar="TEXT", help="the title, else made of the settings")
    parser.add_argument(
        "--publish",
        action="store_true",
        help="save the report to W&B too, where the runs were synced to; again: update it there",
    )
    parser.add_argument("--entity", help="W&B entity for --publish, else that of the runs")
    parser.add_argument("--project", help="W&B project for --publish, else that of the runs")
    given = parser.parse_args(arguments)
    folders = [Path(folder) for folder in given.folders]
    target = _target(given.write, folders)
    return status_over_folders(
        lambda: _make(given, folders, target), command=COMMAND, writes=target
    )


def _make(given: argparse.Namespace, folders: Sequence[Path], target: Path) -> None:
    from hydraspec.report.study import wandb_report

    if given.publish:
        wandb_report.check_installed()
    write_report(folders, target, asked=given.question)
    if given.publish:
        address = wandb_report.publish(target / STUDY_SPEC, given.entity, given.project)
        sys.stdout.write(f"Published: {address}\n")
    elif not wandb_report.is_installed():
        tell(f"{STUDY_SPEC} is not written: {wandb_report.INSTALL}", command=COMMAND)


def write_report(
    folders: Sequence[Path], target: Path, *, asked: str | None = None, quiet: bool = False
) -> None:
    """Write the report over runs, sweeps and benchmarks into `target`, and print its answer.

    Raises:
        ConfigurationError: the folders make no report.
        OSError: with the path, if it cannot be written.
    """
    from hydraspec.bench import study as bench_study
    from hydraspec.report.study import groups, page
    from hydraspec.report.study.contents import study

    benchmarks = {folder: bench_study.read(folder) for folder in folders}
    of_runs = [folder for folder in folders if not benchmarks[folder]]
    runs = groups.read(of_runs) if of_runs else None
    made = study(runs, asked=asked) if runs else None
    if results := [result for found in benchmarks.values() for result in found]:
        made = bench_study.extended(made, results, asked=asked)
    assert made is not None, "there is a folder"
    paths = page.write(made, runs, target)
    if not quiet:
        page.tell(made, paths)


def close_run(config: RunConfig, folder: Path, *, quiet: bool = False) -> None:
    """Make the report of a single run or benchmark, if tracker.report asks for one. What fails is a
    warning."""
    if not config.tracker.report:
        return
    from hydraspec.lab import tracking

    if not is_bench(config):
        tracking.close_run(config, folder, quiet=quiet)
        return
    try:
        write_report([folder], folder, quiet=quiet)
    except (OSError, UserError) as error:
        log.warning("the report: %s", str(error).splitlines()[0])


def _target(given: str | None, folders: Sequence[Path]) -> Path:
    """Where the report goes."""
    if given is not None:
        return Path(given)
    if len(folders) == 1:
        return folders[0]
    return Path("outputs", "reports", time.strftime("%Y-%m-%d"), time.strftime("%H-%M-%S"))
