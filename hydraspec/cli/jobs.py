"""Running planned jobs: in their folders, with the log and the environment that Hydra's keys say.

Nothing is composed here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import chdir, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from hydra.core.utils import configure_log, env_override
from omegaconf import DictConfig, OmegaConf, open_dict

from hydraspec.cli import ranks, report, sweep
from hydraspec.cli.compose import Job, Plan
from hydraspec.cli.folders import RUN_DIR, SWEEP_DIR, claimed, fresh
from hydraspec.cli.rank_job import runner
from hydraspec.cli.ranks import needs_ranks
from hydraspec.config import RunConfig
from hydraspec.config.benches import is_bench
from hydraspec.lab.resolution import check_folders, resolve


@contextmanager
def claimed_folder(planned: Plan) -> Iterator[None]:
    """Context that creates the folder of a plan, a new one unless its name was typed, and keeps it
    locked."""
    planned.move_to(planned.folder if planned.is_named else fresh(planned.folder))
    with claimed(planned.folder, SWEEP_DIR if planned.is_sweep else RUN_DIR):
        yield


@contextmanager
def ready(job: Job) -> Iterator[Path]:
    """Context that applies Hydra's keys and resolves the configuration, for a command that loads
    models as a run does; yields the job's folder, absolute."""
    with hydra_settings(job):
        bind_threads(job.config)
        resolve(job.config)
        check_folders(job.config)
        yield job.folder.absolute()


def run_job(job: Job, *, quiet: bool = False, logs: bool = True) -> dict[str, Any]:
    """Run a job, or take over the results of a finished equal job of its sweep.

    Args:
        logs: whether ranks configure their log as Hydra's keys say.

    Returns:
        The summary, which is also in the job's folder.

    Raises:
        UserError: configuration, checkpoint or workload cannot be used.
        KeyboardInterrupt: after the finished requests were saved.
    """
    bind_threads(job.config)
    resolve(job.config)  # so that the folder records what runs
    if job.sweep is not None:
        job.config.tracker.group = job.config.tracker.group or sweep.group_name(job.sweep)
        finished = sweep.find_finished(job.sweep, job.config)
        if finished is not None:
            return sweep.take_over(finished, job.folder, job.overrides)
    if not (is_bench(job.config) and job.config.bench.isolate):  # each process checks its own
        check_folders(job.config)
    if needs_ranks(job.config):
        summary = ranks.run(job, quiet=quiet, logs=logs)
    else:
        run_here = runner(job.config)
        summary = run_here(job.config, run_dir=job.folder, overrides=job.overrides, quiet=quiet)
    if job.sweep is None:
        report.close_run(job.config, job.folder, quiet=quiet)
    return summary


@contextmanager
def hydra_settings(job: Job) -> Iterator[None]:
    """Context that makes the job's folder and applies hydra.job.chdir, hydra.job.env_set,
    hydra/job_logging, hydra.verbose and hydra.output_subdir; logging stays as it is set."""
    hydra = job.composed.hydra
    job.folder.mkdir(parents=True, exist_ok=True)
    with open_dict(hydra.runtime):
        hydra.runtime.output_dir = str(job.folder)
    with chdir(job.folder) if hydra.job.chdir else nullcontext():
        configure_log(hydra.job_logging, hydra.verbose)
        if hydra.output_subdir is not None:
            _save_composed(job, hydra)
        with env_override(hydra.job.env_set):
            yield


def _save_composed(job: Job, hydra: DictConfig) -> None:
    folder = job.folder / hydra.output_subdir
    folder.mkdir(parents=True, exist_ok=True)
    ours = [str(key) for key in job.composed if key != "hydra"]
    OmegaConf.save(OmegaConf.masked_copy(job.composed, ours), folder / "config.yaml")
    OmegaConf.save(OmegaConf.masked_copy(job.composed, ["hydra"]), folder / "hydra.yaml")
    OmegaConf.save(job.overrides, folder / "overrides.yaml")


def bind_threads(config: RunConfig) -> None:
    """Set how OpenMP binds threads to cores; call this before torch loads OpenMP."""
    if (config.engine.num_threads or 1) > 1:
        # Without it runs on several threads stall at times; on one thread it would only pin every
        # child process to the first core.
        os.environ.setdefault("OMP_PROC_BIND", "true")
