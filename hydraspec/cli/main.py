"""The entry point of all commands: verbs, required packages, interrupts, and the exit status.

Exit status: 0 done; 2 wrong configuration; 3 unusable checkpoint or workload; 4 done, and the
outputs are not the target's, or the gate found a regression; 130 interrupted; 1 anything else.

The module imports only the standard library and this package, so that it can name missing packages.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

from hydraspec.cli.complain import complain, errors_told
from hydraspec.errors import ConfigurationError, UserError
from hydraspec.signals import output_may_be_cut, terminations_as_interrupts


class Verb(NamedTuple):
    """A command: the "module:function" that takes its arguments and returns the exit status or
    None, and one line of help."""

    place: str
    help: str


RUN = "run"
VERBS = {
    RUN: Verb("hydraspec.cli.run:run", "decode a workload, or sweep with -m; may be left out"),
    "compare": Verb("hydraspec.cli.compare:main", "runs over the same prompts, paired by request"),
    "report": Verb("hydraspec.cli.report:main", "a page over runs, sweeps and benchmarks"),
    "doctor": Verb("hydraspec.cli.doctor:main", "why a drafter is rejected"),
    "predict": Verb("hydraspec.cli.predict:main", "which K and concurrency are worth it"),
    "replay": Verb("hydraspec.cli.replay:main", "a recorded run under other rules"),
    "gate": Verb("hydraspec.cli.gate:main", "whether runs are worse than a stored baseline"),
    "matrix": Verb("hydraspec.cli.matrix:main", "what combines with what, and its tests"),
}
# A checkout that was never installed lacks pip's packages, and conf/ and kernels/ as packages.
NEEDED = (
    *("hydraspec.conf", "hydraspec_kernels"),
    *("hydra", "omegaconf", "yaml", "numpy", "torch", "safetensors", "transformers", "rich"),
)


def main(argv: Sequence[str] | None = None, *, verb: str | None = None) -> int:
    """Run a command line.

    Args:
        argv: what was typed after `hydraspec` or `python -m hydraspec.<verb>`; None: sys.argv's.
        verb: the verb of `python -m hydraspec.<verb>`; None: the first argument, or else a run.

    Returns:
        The exit status. A user's mistake prints one message to stderr; an unexpected exception
        keeps its traceback. After an interrupt the process must end: others are ignored then.
    """
    typed = list(sys.argv[1:] if argv is None else argv)
    if verb is None:
        verb = typed.pop(0) if typed and typed[0] in VERBS else RUN
    command = "hydraspec" if verb == RUN else f"hydraspec.{verb}"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises instead of printing and exiting with 1
    with terminations_as_interrupts(), output_may_be_cut() as output:
        try:
            with errors_told(command) as ending:
                check_installed()
                if verb == RUN:
                    _refuse_words(typed)
                ending.status = load(VERBS[verb].place)(typed) or 0
        except SystemExit:  # from --help, or from argparse
            if verb == RUN and {"--help", "-h"} & {*typed}:
                sys.stdout.write(_table_of_verbs())
            if not output.is_full():
                raise
        if output.is_full():
            said = "standard output: there is no space left, so that what was printed is cut off"
            return complain(said, ending.status or 1, command=command)
    return ending.status


def load(place: str) -> Callable[..., Any]:
    """The function at "module:function"."""
    module, _, function = place.partition(":")
    found: Callable[..., Any] = getattr(import_module(module), function)
    return found


def check_installed() -> None:
    """Refuse a Python that lacks a package which every command needs.

    Raises:
        UserError: naming the packages that are missing.
    """
    absent = [name for name in NEEDED if find_spec(name) is None]
    if absent:
        raise UserError(
            f"hydraspec is not installed for {sys.executable}: it lacks {', '.join(absent)}\n"
            "  allowed: a Python that hydraspec was installed for\n"
            "  to do: in the checkout run `make setup`, then .venv/bin/python -m hydraspec; or run "
            "`pip install -e .`"
        )


def _table_of_verbs() -> str:
    lines = (f"  {name:7}  {verb.help}\n" for name, verb in VERBS.items())
    return "".join(("\nCommands (hydraspec <command> --help)\n\n", *lines))


def _refuse_words(typed: Sequence[str]) -> None:
    """Refuse a first argument that is neither a verb nor a flag nor an override."""
    word = typed[0] if typed else ""
    if not word or "=" in word or word.startswith(("-", "~")):
        return
    from hydraspec.config.messages import nearest

    meant = nearest(word, VERBS)
    raise ConfigurationError(
        f"{word}: is no command\n  allowed: {', '.join(VERBS)}; or group=choice, key=value\n"
        f"  to do: {f'did you mean hydraspec {meant}?' if meant else 'see hydraspec --help'}"
    )
