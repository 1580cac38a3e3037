"""What `hydraspec.run` and `hydraspec.build_engine` do: one job of overrides, without a command
line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydraspec import factory
from hydraspec.cli.complain import complain
from hydraspec.cli.compose import Job, plan
from hydraspec.cli.folders import RUN_DIR, claimed, fresh, is_typed, refuse_no_folder
from hydraspec.cli.jobs import bind_threads, run_job
from hydraspec.cli.overrides import with_config_dir
from hydraspec.cli.rank_job import errors_alone_logged
from hydraspec.cli.ranks import needs_ranks
from hydraspec.engine.base import Engine
from hydraspec.errors import ConfigurationError
from hydraspec.lab.outcome import exit_status, last_line, outcome
from hydraspec.lab.resolution import resolve
from hydraspec.parallel import torchrun
from hydraspec.signals import output_may_be_cut


def run(
    overrides: Sequence[str] = (), *, config_dir: str | None = None, quiet: bool = False
) -> dict[str, Any]:
    """One run from Python, with the overrides one would type; see `hydraspec.run`."""
    job = _planned("run", overrides, config_dir)
    if not is_typed(RUN_DIR, overrides):
        job.folder = fresh(job.folder)
    printing = errors_alone_logged() if quiet else output_may_be_cut()
    with printing, claimed(job.folder, RUN_DIR):
        summary = run_job(job, quiet=quiet, logs=False)
        ended = [outcome(summary)]
        if not quiet and (said := last_line(ended)):
            complain(said, exit_status(ended))
    return {**summary, "run_dir": str(job.folder.absolute())}


def build_engine(overrides: Sequence[str] = (), *, config_dir: str | None = None) -> Engine:
    """See `hydraspec.build_engine`."""
    job = _planned("build_engine", overrides, config_dir)
    if needs_ranks(job.config):
        raise ConfigurationError(
            "hydraspec.build_engine: several devices have a process each, which one call cannot "
            "be\n  allowed: parallelism=single\n  to do: call hydraspec.run, or leave the key out"
        )
    bind_threads(job.config)
    resolve(job.config)
    return factory.build_engine(job.config)


def _planned(name: str, overrides: Sequence[str], config_dir: str | None) -> Job:
    """The one job of a call of this name."""
    is_list = isinstance(overrides, Sequence) and not isinstance(overrides, str)
    if not is_list or not all(isinstance(typed, str) for typed in overrides):
        raise ConfigurationError(
            f"{name}({overrides!r}): cannot be read\n  allowed: a list of strings, each as typed\n"
            f'  to do: write {name}(["method=none", "seed=1"])'
        )
    torchrun.refuse_calls()
    refuse_no_folder(overrides)
    overrides = with_config_dir(config_dir, overrides)
    planned = plan(overrides)
    if planned.is_sweep:
        raise ConfigurationError(
            f"{' '.join(overrides)}: asks for a sweep\n"
            f"  allowed: one run\n  to do: call {name} for each combination, or use hydraspec -m"
        )
    (job,) = planned.jobs
    return job
