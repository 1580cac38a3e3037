"""`hydraspec report`, and the comparison and report that end runs and sweeps."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hydraspec.cli.arguments import Parser
from hydraspec.cli.complain import tell
from hydraspec.cli.folders import writing
from hydraspec.config.benches import is_bench
from hydraspec.config.schema import RunConfig, TrackerMode
from hydraspec.errors import ConfigurationError, UserError
from hydraspec.metrics.run_files import BENCH, STUDY_SPEC, SUMMARY

if TYPE_CHECKING:
    from hydraspec.study.blocks import Study
    from hydraspec.study.groups import Runs

DESCRIPTION = """\
Make a report over runs: the question and its answer in a sentence, throughput of one user against
that of all, speedup with intervals, acceptance by position and category, lossless verdicts, where
time goes, and the settings that differ; of benchmarks (bench=…) their figures by rate, turn, pass
or batch. Runs of several targets, workloads or loads are told apart;
those of the same are ranked."""
STATUSES = (
    "Exit status: 0; 2 if arguments are wrong, the folders make no report, or --publish is "
    "refused: wandb-workspaces is not installed, or, once the report is written, no API key is "
    "configured or no project known; 1 if a file cannot be written, or W&B does not take the "
    "report."
)

log = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> None:
    """Make the report that a command line asks for."""
    parser = Parser("report", description=DESCRIPTION, epilog=STATUSES)
    parser.add_argument(
        "folders", nargs="+", type=Path, metavar="FOLDER", help="of a run, a sweep or a benchmark"
    )
    parser.add_argument(
        "--write",
        type=Path,
        metavar="FOLDER",
        help="where study.html goes: by default into the one folder that is given, else into a "
        "new one in outputs/reports",
    )
    parser.add_argument(
        "--costs",
        type=Path,
        metavar="FOLDER",
        help="of runs of another target with method.num_speculative_tokens=auto: also predict the "
        "speedups at its step costs",
    )
    parser.add_argument("--question", metavar="TEXT", help="the title, else made of the settings")
    parser.add_argument(
        "--publish",
        action="store_true",
        help="save the report to W&B too, where the runs were synced to; again: update it there",
    )
    parser.add_argument("--entity", help="W&B entity for --publish, else that of the runs")
    parser.add_argument("--project", help="W&B project for --publish, else that of the runs")
    given = parser.parse_args(argv)
    from hydraspec.study import contents, wandb_report

    if given.publish:
        wandb_report.check_installed()
    default = given.folders[0]
    if len(given.folders) > 1:
        default = Path("outputs", "reports", time.strftime("%Y-%m-%d"), time.strftime("%H-%M-%S"))
    target = given.write or default
    made, runs = _read(given.folders, asked=given.question)
    if given.costs is not None:
        made = _at_costs(made, runs, given.costs)
    with writing(target):
        paths = contents.write(made, runs, target)
    contents.tell(made, paths)
    if given.publish:
        address = wandb_report.publish(target / STUDY_SPEC, given.entity, given.project)
        sys.stdout.write(f"Published: {address}\n")
    elif not wandb_report.is_installed():
        tell(f"{STUDY_SPEC} is not written: {wandb_report.INSTALL}", command="hydraspec.report")


def _read(folders: Sequence[Path], *, asked: str | None = None) -> tuple[Study, Runs | None]:
    """The report over folders, and the runs in it, None if it is over benchmarks alone.

    Raises:
        ConfigurationError: the folders make no report.
    """
    from hydraspec.bench import study as bench_study
    from hydraspec.study import groups
    from hydraspec.study.contents import study

    benchmarks = {folder: bench_study.read(folder) for folder in folders}
    of_runs = [folder for folder in folders if not benchmarks[folder] or _holds_runs(folder)]
    runs = groups.read(of_runs) if of_runs else None
    made = study(runs, asked=asked) if runs else None
    # A folder that was given twice, or beside its sweep, counts once.
    results = {result[0].resolve(): result for found in benchmarks.values() for result in found}
    if results:
        notes = () if runs else [f"Left out: {one}." for one in groups.without_result(folders)]
        made = bench_study.extended(made, list(results.values()), asked=asked, notes=notes)
    assert made is not None, "there is a folder"
    return made, runs


def _at_costs(made: Study, runs: Runs | None, folder: Path) -> Study:
    """The report with predictions at the step costs in a folder."""
    from hydraspec.analysis.predict import other_target

    costs = other_target.read(folder)
    if runs is None:
        raise ConfigurationError(
            f"--costs {folder}: benchmarks have no accepted drafts\n  allowed: a report over runs"
            "\n  to do: leave it out"
        )
    return other_target.extended(made, runs, costs)


def _holds_runs(folder: Path) -> bool:
    return any(folder.glob(f"*/{SUMMARY}"))


# ---------------------------------------------------------------- at the end of runs and sweeps


def close_run(config: RunConfig, folder: Path, *, quiet: bool = False) -> None:
    """Make the report of a single run or benchmark, if tracker.report asks for one. A failure is
    logged as a warning."""
    if config.tracker.report:
        with _warned("no report"):
            _write(config, *_read([folder]), folder, quiet=quiet)


def compare(folder: Path) -> None:
    """Print a sweep's jobs side by side, and write the comparison of its runs. For benchmarks that
    cannot be read a warning is logged.

    Raises:
        OSError: with the path, if the folder cannot be written.
    """
    if _holds_runs(folder):
        from hydraspec.study.sweep import compare as compare_runs

        compare_runs(folder)
    if any(folder.glob(f"*/{BENCH}")):
        from hydraspec.bench import study as bench_study

        with _warned("not side by side"):
            bench_study.show(bench_study.read(folder))


def close_sweep(configs: Sequence[RunConfig], folder: Path, *, group: str) -> None:
    """Record a sweep's summary run in W&B, and make its report, if the configurations ask for them.
    A failure is logged as a warning. Benchmarks are in the report only, not in W&B.

    Args:
        group: the W&B group of the sweep's runs, if tracker.group is null.
    """
    of_runs = (config for config in configs if not is_bench(config))
    tracked = next((config for config in of_runs if config.tracker.records), None)
    reports = any(config.tracker.report for config in configs)
    if not (tracked or reports):
        return
    with _warned("no report"):
        made, runs = _read([folder])
        if tracked and runs:
            from hydraspec.lab import tracking

            tracking.record_sweep(tracked, made, runs, folder, group=group)
        if reports:
            _write(tracked or configs[0], made, runs, folder)


def _write(
    config: RunConfig, made: Study, runs: Runs | None, folder: Path, *, quiet: bool = False
) -> None:
    """Write the report, and publish it to W&B if the runs are recorded with tracker.mode=online."""
    from hydraspec.study import contents, wandb_report

    paths = contents.write(made, runs, folder)
    if not quiet:
        contents.tell(made, paths)
    if runs and config.tracker.records and config.tracker.mode is TrackerMode.online:
        wandb_report.check_installed()
        log.info("published: %s", wandb_report.publish(folder / STUDY_SPEC))


@contextmanager
def _warned(consequence: str) -> Iterator[None]:
    """Context that logs an OSError or a UserError as a warning, after the text `consequence`."""
    try:
        yield
    except (OSError, UserError) as error:
        log.warning("%s: %s", consequence, str(error).splitlines()[0])
