"""A run or a sweep: the jobs of a command line, one after another, and how they end."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from omegaconf import OmegaConf

from hydraspec.cli import launchers, report, sweep
from hydraspec.cli.complain import complain, errors_told
from hydraspec.cli.compose import Job, Plan, plan
from hydraspec.cli.flags import only_shows, read_flags, show
from hydraspec.cli.folders import SWEEP_DIR, claimed, folder_message, is_of, results
from hydraspec.cli.hydra_keys import BASIC, LAUNCHER, launcher_of
from hydraspec.cli.jobs import bind_threads, claimed_folder, hydra_settings, run_job
from hydraspec.cli.ranks import PROGRAM
from hydraspec.config.messages import refusal
from hydraspec.errors import UserError
from hydraspec.lab.outcome import DIVERGED, OK, Outcome, exit_status, last_line, outcome
from hydraspec.lab.resolution import check_formats
from hydraspec.parallel import torchrun
from hydraspec.signals import interrupts_stay_interrupts

log = logging.getLogger(__name__)


def run(argv: Sequence[str]) -> int:
    """Run a command line, or take part in it as a further rank of torchrun; returns the exit
    status."""
    torchrun.check_environment()
    if torchrun.is_follower():
        return torchrun.follow(PROGRAM)
    with torchrun.leading():
        with errors_told() as ending:
            args = read_flags(argv)
            if only_shows(args):
                show(args)
                return 0
            planned = plan(args.overrides, multirun=args.multirun, config_name=args.config_name)
            torchrun.check_size([job.config for job in planned.jobs])
            check_formats(job.config for job in planned.jobs)
            with _checked_folder(planned):
                ending.status = _run_jobs(planned)
        return torchrun.end(ending.status)


@contextmanager
def _checked_folder(planned: Plan) -> Iterator[None]:
    """Context that claims the folder of a run or sweep; raises errors of its files as UserError."""
    with claimed_folder(planned):
        try:
            if planned.is_named and planned.is_sweep:
                bind_threads(planned.jobs[0].config)
                sweep.check_folder(planned.folder, {j.number: j.config for j in planned.jobs})
            yield
        except OSError as error:
            if not is_of(planned.folder, error):
                raise
            raise UserError(folder_message(error)) from error


def _run_jobs(planned: Plan) -> int:
    """Run the jobs one after another, or by a launcher; a sweep ends with its comparison, whatever
    failed. Returns the exit status."""
    outcomes: list[Outcome] = []
    failed: dict[str, str] = {}  # message -> the first job that ended with it
    before = results(planned.folder)
    if planned.is_sweep:
        OmegaConf.save(planned.composed, planned.folder / "multirun.yaml")
        sweep.record_skipped(planned.folder, planned.skipped)
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
                        first = failed.setdefault(str(error), name)
                        message = error if first == name else f"job {name} fails as job {first}"
                        status = complain(message, error.exit_code)
                        outcomes.append(Outcome(status=status, job=name))
        finally:
            if planned.is_sweep and results(planned.folder):
                report.compare(planned.folder)
                if sys.exception() is None:  # a sweep that was cut short is closed once resumed
                    configs = [job.config for job in planned.jobs]
                    group = sweep.group_name(planned.folder)
                    report.close_sweep(configs, planned.folder, group=group)
    except KeyboardInterrupt:
        if results(planned.folder) == before:
            raise
        raise KeyboardInterrupt("what was finished is saved") from None
    outcomes.sort(key=lambda end: int(end.job or 0))
    status, said = exit_status(outcomes), last_line(outcomes)
    return status if said is None else complain(said, status)


def _run_by_launcher(planned: Plan) -> tuple[list[Outcome], list[Job]]:
    """Run a sweep's jobs by Hydra's launcher.

    Returns:
        The ends of jobs, and the jobs whose results are to be taken over from a finished one.
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
    jobs = {job.number: job for job in planned.jobs}
    for number, first in division.twins.items():
        if ended[first].outcome.status in (OK, DIVERGED):
            here.append(jobs[number])
        else:
            outcomes.append(replace(ended[first].outcome, job=str(number)))
    return outcomes, here


@contextmanager
def _claimed_job(job: Job, planned: Plan) -> Iterator[None]:
    """Context that announces a job of a sweep, and locks its folder against other processes."""
    if not planned.is_sweep:
        yield
        return
    total = len(planned.jobs) + len(planned.skipped)
    log.info("job %s of %d: %s", job.number, total, " ".join(job.overrides))
    sweep.note_idle_seed(job.config, [other.config.seed for other in planned.jobs])
    with claimed(job.folder, SWEEP_DIR):
        yield
