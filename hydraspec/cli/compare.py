"""`hydraspec compare` and `hydraspec.compare`: arguments and files."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from hydraspec.cli.arguments import Parser
from hydraspec.cli.folders import between, writing
from hydraspec.errors import ConfigurationError

DESCRIPTION = """\
Compare runs over the same prompts, request by request. Each run's speed is taken against its own
baseline, so that a machine that slows down between runs cancels; runs of several splits, devices,
engines or of other engine settings have no baseline in common, and are ranked by tokens per second.
Runs that differ in seed alone are pooled. Two jobs: the first is the reference; more: the others
are compared with the best."""
STATUSES = "Exit status: 0; 2 if the folders cannot be compared; 1 if a file cannot be written."


def compare(
    folders: Sequence[str | PathLike[str]], *, write: str | PathLike[str] | None = None
) -> dict[str, Any]:
    """Implementation of `hydraspec.compare`, which documents arguments and result."""
    is_list = isinstance(folders, Sequence) and not isinstance(folders, str)
    if not is_list or not all(isinstance(folder, str | PathLike) for folder in folders):
        raise ConfigurationError(
            f"compare({folders!r}): cannot be read\n  allowed: a list of folders\n"
            '  to do: write compare(["outputs/a", "outputs/b"])'
        )
    from hydraspec.study import compare as runs
    from hydraspec.study import words

    group = runs.compared([Path(folder) for folder in folders])
    if write is not None:
        runs.write(group, Path(write))
    result: dict[str, Any] = words.as_json(group)
    return result


def main(argv: Sequence[str]) -> None:
    """Compare the runs that a command line names."""
    parser = Parser("compare", description=DESCRIPTION, epilog=STATUSES)
    parser.add_argument(
        "folders", nargs="+", type=Path, metavar="FOLDER", help="of a run, or of a sweep"
    )
    parser.add_argument(
        "--write",
        type=Path,
        metavar="FOLDER",
        help="write compare.json, compare.csv, compare.md and compare.html there",
    )
    parser.add_argument(
        "--smallest-effect",
        type=between(float, 0, 0.5),
        metavar="SHARE",
        help="of the speed: jobs that differ by less are as good (default: as the runs have it)",
    )
    given = parser.parse_args(argv)
    from hydraspec.study import compare as runs

    group = runs.compared(given.folders, smallest_effect=given.smallest_effect)
    runs.tell(group)
    runs.show(group)
    if given.write is not None:
        with writing(given.write):
            runs.write(group, given.write, say=True)
