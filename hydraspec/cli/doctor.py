"""`python -m hydraspec.doctor`: the command line of an examination."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from hydraspec.cli.beside_runs import prepared, status_of
from hydraspec.cli.compose import CONFIG_NAME, plan
from hydraspec.cli.flags import read_flags
from hydraspec.cli.folders import RUN_DIR, fresh, is_typed, refuse_no_folder
from hydraspec.cli.overrides import with_config_dir
from hydraspec.errors import ConfigurationError
from hydraspec.parallel import torchrun
from hydraspec.signals import output_may_be_cut, terminations_as_interrupts

COMMAND = "hydraspec.doctor"
HELP = """\
usage: python -m hydraspec.doctor target=… method=… [method.checkpoint=…] [key=value …]

Says why a drafter is accepted seldom. It prints the drafter's conventions in words, tries each of
them otherwise (aux layers, norms, d2t, positions, rope_theta, embedding scale, order and sign of
projections, chat template, …) over the target's own answers to some prompts, and names the variant
that is surely better. Keys are those of a run (see python -m hydraspec --help); prompts are the
workload's: workload=jsonl workload.path=…, workload.limit=… says how many (else 32 are chosen).

It writes doctor.json to the run folder (hydra.run.dir=<folder>). docs/doctor.md explains both.

exit status: 0 examined, whatever was found; 2 wrong configuration; 3 unusable checkpoint or
workload; 130 interrupted; 1 anything else
"""


def main(argv: Sequence[str]) -> int:
    """Examine what a command line names, and return the exit status."""
    os.environ["HYDRA_FULL_ERROR"] = "1"
    with output_may_be_cut(), terminations_as_interrupts():
        if {"--help", "-h"} & {*argv}:
            sys.stdout.write(HELP)
            return 0
        return status_of(lambda: _examine(argv), command=COMMAND)


def doctor(
    overrides: Sequence[str], *, config_dir: str | None = None, quiet: bool = False
) -> dict[str, Any]:
    """An examination from Python; returns the content of doctor.json and `run_dir`."""
    from hydraspec.analysis.doctor.run import check, examine

    refuse_no_folder(overrides)
    torchrun.refuse_calls()
    (job,) = plan(with_config_dir(config_dir, overrides)).jobs
    check(job.config)
    if not is_typed(RUN_DIR, overrides):
        job.folder = fresh(job.folder)
    with prepared(job) as folder:
        found = examine(job.config, run_dir=folder, overrides=job.overrides, quiet=quiet)
    return {**found, "run_dir": str(folder)}


def _examine(argv: Sequence[str]) -> None:
    args = read_flags(argv)
    if args.multirun or args.cfg or args.info or args.config_name not in (None, CONFIG_NAME):
        raise ConfigurationError(
            f"{' '.join(argv)}: an examination is of one drafter\n"
            "  allowed: group=choice, key=value and --config-dir\n"
            "  to do: leave the flag out; python -m hydraspec has it"
        )
    doctor(args.overrides)
