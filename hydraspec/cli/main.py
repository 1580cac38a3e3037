"""The command line: flags, exit statuses and messages. Has the only hydra.main.

Exit status: 0 done; 2 wrong configuration; 3 unusable checkpoint or workload; 4 done, and the
outputs are not the target's; 130 interrupted; 1 anything else. What a run does is the lab's
business.
"""

from __future__ import annotations

import logging
import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from hydraspec.cli import sweep
from hydraspec.cli.compose import (
    CONFIG_MODULE,
    CONFIG_NAME,
    Plan,
    check_keys,
    parse,
    plan,
    search_override,
    search_places,
    translate,
    with_config_dir,
    with_method,
)
from hydraspec.cli.folders import (
    RUN_DIR,
    SWEEP_DIR,
    claimed,
    folder_message,
    fresh,
    is_of,
    is_typed,
    refuse_no_folder,
    results,
)
from hydraspec.config import RunConfig, to_dict, to_run_config
from hydraspec.config.benches import is_bench
from hydraspec.config.choices import search_path
from hydraspec.config.messages import nearest
from hydraspec.errors import CannotWriteError, ConfigurationError, UserError, printable
from hydraspec.lab.outcome import INTERRUPTED, Outcome, exit_status, last_line, outcome
from hydraspec.lab.resolution import resolve
from hydraspec.lab.surroundings import (
    ignore_interrupts,
    interrupts_stay_interrupts,
    output_may_be_cut,
    terminations_as_interrupts,
)

log = logging.getLogger(__name__)


def main() -> int:
    """Run what sys.argv asks for.

    Returns:
        The exit status. A user's mistake prints one message to stderr; an unexpected exception
        keeps its traceback. After an interrupt the process is to end: further ones are ignored.
    """
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises instead of printing and exiting with 1
    with output_may_be_cut(), terminations_as_interrupts():
        return _status_of(sys.argv[1:])


def _status_of(argv: Sequence[str]) -> int:
    try:
        return _main(argv)
    except UserError as error:
        return _complain(error, error.exit_code)
    except (HydraException, OmegaConfBaseException) as error:
        return _complain(translate(error), ConfigurationError.exit_code)
    except KeyboardInterrupt as interrupt:
        ignore_interrupts()
        return _complain(f"interrupted: {str(interrupt) or 'nothing was finished'}", INTERRUPTED)
    except CannotWriteError as error:
        return _complain(folder_message(error), 1)


def run(
    overrides: Sequence[str] = (), *, config_dir: str | None = None, quiet: bool = False
) -> dict[str, Any]:
    """One run from Python, with the overrides one would type; see `hydraspec.run`."""
    is_list = isinstance(overrides, Sequence) and not isinstance(overrides, str)
    if not is_list or not all(isinstance(typed, str) for typed in overrides):
        raise ConfigurationError(
            f"run({overrides!r}): cannot be read\n  allowed: a list of strings, each as typed\n"
            '  to do: write run(["method=none", "seed=1"])'
        )
    refuse_no_folder(overrides)
    overrides = with_config_dir(config_dir, overrides)
    planned = plan(overrides)
    if planned.is_sweep:
        raise ConfigurationError(
            f"{' '.join(overrides)}: asks for a sweep\n"
            "  allowed: one run\n  to do: call run once for each combination, or use hydraspec -m"
        )
    folder = planned.folder if is_typed(RUN_DIR, overrides) else fresh(planned.folder)
    printing = _only_errors_logged() if quiet else output_may_be_cut()
    with printing, claimed(folder, RUN_DIR):
        summary = _run_job(planned.jobs[0], folder, list(overrides), quiet=quiet)
        if not quiet:
            _end([outcome(summary)])
    return {**summary, "run_dir": str(folder.absolute())}


def _main(argv: Sequence[str]) -> int:
    with interrupts_stay_interrupts():
        overrides, multirun, is_run = _read_flags(argv)
        if not is_run:
            check_keys(parse(overrides))
            _hydra_main(lambda cfg: None)
            return 0
        refuse_no_folder(overrides)
        planned = plan(overrides, multirun=multirun)
    key = SWEEP_DIR if planned.is_sweep else RUN_DIR
    typed = is_typed(key, overrides)
    if not typed:
        planned.folder = fresh(planned.folder)
    # As it is now: with a clock in it, Hydra would arrive at another one.
    sys.argv.append(f"{key}={_quoted(str(planned.folder))}")
    with claimed(planned.folder, key):
        try:
            if typed and planned.is_sweep:
                _bind_threads(planned.jobs[0])
                sweep.check_folder(planned.folder, planned.jobs)
            return _execute(planned)
        except OSError as error:
            if not is_of(planned.folder, error):
                raise
            raise UserError(folder_message(error)) from error


def _execute(planned: Plan) -> int:
    """Run the jobs one after another; a sweep ends with its comparison, whatever failed."""
    outcomes: list[Outcome] = []
    errors: list[Exception] = []
    before = results(planned.folder)

    def job(cfg: DictConfig) -> None:
        if errors:  # a bug or a full disk: the jobs left would meet it too
            return
        try:
            outcomes.append(_job(cfg, planned))
        except Exception as error:  # raised again below: Hydra would put a line of its own in front
            errors.append(error)

    try:
        try:
            with interrupts_stay_interrupts():
                _hydra_main(job)
        finally:
            if planned.is_sweep and any(planned.folder.glob("*/summary.json")):
                _compare(planned.folder)
    except KeyboardInterrupt:
        if results(planned.folder) == before:
            raise
        raise KeyboardInterrupt("what was finished is saved") from None
    for error in errors:
        raise error
    return _end(outcomes)


