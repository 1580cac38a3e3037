"""`python -m hydraspec.gate`: arguments, what is printed, and the exit status."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hydraspec.cli.complain import complain
from hydraspec.errors import CannotWriteError, UserError, printable
from hydraspec.signals import output_may_be_cut

if TYPE_CHECKING:
    from hydraspec.study.gate import Outcome

COMMAND = "hydraspec.gate"
REGRESSION = 4
DESCRIPTION = """\
Says whether runs are worse than a stored baseline: acceptance by position and category, speedup,
exact match, lossless verdict and errors, paired by request. --write stores runs as the baseline.
Repeats of a job (runs that differ in seed alone, or in nothing) are pooled on both sides."""
STATUSES = """\
Exit status: 0 no worse; 4 worse, each regression named; 2 wrong arguments, a baseline or folders
that cannot be used or compared; 1 the baseline cannot be written."""


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    given = _parser().parse_args(arguments)
    folders = [Path(folder) for folder in given.folders]
    with output_may_be_cut():
        try:
            if given.write:
                return _write(Path(given.file), folders)
            return _compare(Path(given.file), folders, given)
        except UserError as error:
            return complain(error, error.exit_code, command=COMMAND)
        except CannotWriteError as error:
            said = error.args[1].partition(";")[0].partition(": ")[2]
            return complain(f"cannot write {given.file}: {said}", 1, command=COMMAND)


def _parser() -> argparse.ArgumentParser:
    from hydraspec.study.gate import ACCEPTANCE_MARGIN, LOOKS, SPEED_MARGIN

    parser = argparse.ArgumentParser(
        prog="python -m hydraspec.gate", description=DESCRIPTION, epilog=STATUSES
    )
    parser.add_argument("file", metavar="FILE", help="the baseline, JSON")
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="of a run, or of a sweep")
    parser.add_argument("--write", action="store_true", help="store the runs in FILE as baseline")
    parser.add_argument(
        "--looks",
        type=_looks,
        default=LOOKS,
        metavar="N",
        help="comparisons with this baseline among which one false alarm may come with a "
        "probability of 5 %% (default: %(default)s)",
    )
    parser.add_argument(
        "--acceptance-margin",
        type=_margin,
        default=ACCEPTANCE_MARGIN,
        metavar="RATE",
        help="loss of an acceptance rate that is granted, 0 to 0.9 (default: %(default)s)",
    )
    parser.add_argument(
        "--speed-margin",
        type=_margin,
        default=SPEED_MARGIN,
        metavar="SHARE",
        help="loss of speedup that is granted, 0 to 0.9 (default: %(default)s)",
    )
    return parser


def _looks(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 10_000:
        raise argparse.ArgumentTypeError(f"{text}: allowed are whole numbers from 1 to 10000")
    return int(text)


def _margin(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 0.9:
        raise argparse.ArgumentTypeError(f"{text}: allowed are numbers from 0 to 0.9")
    return value


def _write(file: Path, folders: Sequence[Path]) -> int:
    from hydraspec.study import baseline
    from hydraspec.study.gate import labels

    found = baseline.usable(folders)
    baseline.write(file, found)
    for label, job in zip(labels(found), found, strict=True):
        runs = job.runs
        _say(f"{label}: {len(runs)} run{'s' * (len(runs) > 1)}, {len(runs[0].rows)} requests")
    _say(f"Baseline: {file}")
    return 0


def _compare(file: Path, folders: Sequence[Path], given: argparse.Namespace) -> int:
    from hydraspec.study import baseline, gate
    from hydraspec.study.runs import read_environment

    stored = baseline.read(file)
    jobs = [(job, read_environment(job.folder)) for job in baseline.usable(folders)]
    outcomes = gate.compare(
        stored,
        jobs,
        looks=given.looks,
        acceptance_margin=given.acceptance_margin,
        speed_margin=given.speed_margin,
    )
    for outcome in outcomes:
        for line in _lines(outcome):
            _say(line)
    failed = sum(outcome.failed for outcome in outcomes)
    _say(f"{failed} of {len(outcomes)} jobs worse" if failed else "No regression")
    return REGRESSION if failed else 0


def _lines(outcome: Outcome) -> Iterator[str]:
    """A job's result: what is worse, one line each, then the rest in short."""
    from hydraspec.study.words import in_words

    yield f"{outcome.job.label}: {'REGRESSION' if outcome.failed else 'no worse'}"
    for text in outcome.broken:
        yield f"  worse: {text}"
    for check in outcome.worse:
        values = f"{check.was:.3f} -> {check.now:.3f}{in_words(check.ratio)}"
        yield f"  worse: {check.name}: {values}, p = {check.p_adjusted:.2g} corrected"
    rest = [check for check in outcome.checks if check not in outcome.worse]
    for check in rest:
        if check.what != "acceptance" and not check.scope:
            values = f"{check.was:.3f} -> {check.now:.3f}{in_words(check.ratio)}"
            yield f"  no worse: {check.name}: {values}"
    rates = [check for check in rest if check.what == "acceptance"]
    unknown = [check for check in rates if check.ratio.ci95 is None and check.p is not None]
    if rates:
        number = len(rates) - len(unknown)
        yield f"  no worse: {number} of {len(rates)} rates of acceptance, by position and category"
    for check in unknown:
        yield f"  cannot tell: {check.name}: {check.ratio.num_requests} requests are too few"
    for note in outcome.notes:
        yield f"  {note}"


def _say(line: str) -> None:
    sys.stdout.write(f"{printable(line)}\n")
