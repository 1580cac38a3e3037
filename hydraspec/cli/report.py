"""`python -m hydraspec.report`: arguments, files and exit status."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from hydraspec.cli.complain import complain
from hydraspec.errors import UserError
from hydraspec.signals import output_may_be_cut

COMMAND = "hydraspec.report"
DESCRIPTION = """\
Make a report over runs: the question and its answer in a sentence, throughput of one user against
that of all, speedup with intervals, acceptance by position and category, lossless verdicts, where
time goes, and the settings that differ. Runs of several targets, workloads or loads are told apart;
those of the same are ranked."""
STATUSES = "Exit status: 0; 2 if the folders make no report; 1 if a file cannot be written."


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m hydraspec.report", description=DESCRIPTION, epilog=STATUSES
    )
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="of a run, or of a sweep")
    parser.add_argument(
        "--write",
        metavar="FOLDER",
        help="where study.html goes: by default into the one folder that is given, else into a "
        "new one in outputs/reports",
    )
    parser.add_argument("--question", metavar="TEXT", help="the title, else made of the settings")
    given = parser.parse_args(arguments)
    from hydraspec.report.study import page

    folders = [Path(folder) for folder in given.folders]
    target = _target(given.write, folders)
    with output_may_be_cut():
        try:
            made = page.read(folders, asked=given.question)
            path = page.write(made, target)
        except UserError as error:
            return complain(error, error.exit_code, command=COMMAND)
        except OSError as error:
            return complain(f"cannot write {target}: {error.strerror or error}", 1, command=COMMAND)
        page.tell(made, path)
    return 0


def _target(given: str | None, folders: Sequence[Path]) -> Path:
    """Where the report goes."""
    if given is not None:
        return Path(given)
    if len(folders) == 1:
        return folders[0]
    return Path("outputs", "reports", time.strftime("%Y-%m-%d"), time.strftime("%H-%M-%S"))
