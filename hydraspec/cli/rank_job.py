"""Jobs for several ranks, and running a job in this process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from hydra.core.utils import configure_log
from omegaconf import OmegaConf

from hydraspec.cli.compose import Job
from hydraspec.config import RunConfig
from hydraspec.config.benches import is_bench
from hydraspec.parallel.job import RankJob


def rank_job(job: Job, *, quiet: bool, logs: bool) -> RankJob:
    """The job in the form in which ranks get it; `logs`: whether ranks configure their log."""
    hydra, verbose = job.composed.hydra, job.composed.hydra.verbose
    logging = OmegaConf.to_container(hydra.job_logging, resolve=True) if logs else None
    assert logging is None or isinstance(logging, dict)
    return RankJob(
        config=job.config,
        folder=job.folder,
        overrides=job.overrides,
        quiet=quiet,
        logging=logging,  # type: ignore[arg-type]  # its keys are strings
        verbose=list(verbose) if OmegaConf.is_list(verbose) else verbose,
    )


def run_here(job: RankJob) -> dict[str, Any]:
    """Run a job in this process; returns its summary."""
    run = runner(job.config)
    return run(job.config, run_dir=job.folder, overrides=job.overrides, quiet=job.quiet)


def logged(job: RankJob) -> AbstractContextManager[None]:
    """Configure the log of a rank; returns a context in which a quiet job logs only errors."""
    if job.logging is not None:
        configure_log(OmegaConf.create(job.logging), job.verbose)
    return errors_alone_logged() if job.quiet else nullcontext()


def runner(config: RunConfig) -> Callable[..., dict[str, Any]]:
    """The function that runs a resolved configuration, a run or a benchmark, in this process."""
    if is_bench(config):
        from hydraspec.bench.run import run
    else:
        from hydraspec.lab.run import run

    return run


@contextmanager
def errors_alone_logged() -> Iterator[None]:
    """Context in which the package logs only errors: the summary has the warnings too."""
    logger = logging.getLogger("hydraspec")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
