"""`python -m hydraspec.predict`: the command line of predictions."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

from hydraspec.cli.beside_runs import prepared, status_of
from hydraspec.cli.compose import CONFIG_NAME, Job, plan
from hydraspec.cli.flags import read_flags
from hydraspec.cli.folders import RUN_DIR, fresh, is_typed, refuse_no_folder
from hydraspec.cli.overrides import with_config_dir
from hydraspec.config.schema import AUTO
from hydraspec.errors import ConfigurationError
from hydraspec.lab.resolution import resolve
from hydraspec.parallel import torchrun
from hydraspec.signals import output_may_be_cut, terminations_as_interrupts

COMMAND = "hydraspec.predict"
USAGE = "python -m hydraspec.predict target=… method=… [key=value …] [--drafts 1,3,5] [--check]"
DESCRIPTION = """\
Says before a sweep which numbers of drafts (K) are worth it, at which concurrency. It times a few
decode steps of every K beside steps without drafts, counts how many drafts are accepted on the
workload's own prompts, and prints the expected speedup, the acceptance at which drafts pay for
themselves, and a warning where they would not. Keys are those of a run (see python -m hydraspec
--help). Several methods are a sweep: -m method=eagle3,gemma4_mtp."""
EPILOG = """\
It writes predict.json and predict.html to the run folder (hydra.run.dir=<folder>).

exit status: 0 predicted, whatever was found; 2 wrong configuration; 3 unusable checkpoint or
workload; 130 interrupted; 1 anything else"""
CONCURRENCIES = (1, 4, 16)
CONCURRENCY = "workload.concurrency"


def main(argv: Sequence[str]) -> int:
    """Predict what a command line names, and return the exit status."""
    os.environ["HYDRA_FULL_ERROR"] = "1"
    flags, rest = _parser().parse_known_args(list(argv))
    with output_may_be_cut(), terminations_as_interrupts():
        return status_of(lambda: _predict(flags, rest), command=COMMAND)


def predict(
    overrides: Sequence[str],
    *,
    drafts: Sequence[int] | None = None,
    concurrencies: Sequence[int] | None = None,
    acceptance: Sequence[float] | None = None,
    waves: int = 2,
    check: bool = False,
    multirun: bool = False,
    config_dir: str | None = None,
    quiet: bool = False,
) -> list[dict[str, Any]]:
    """Predictions from Python, one for each job: the content of its predict.json, and `run_dir`.

    Args:
        drafts: the K to predict; None: 1 to method.num_speculative_tokens.
        concurrencies: requests at once; None: workload.concurrency where it is typed, else 1, 4
            and 16, as far as engine.max_num_seqs goes.
        acceptance: assumed conditional rates by position; None: measured.
        waves: of requests that follow each other in a load; 1: they all begin together.
        check: also run what is predicted.
    """
    from hydraspec.analysis.predict.console import show_best
    from hydraspec.analysis.predict.prediction import Wanted
    from hydraspec.analysis.predict.run import check as check_job
    from hydraspec.analysis.predict.run import predict as run_prediction

    refuse_no_folder(overrides)
    torchrun.refuse_calls()
    planned = plan(with_config_dir(config_dir, overrides), multirun=multirun)
    # Of a sweep; method=none is what the others are compared with.
    jobs = [job for job in planned.jobs if job.config.method.name != "none"] or planned.jobs
    wanted = []
    for job in jobs:
        if job.config.method.name == AUTO:
            resolve(job.config)  # its drafter says K
        most = job.config.method.most_drafts
        wanted.append(
            Wanted(
                drafts=drafts or range(1, most + 1),
                concurrencies=concurrencies or concurrencies_of(job),
                rates=acceptance,
                waves=waves,
                check=check,
            )
        )
        check_job(job.config, wanted[-1])
    found = []
    for job, each in zip(jobs, wanted, strict=True):
        if not is_typed(RUN_DIR, overrides) and not multirun:
            job.folder = fresh(job.folder)
        with prepared(job) as folder:
            result = run_prediction(
                job.config, each, run_dir=folder, overrides=job.overrides, quiet=quiet
            )
        found.append({**result, "run_dir": str(folder)})
    show_best(found, quiet=quiet)
    return found


def concurrencies_of(job: Job) -> list[int]:
    """workload.concurrency where it is typed, else those that are usual."""
    slots = job.config.engine.max_num_seqs
    if is_typed(CONCURRENCY, job.overrides):
        return [min(job.config.workload.concurrency or slots, slots)]
    return [each for each in CONCURRENCIES if each <= slots]


def _predict(flags: argparse.Namespace, rest: Sequence[str]) -> None:
    args = read_flags(rest)
    if args.cfg or args.info or args.config_name not in (None, CONFIG_NAME):
        raise ConfigurationError(
            f"{' '.join(rest)}: this is a prediction\n"
            "  allowed: group=choice, key=value, -m and --config-dir\n"
            "  to do: leave the flag out; python -m hydraspec has it"
        )
    if flags.check and flags.acceptance is not None:
        raise ConfigurationError(
            "--check --acceptance: a run has the drafter's own acceptance\n"
            "  allowed: one of the two\n  to do: leave --acceptance out"
        )
    predict(
        args.overrides,
        drafts=_numbers("--drafts", flags.drafts),
        concurrencies=_numbers("--concurrency", flags.concurrency),
        acceptance=_rates(flags.acceptance),
        waves=(_numbers("--waves", flags.waves) or [2])[0],
        check=flags.check,
        multirun=args.multirun,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hydraspec.predict",
        usage=USAGE,
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--drafts", metavar="K,…", help="K to predict (all up to the method's)")
    parser.add_argument(
        "--concurrency",
        metavar="N,…",
        help="requests at once (1,4,16, up to engine.max_num_seqs, or workload.concurrency)",
    )
    parser.add_argument(
        "--acceptance",
        metavar="RATE,…",
        help="assume this acceptance: of each draft whose predecessors were accepted, by position; "
        "the last one also counts for later positions",
    )
    parser.add_argument(
        "--waves",
        metavar="N",
        help="requests that follow each other in every place (2); 1: all of them begin together, "
        "as in bench=decode",
    )
    parser.add_argument(
        "--check", action="store_true", help="also run the workload, and print both and the error"
    )
    return parser


def _numbers(flag: str, typed: str | None) -> list[int] | None:
    if typed is None:
        return None
    try:
        found = sorted({int(word) for word in typed.split(",")})
    except ValueError:
        found = [0]
    if found[0] < 1:
        raise ConfigurationError(
            f"{flag} {typed}: cannot be read\n"
            "  allowed: whole numbers from 1, separated by commas\n"
            f"  to do: write {flag} 1,2,4"
        )
    return found


def _rates(typed: str | None) -> list[float] | None:
    if typed is None:
        return None
    try:
        found = [float(word) for word in typed.split(",")]
    except ValueError:
        found = [-1.0]
    if not all(0 <= rate <= 1 for rate in found):
        raise ConfigurationError(
            f"--acceptance {typed}: cannot be read\n"
            "  allowed: rates from 0 to 1, separated by commas\n"
            "  to do: write --acceptance 0.8,0.7,0.6"
        )
    return found
