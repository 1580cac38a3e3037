"""Calls from Python: implementations of `hydraspec.run` and `hydraspec.build_engine`, and plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from hydraspec import factory
from hydraspec.cli.complain import complain
from hydraspec.cli.compose import Plan, plan
from hydraspec.cli.jobs import bind_threads, claimed_folder, run_job
from hydraspec.cli.overrides import with_config_dir
from hydraspec.cli.rank_job import errors_alone_logged
from hydraspec.cli.ranks import needs_ranks
from hydraspec.errors import ConfigurationError
from hydraspec.lab.outcome import exit_status, last_line, outcome
from hydraspec.lab.resolution import check_folders, resolve
from hydraspec.parallel import torchrun
from hydraspec.signals import output_may_be_cut

if TYPE_CHECKING:
    from hydraspec.engine.base import Engine


def run(
    overrides: Sequence[str] = (), *, config_dir: str | None = None, quiet: bool = False
) -> dict[str, Any]:
    """Implementation of `hydraspec.run`, which documents arguments and result."""
    planned = planned_call("run", overrides, config_dir)
    printing = errors_alone_logged() if quiet else output_may_be_cut()
    with printing, claimed_folder(planned):
        (job,) = planned.jobs
        summary = run_job(job, quiet=quiet, logs=False)
        ended = [outcome(summary)]
        if not quiet and (said := last_line(ended)):
            complain(said, exit_status(ended))
    return {**summary, "run_dir": str(job.folder)}


def build_engine(overrides: Sequence[str] = (), *, config_dir: str | None = None) -> Engine:
    """Implementation of `hydraspec.build_engine`, which documents arguments and result."""
    (job,) = planned_call("build_engine", overrides, config_dir).jobs
    if needs_ranks(job.config):
        raise ConfigurationError(
            "hydraspec.build_engine: several devices have a process each, which one call cannot "
            "be\n  allowed: parallelism=single\n  to do: call hydraspec.run, or leave the key out"
        )
    bind_threads(job.config)
    resolve(job.config)
    check_folders(job.config)
    from hydraspec.cli.own_engine import OwnEngine  # imports torch

    return cast("Engine", OwnEngine(factory.build_engine(job.config)))


def planned_call(name: str, overrides: Sequence[str], config_dir: str | None = None) -> Plan:
    """The plan, with one job, of a call of the function `name`.

    Raises:
        ConfigurationError: overrides are no list of strings, ask for a sweep, or cannot work.
    """
    is_list = isinstance(overrides, Sequence) and not isinstance(overrides, str)
    if not is_list or not all(isinstance(typed, str) for typed in overrides):
        raise ConfigurationError(
            f"{name}({overrides!r}): cannot be read\n  allowed: a list of strings, each as typed\n"
            f'  to do: write {name}(["method=none", "seed=1"])'
        )
    torchrun.refuse_calls()
    overrides = with_config_dir(config_dir, overrides)
    planned = plan(overrides)
    if planned.is_sweep:
        raise ConfigurationError(
            f"{' '.join(overrides)}: asks for a sweep\n"
            f"  allowed: one run\n  to do: call {name} for each combination, or use hydraspec -m"
        )
    return planned