def _end(outcomes: Sequence[Outcome]) -> int:
    status, said = exit_status(outcomes), last_line(outcomes)
    return status if said is None else _complain(said, status)


def _job(cfg: DictConfig, planned: Plan) -> Outcome:
    settings = HydraConfig.get()
    run_dir = Path(settings.runtime.output_dir)
    places = search_path()
    overrides = [search_override(places)] if places else []
    overrides += [str(override) for override in settings.overrides.task]
    config = to_run_config(cfg)
    if not planned.is_sweep:
        return outcome(_run_job(config, run_dir, overrides))
    job = str(settings.job.num)
    log.info("job %s of %d: %s", job, len(planned.jobs), " ".join(overrides))
    try:
        sweep.note_idle_seed(config, planned.jobs)
        with claimed(run_dir, SWEEP_DIR):
            return outcome(_run_or_take_over(config, run_dir, planned.folder, overrides), job)
    except UserError as error:  # this job cannot run; the others may
        return Outcome(status=_complain(error, error.exit_code), job=job)


def _run_or_take_over(
    config: RunConfig, run_dir: Path, sweep_dir: Path, overrides: list[str]
) -> dict[str, Any]:
    if config.tracker.group is None:
        config.tracker.group = sweep.group_name(sweep_dir)
    _resolve(config)
    finished = sweep.find_finished(sweep_dir, config)
    if finished is not None:
        return sweep.take_over(finished, run_dir, overrides)
    return _run_job(config, run_dir, overrides)


def _run_job(
    config: RunConfig, run_dir: Path, overrides: list[str], *, quiet: bool = False
) -> dict[str, Any]:
    _resolve(config)
    if is_bench(config):
        from hydraspec.bench.run import run as run_in_lab
    else:
        from hydraspec.lab.run import run as run_in_lab

    summary: dict[str, Any] = run_in_lab(
        config, run_dir=run_dir, overrides=overrides, resolved=to_dict(config), quiet=quiet
    )
    return summary


@contextmanager
def _only_errors_logged() -> Iterator[None]:
    """The package's logger for a while without warnings: they are in the summary too."""
    logger = logging.getLogger("hydraspec")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _resolve(config: RunConfig) -> None:
    """Settle what checkpoints decide, so that the run folder records what runs."""
    _bind_threads(config)
    resolve(config)


def _bind_threads(config: RunConfig) -> None:
    if (config.engine.num_threads or 1) > 1:
        # Without it runs on several threads stall at times. It has to be set before torch loads
        # OpenMP; on one thread it would only pin every child process to the first core.
        os.environ.setdefault("OMP_PROC_BIND", "true")


def _compare(sweep_dir: Path) -> None:
    from hydraspec.report.compare import compare

    compare(sweep_dir)


def _hydra_main(job: Any) -> None:
    job.__module__ = __name__
    hydra.main(f"pkg://{CONFIG_MODULE}", CONFIG_NAME, version_base="1.3")(job)()


def _read_flags(argv: Sequence[str]) -> tuple[list[str], bool, bool]:
    """Overrides, whether -m is given, and whether anything is to run. Flags may stand anywhere."""
    parser = get_args_parser()
    if "--version" in argv:  # ours, not Hydra's
        (action,) = (action for action in parser._actions if action.dest == "version")
        vars(action)["version"] = f"hydraspec {version('hydraspec')}"
    args, unknown = parser.parse_known_intermixed_args(list(argv))
    flags = [flag for action in parser._actions for flag in action.option_strings]
    for flag in unknown:
        meant = nearest(flag, flags)
        raise ConfigurationError(
            f"{flag}: unknown flag\n  allowed: group=choice, key=value, and the flags of --help\n"
            f"  to do: {f'did you mean {meant}?' if meant else 'remove it'}"
        )
    _refuse_flags(args)
    rest = list(argv)
    for override in args.overrides:
        rest.remove(override)
    overrides = with_config_dir(args.config_dir, args.overrides)
    search_places(overrides)
    overrides = with_method(overrides)
    sys.argv[1:] = rest + overrides  # Hydra's own parser wants flags first
    shows = (args.help, args.hydra_help, args.cfg, args.info, args.shell_completion)
    return overrides, bool(args.multirun), not any(shows)


def _refuse_flags(args: Namespace) -> None:
    """What Hydra refuses of flags that do not go together."""
    if args.help or args.hydra_help:
        return
    asked = {
        "--run": args.run,
        "--multirun": args.multirun,
        "--cfg": args.cfg,
        "--info": args.info,
        "--shell-completion": args.shell_completion,
    }
    given = [flag for flag, value in asked.items() if value]
    if len(given) > 1:
        raise ConfigurationError(
            f"{' '.join(given)}: flags that exclude each other\n"
            f"  allowed: one of {', '.join(asked)}\n  to do: leave the others out"
        )
    if args.experimental_rerun:
        raise ConfigurationError(
            "--experimental-rerun: is not available: it would run what a pickle holds\n"
            "  allowed: group=choice, key=value, and the other flags of --help\n"
            "  to do: type again what the run folder's overrides.yaml lists"
        )
    if args.resolve and not args.cfg:
        raise ConfigurationError(
            "--resolve: a flag of --cfg\n  allowed: --cfg job --resolve\n  to do: add --cfg job"
        )


def _quoted(text: str) -> str:
    """As a quoted string of Hydra's grammar."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _complain(message: object, status: int) -> int:
    sys.stderr.write(f"hydraspec: {printable(str(message))}\n")
    return status
