"""`python -m hydraspec.replay`: arguments, files and exit status."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from hydraspec.cli.complain import status_over_folders

COMMAND = "hydraspec.replay"
DESCRIPTION = """\
Replay a run with fewer drafts or other rules, from what it recorded: exactly for greedy requests
where it ran with metrics.all_positions=true, as an estimate from metrics.trace=true alone. Rules
are key=value[,value...], and all combinations are replayed; without any, every K up to the
recorded one. docs/replay.md explains them."""
RULES = """\
rules:
  K=1,2 or method.num_speculative_tokens=1,2   drafts of a step, up to the recorded K
  min_probability=0.3       no drafts from the first one on that the drafter gives less
  candidates=2              any of the drafter's 2 best tokens at every step: a tree
  sampling.max_tokens=32    shorter outputs
  method.verification=block the same as standard for greedy requests

It writes replay.json to the run's folder.
exit status: 0; 2 if there is nothing to replay, or the record does not answer for a rule; 1 if the
file cannot be written"""


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m hydraspec.replay",
        description=DESCRIPTION,
        epilog=RULES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", metavar="FOLDER", help="of a run")
    parser.add_argument("rules", nargs="*", metavar="KEY=VALUE", help="what is replayed")
    given = parser.parse_args(arguments)
    folder = Path(given.folder)
    return status_over_folders(lambda: _replay(folder, given.rules), command=COMMAND, writes=folder)


def _replay(folder: Path, rules: Sequence[str]) -> None:
    from hydraspec.analysis.replay import console, run

    result = run.replayed(folder, rules)
    console.show(result, run.write(result, folder))
