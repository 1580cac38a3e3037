"""Sweeps by Hydra's launchers: jobs side by side on this host (joblib, submitit_local), or through
Slurm (submitit_slurm).

Jobs that are finished, or that equal an earlier one of the sweep, are not handed to the launcher.
The launcher composes each job once; see launched.py for what then runs.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import initialize_config_module
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict

from hydraspec.cli import sweep
from hydraspec.cli.complain import tell
from hydraspec.cli.compose import CONFIG_MODULE, Job, Plan
from hydraspec.cli.launched import STOP, Ended, Task, as_ended
from hydraspec.errors import UserError
from hydraspec.lab.outcome import FAILED, Outcome, outcome
from hydraspec.lab.resolution import resolve
from hydraspec.metrics.run_files import read_result
from hydraspec.signals import on_interrupts


@dataclass(slots=True, frozen=True, kw_only=True)
class Division:
    """The jobs of a sweep.

    Attributes:
        launched: jobs that have to run.
        here: jobs with earlier results, which this process takes over afterwards.
        twins: number of each job that equals a launched one -> number of the launched one.
    """

    launched: list[Job]
    here: list[Job]
    twins: dict[int, int]


def divide(planned: Plan) -> Division:
    """Divide the jobs of a sweep into those to launch, those with results, and equal ones."""
    launched: list[Job] = []
    here: list[Job] = []
    twins: dict[int, int] = {}
    first: dict[str, int] = {}
    for job in planned.jobs:
        number = job.number or 0
        config = copy.deepcopy(job.config)
        try:
            resolve(config)
        except UserError:  # the job reports it when it runs
            launched.append(job)
            continue
        if sweep.find_finished(planned.folder, config) is not None:
            here.append(job)
            continue
        key = json.dumps(sweep.identity(config), sort_keys=True, default=str)
        if key in first:
            twins[number] = first[key]
        else:
            first[key] = number
            launched.append(job)
    return Division(launched=launched, here=here, twins=twins)


def launch(planned: Plan, jobs: Sequence[Job]) -> dict[int, Ended]:
    """Run jobs by the sweep's launcher until all have ended; returns their ends by job number.

    Raises:
        KeyboardInterrupt: at an interrupt, after the jobs that ran have saved what was finished; at
            a second interrupt at once.
    """
    if not jobs:
        return {}
    folder = planned.folder.absolute()
    stop = folder / STOP
    names = {job.number or 0: job.folder.relative_to(folder).as_posix() for job in jobs}
    task = Task(
        sweep=folder,
        overrides={names[job.number or 0]: job.overrides for job in jobs},
        names={names[job.number or 0]: job.config.tracker.name for job in jobs},
        seeds=[job.config.seed for job in planned.jobs],
    )
    with _stopping(stop):
        returned = _launch(planned.composed, folder, task, jobs, list(names.values()))
        if stop.exists():
            raise KeyboardInterrupt
    return dict(zip(names, returned, strict=True))


def _launch(
    composed: DictConfig, folder: Path, task: Task, jobs: Sequence[Job], names: Sequence[str]
) -> list[Ended]:
    """Run jobs by Hydra's launcher, in folders of these names in `folder`, the sweep's; returns how
    each job ended, in order."""
    config = copy.deepcopy(composed)
    OmegaConf.copy_cache(from_config=composed, to_config=config)
    with open_dict(config):
        config.hydra.sweep.dir = str(folder)
        config.hydra.overrides.hydra = [
            line for line in config.hydra.overrides.hydra if not _is_folder(line)
        ] + [f"hydra.sweep.dir={_quoted(str(folder))}"]
    lines = [
        [*job.composed.hydra.overrides.task, f"hydra.sweep.subdir={_quoted(name)}"]
        for job, name in zip(jobs, names, strict=True)
    ]
    with initialize_config_module(CONFIG_MODULE, version_base="1.3"):
        context = HydraContext(
            config_loader=GlobalHydra.instance().config_loader(), callbacks=Callbacks()
        )
        launcher = Plugins.instance().instantiate_launcher(
            hydra_context=context, task_function=task, config=config
        )
        try:
            returns = launcher.launch(lines, initial_job_idx=0)
        except Exception as error:  # one of its processes died; what the others did is in their
            # folders, and a second command takes it over
            text = f"the launcher failed ({type(error).__name__}: {error})"
            return [_lost(folder / name, name, text) for name in names]
    return [as_ended(_value(found), name) for found, name in zip(returns, names, strict=True)]


def _value(found: JobReturn) -> Any:
    return found._return_value if found.status is JobStatus.FAILED else found.return_value


def _lost(folder: Path, name: str, text: str) -> Ended:
    """The end of a job for which the launcher returned nothing: from its result, or a failure."""
    if found := read_result(folder):
        return Ended(outcome=outcome(found, name))
    return Ended(outcome=Outcome(status=FAILED, job=name), said=f"job {name}: {text}")


def _is_folder(line: str) -> bool:
    return line.lstrip("+").partition("=")[0] in ("hydra.sweep.dir", "hydra.sweep.subdir")


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


@contextmanager
def _stopping(stop: Path) -> Iterator[None]:
    """Context in which a first interrupt creates the file `stop`, which asks all jobs to end, and a
    second interrupt is raised."""
    stop.unlink(missing_ok=True)

    def ask() -> None:
        if stop.exists():
            raise KeyboardInterrupt
        stop.touch()
        tell("interrupted: jobs save what is finished, and end; once more ends this at once")

    with on_interrupts(ask):
        try:
            yield
        finally:
            stop.unlink(missing_ok=True)
