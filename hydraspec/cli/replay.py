"""`hydraspec replay`: arguments and files."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from hydraspec.cli.arguments import Parser
from hydraspec.cli.folders import writing

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


def main(argv: Sequence[str]) -> None:
    """Replay the run that a command line names."""
    parser = Parser(
        "replay",
        description=DESCRIPTION,
        epilog=RULES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of a run")
    parser.add_argument("rules", nargs="*", metavar="KEY=VALUE", help="what is replayed")
    given = parser.parse_args(argv)
    from hydraspec.analysis.replay import console, run

    result = run.replayed(given.folder, given.rules)
    with writing(given.folder):
        written = run.write(result, given.folder)
    console.show(result, written)
