"""`hydraspec gate`: arguments, what is printed, and the exit status."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from hydraspec.cli.arguments import Parser
from hydraspec.cli.folders import between, writing
from hydraspec.errors import printable
from hydraspec.study import baseline, gate
from hydraspec.study.runs import read_environment
from hydraspec.study.words import in_words

REGRESSION = 4
DESCRIPTION = """\
Says whether runs are worse than a stored baseline: acceptance by position and category, speedup,
exact match, lossless verdict and errors, paired by request. --write stores runs as the baseline.
Repeats of a job (runs that differ in seed alone, or in nothing) are pooled on both sides."""
STATUSES = """\
Exit status: 0 no worse; 4 worse, each regression named; 2 wrong arguments, a baseline or folders
that cannot be used or compared; 1 the baseline cannot be written."""


def main(argv: Sequence[str]) -> int:
    """Compare the runs that a command line names, or store them; returns the exit status."""
    parser = Parser("gate", description=DESCRIPTION, epilog=STATUSES)
    parser.add_argument("file", type=Path, metavar="FILE", help="the baseline, JSON")
    parser.add_argument(
        "folders", nargs="+", type=Path, metavar="FOLDER", help="of a run, or of a sweep"
    )
    parser.add_argument("--write", action="store_true", help="store the runs in FILE as baseline")
    parser.add_argument(
        "--looks",
        type=between(int, 1, 10_000),
        default=gate.LOOKS,
        metavar="N",
        help="comparisons with this baseline among which one false alarm may come with a "
        "probability of 5 %% (default: %(default)s)",
    )
    parser.add_argument(
        "--acceptance-margin",
        type=between(float, 0, 0.9),
        default=gate.ACCEPTANCE_MARGIN,
        metavar="RATE",
        help="loss of an acceptance rate that is granted, 0 to 0.9 (default: %(default)s)",
    )
    parser.add_argument(
        "--speed-margin",
        type=between(float, 0, 0.9),
        default=gate.SPEED_MARGIN,
        metavar="SHARE",
        help="loss of speedup that is granted, 0 to 0.9 (default: %(default)s)",
    )
    given = parser.parse_args(argv)
    return _write(given.file, given.folders) if given.write else _compare(given)


def _write(file: Path, folders: Sequence[Path]) -> int:
    found = baseline.usable(folders)
    with writing(file):
        baseline.write(file, found)
    for label, job in zip(gate.labels(found), found, strict=True):
        runs = job.runs
        _say(f"{label}: {len(runs)} run{'s' * (len(runs) > 1)}, {len(runs[0].rows)} requests")
    _say(f"Baseline: {file}")
    return 0


def _compare(given: argparse.Namespace) -> int:
    stored = baseline.read(given.file)
    jobs = [(job, read_environment(job.folder)) for job in baseline.usable(given.folders)]
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


def _lines(outcome: gate.Outcome) -> Iterator[str]:
    """Lines of a job's result: one for each regression, then a summary of the rest."""
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
