"""`hydraspec doctor`: the examination of a drafter, from the command line and from Python."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from hydraspec.cli.flags import read_keys
from hydraspec.cli.from_python import planned_call
from hydraspec.cli.jobs import claimed_folder, ready

HELP = """\
usage: python -m hydraspec.doctor target=… method=… [method.checkpoint=…] [key=value …]

Says why a drafter is accepted seldom. It prints the drafter's conventions in words, tries each of
them otherwise (aux layers, norms, d2t, positions, rope_theta, embedding scale, order and sign of
projections, chat template, …) over the target's own answers to some prompts, and names the variant
that is surely better. Keys are those of a run (see python -m hydraspec --help); prompts are the
workload's: workload=jsonl workload.path=…, workload.limit=… says how many (else 32 are chosen).

It writes doctor.json and doctor.html to the run folder (hydra.run.dir=<folder>). docs/doctor.md
explains them.

exit status: 0 examined, whatever was found; 2 wrong configuration; 3 unusable checkpoint or
workload; 130 interrupted; 1 anything else
"""


def main(argv: Sequence[str]) -> None:
    """Examine the drafter that a command line names."""
    if {"--help", "-h"} & {*argv}:
        sys.stdout.write(HELP)
        return
    doctor(read_keys(argv, "an examination is of one drafter").overrides)


def doctor(
    overrides: Sequence[str], *, config_dir: str | None = None, quiet: bool = False
) -> dict[str, Any]:
    """Examine the drafter of `overrides`; returns the content of doctor.json and `run_dir`."""
    from hydraspec.analysis.doctor.run import check, examine

    planned = planned_call("doctor", overrides, config_dir)
    (job,) = planned.jobs
    check(job.config)
    with claimed_folder(planned), ready(job) as folder:
        found = examine(job.config, run_dir=folder, overrides=job.overrides, quiet=quiet)
    return {**found, "run_dir": str(folder)}
