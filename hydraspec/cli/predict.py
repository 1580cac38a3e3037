"""`hydraspec predict`: predictions of speedup, from the command line and from Python."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hydraspec.cli import sweep
from hydraspec.cli.arguments import Parser
from hydraspec.cli.compose import Job, plan
from hydraspec.cli.flags import read_keys
from hydraspec.cli.jobs import claimed_folder, ready
from hydraspec.cli.overrides import with_config_dir
from hydraspec.config.schema import AUTO
from hydraspec.errors import ConfigurationError
from hydraspec.lab.resolution import resolve
from hydraspec.parallel import torchrun

N = TypeVar("N", int, float)

USAGE = "hydraspec predict target=… method=… [key=value …] [--drafts 1,3] [--check]"
DESCRIPTION = """\
Says before a sweep which numbers of drafts (K) are worth it, at which concurrency. It times a few
decode steps of every K beside steps without drafts, counts how many drafts are accepted on the
workload's own prompts, and prints the expected speedup, the acceptance at which drafts pay for
themselves, and a warning where they would not. Keys are those of a run (see hydraspec --help).
Several methods are a sweep: -m method=eagle3,gemma4_mtp."""
EPILOG = """\
It writes predict.json and predict.html to the run folder (hydra.run.dir=<folder>).

exit status: 0 predicted, whatever was found; 2 wrong configuration; 3 unusable checkpoint or
workload; 130 interrupted; 1 anything else"""
CONCURRENCIES = (1, 4, 16)
WHOLE, CONTEXTS = "whole numbers from 1", "whole numbers from 2"
CONCURRENCY = "workload.concurrency"


def main(argv: Sequence[str]) -> None:
    """Predict the speedup of the jobs that a command line names."""
    parser = _parser()
    flags, rest = parser.parse_known_args(argv)
    args = read_keys(rest, "this is a prediction", sweeps=True, own=parser.flags)
    if flags.check and flags.acceptance is not None:
        raise ConfigurationError(
            "--check --acceptance: a run has the drafter's own acceptance\n"
            "  allowed: one of the two\n  to do: leave --acceptance out"
        )
    predict(
        args.overrides,
        drafts=_values("--drafts", flags.drafts, _count, WHOLE, "1,2,4"),
        concurrencies=_values("--concurrency", flags.concurrency, _count, WHOLE, "1,2,4"),
        acceptance=_values(
            "--acceptance", flags.acceptance, _rate, "rates from 0 to 1", "0.8,0.7,0.6"
        ),
        contexts=_values("--contexts", flags.contexts, _context, CONTEXTS, "512,4096,32768"),
        waves=(_values("--waves", flags.waves, _count, WHOLE, "1,2,4") or [2])[0],
        check=flags.check,
        multirun=args.multirun,
    )


def predict(
    overrides: Sequence[str],
    *,
    drafts: Sequence[int] | None = None,
    concurrencies: Sequence[int] | None = None,
    acceptance: Sequence[float] | None = None,
    contexts: Sequence[int] | None = None,
    waves: int = 2,
    check: bool = False,
    multirun: bool = False,
    config_dir: str | None = None,
    quiet: bool = False,
) -> list[dict[str, Any]]:
    """Predict speedups; returns for each job the content of its predict.json, and `run_dir`.

    Args:
        drafts: the K to predict; None: 1 to method.num_speculative_tokens.
        concurrencies: requests at once; None: see `concurrencies_of`.
        acceptance: assumed conditional rates by position; None: measured.
        contexts: tokens of a request in the KV cache at which steps are also timed; None: none.
        waves: requests that follow each other in every place; 1: all requests begin together.
        check: also run the workload, to compare its speedup with the predicted one.
    """
    from hydraspec.analysis.predict import run, words
    from hydraspec.analysis.predict.prediction import Wanted

    torchrun.refuse_calls()
    planned = plan(with_config_dir(config_dir, overrides), multirun=multirun)
    # In a sweep, predictions compare the other jobs with method=none, which gets none itself.
    jobs = [job for job in planned.jobs if job.config.method.name != "none"] or planned.jobs
    wanted = []
    for job in jobs:
        if job.config.method.name == AUTO:
            resolve(job.config)  # its drafter says K
        wanted.append(
            Wanted(
                drafts=sorted({*(drafts or range(1, job.config.method.most_drafts + 1))}),
                concurrencies=sorted({*(concurrencies or concurrencies_of(job))}),
                rates=acceptance,
                contexts=sorted({*(contexts or ())}),
                waves=waves,
                check=check,
            )
        )
        run.check(job.config, wanted[-1])
    found: list[dict[str, Any]] = []
    with claimed_folder(planned):
        sweep.record_skipped(planned.folder, planned.skipped)
        for job, each in zip(jobs, wanted, strict=True):
            with ready(job) as folder:
                try:
                    result = run.predict(
                        job.config, each, run_dir=folder, overrides=job.overrides, quiet=quiet
                    )
                except KeyboardInterrupt:
                    raise KeyboardInterrupt("what was finished is saved" * bool(found)) from None
            found.append({**result, "run_dir": str(folder)})
    words.show_best(found, quiet=quiet)
    return found


def concurrencies_of(job: Job) -> list[int]:
    """Concurrencies to predict, up to engine.max_num_seqs: workload.concurrency if it was typed,
    else CONCURRENCIES."""
    slots = job.config.engine.max_num_seqs
    if any(typed.lstrip("+").startswith(f"{CONCURRENCY}=") for typed in job.overrides):
        return [min(job.config.workload.concurrency or slots, slots)]
    return [each for each in CONCURRENCIES if each <= slots]


def _parser() -> Parser:
    parser = Parser(
        "predict",
        usage=USAGE,
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
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
        "--contexts",
        metavar="TOKENS,…",
        help="also time steps with so many tokens of each request in the KV cache, which is filled "
        "and not read, and map where drafts pay by requests at once and context",
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


def _count(word: str) -> int:
    if int(word) < 1:
        raise ValueError
    return int(word)


def _context(word: str) -> int:
    if int(word) < 2:
        raise ValueError
    return int(word)


def _rate(word: str) -> float:
    if not 0 <= float(word) <= 1:
        raise ValueError
    return float(word)


def _values(
    flag: str, typed: str | None, read: Callable[[str], N], allowed: str, example: str
) -> list[N] | None:
    """The values of a flag, separated by commas; None where it was left out."""
    try:
        return None if typed is None else [read(word) for word in typed.split(",")]
    except ValueError:
        raise ConfigurationError(
            f"{flag} {typed}: cannot be read\n  allowed: {allowed}, separated by commas\n"
            f"  to do: write {flag} {example}"
        ) from None
