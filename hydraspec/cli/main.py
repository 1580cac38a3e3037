"""The command line: from sys.argv to an exit status.

Exit status: 0 done; 2 wrong configuration; 3 unusable checkpoint or workload; 4 done, and the
outputs are not the target's; 130 interrupted; 1 anything else. What a run does is the lab's
business.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hydraspec.cli import launchers, report, sweep
from hydraspec.cli.complain import complain
from hydraspec.cli.compose import CONFIG_NAME, Job, Plan, plan
from hydraspec.cli.flags import only_shows, read_flags, show
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
from hydraspec.cli.hydra_keys import BASIC, LAUNCHER, launcher_of
from hydraspec.cli.jobs import bind_threads, hydra_settings, run_job
from hydraspec.cli.ranks import PROGRAM
from hydraspec.cli.translate import translate
from hydraspec.config.messages import refusal
from hydraspec.errors import CannotWriteError, ConfigurationError, UserError
from hydraspec.lab.outcome import (
    DIVERGED,
    INTERRUPTED,
    OK,
    Outcome,
    exit_status,
    last_line,
    outcome,
)
from hydraspec.parallel import torchrun
from hydraspec.signals import (
    ignore_interrupts,
    interrupts_stay_interrupts,
    output_may_be_cut,
    terminations_as_interrupts,
)

log = logging.getLogger(__name__)


def main() -> int:
    """Run the command line in sys.argv.

    Returns:
        The exit status. A user's mistake prints one message to stderr; an unexpected exception
        keeps its traceback. After an interrupt the process must end: further ones are ignored.
    """
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises instead of printing and exiting with 1
    try:
        torchrun.check_environment()
    except ConfigurationError as error:
        return complain(error, error.exit_code)
    if torchrun.is_follower():
        return torchrun.follow(PROGRAM)
    with output_may_be_cut(), terminations_as_interrupts(), torchrun.leading():
        try:
            with interrupts_stay_interrupts():
                args = read_flags(sys.argv[1:])
                if only_shows(args):
                    show(args)
                    return 0
                refuse_no_folder(args.overrides)
                name = args.config_name or CONFIG_NAME
                planned = plan(args.overrides, multirun=args.multirun, config_name=name)
                torchrun.check_size([job.config for job in planned.jobs])
            with _claimed_folder(planned, args.overrides):
                status = _run_jobs(planned)
        except UserError as error:
            status = complain(error, error.exit_code)
        except (HydraException, OmegaConfBaseException) as error:
            status = complain(translate(error), ConfigurationError.exit_code)
        except KeyboardInterrupt as interrupt:
            ignore_interrupts()
            said = f"interrupted: {str(interrupt) or 'nothing was finished'}"
            status = complain(said, INTERRUPTED)
        except CannotWriteError as error:
            status = complain(folder_message(error), 1)
        return torchrun.end(status)


@contextmanager
def _claimed_folder(planned: Plan, overrides: Sequence[str]) -> Iterator[None]:
    """The folder of a run or a sweep, made and kept from others for a while."""
    key = SWEEP_DIR if planned.is_sweep else RUN_DIR
    typed = is_typed(key, overrides)
    planned.move_to(planned.folder if typed else fresh(planned.folder))
    with claimed(planned.folder, key):
        try:
            if typed and planned.is_sweep:
                bind_threads(planned.jobs[0].config)
                sweep.check_folder(planned.folder, [job.config for job in planned.jobs])
            yield
        except OSError as error:
            if not is_of(planned.folder, error):
                raise
            raise UserError(folder_message(error)) from error


def _run_jobs(planned: Plan) -> int:
    """Run the jobs, here one after another unless a launcher does; a sweep ends with its
    comparison, whatever failed."""
    outcomes: list[Outcome] = []
    before = results(planned.folder)
    if planned.is_sweep:
        OmegaConf.save(planned.composed, planned.folder / "multirun.yaml")
    try:
        try:
            here = planned.jobs
            if launcher_of(planned.composed) != BASIC:
                outcomes, here = _run_by_launcher(planned)
            for job in here:
                name = "" if job.number is None else str(job.number)
                with interrupts_stay_interrupts(), hydra_settings(job):
                    try:
                        with _claimed_job(job, planned):
                            outcomes.append(outcome(run_job(job), name))
                    except UserError as error:
                        if not planned.is_sweep:
                            raise
                        # This job cannot run; the others may.
                        status = complain(error, error.exit_code)
                        outcomes.append(Outcome(status=status, job=name))
        finally:
            if planned.is_sweep and results(planned.folder):
                _compare(planned, whole=sys.exception() is None)
    except KeyboardInterrupt:
        if results(planned.folder) == before:
            raise
        raise KeyboardInterrupt("what was finished is saved") from None
    return _end(sorted(outcomes, key=lambda end: int(end.job or 0)))


def _run_by_launcher(planned: Plan) -> tuple[list[Outcome], list[Job]]:
    """Run a sweep's jobs by Hydra's launcher.

    Returns:
        How they ended, and the jobs whose results are to be taken over from a finished one.
    """
    if torchrun.num_ranks() > 1:
        raise refusal(
            LAUNCHER,
            launcher_of(planned.composed),
            "is not available under torchrun",
            allowed=BASIC,
            remedy="start the sweep without torchrun: each job starts its own ranks",
        )
    division = launchers.divide(planned)
    ended = launchers.launch(planned, division.launched)
    for each in ended.values():
        if each.said is not None:
            complain(each.said, each.outcome.status)
    outcomes, here = [each.outcome for each in ended.values()], list(division.here)
    for number, first in division.twins.items():
        if ended[first].outcome.status in (OK, DIVERGED):
            here.append(planned.jobs[number])
        else:
            outcomes.append(replace(ended[first].outcome, job=str(number)))
    return outcomes, here


@contextmanager
def _claimed_job(job: Job, planned: Plan) -> Iterator[None]:
    """A sweep's job announced, and its folder kept from other processes for a while."""
    if not planned.is_sweep:
        yield
        return
    log.info("job %s of %d: %s", job.number, len(planned.jobs), " ".join(job.overrides))
    sweep.note_idle_seed(job.config, [other.config.seed for other in planned.jobs])
    with claimed(job.folder, SWEEP_DIR):
        yield


def _end(outcomes: Sequence[Outcome]) -> int:
    status, said = exit_status(outcomes), last_line(outcomes)
    return status if said is None else complain(said, status)


def _compare(planned: Plan, *, whole: bool) -> None:
    """Compare a sweep's jobs; one that was cut short is resumed later, and only then closed."""
    report.compare(planned.folder)
    if whole:
        configs = [job.config for job in planned.jobs]
        report.close_sweep(configs, planned.folder, group=sweep.group_name(planned.folder))
