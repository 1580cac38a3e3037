"""A job of a sweep that a Hydra launcher started: in its own process, on its own devices.

The launcher's process composes nothing again: it takes what the launcher composed, waits for free
devices and starts this module as the job's process, which ends when the launcher's process does.
The job's output goes to output.log in its folder. A file in the sweep's folder asks all jobs to
end.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import configure_log
from omegaconf import DictConfig, OmegaConf

from hydraspec.cli import sweep
from hydraspec.cli.complain import tell
from hydraspec.cli.compose import Job
from hydraspec.cli.devices import VISIBLE, own_devices
from hydraspec.cli.folders import SWEEP_DIR, claimed, folder_message
from hydraspec.cli.jobs import run_job
from hydraspec.cli.overrides import search_places
from hydraspec.config import to_run_config
from hydraspec.config.engines import VLLM
from hydraspec.config.schema import Device, RunConfig
from hydraspec.errors import CannotWriteError, UserError
from hydraspec.lab.outcome import FAILED, INTERRUPTED, Outcome, outcome
from hydraspec.signals import ignore_interrupts, terminations_as_interrupts

STOP = ".stop"  # in the sweep's folder: jobs save what is finished, and end
OUTPUT = "output.log"  # in the job's folder
LOOK_EVERY_S = 0.5


@dataclass(slots=True, frozen=True, kw_only=True)
class Ended:
    """The end of a job, as it comes back to the command that started the sweep."""

    outcome: Outcome
    said: str | None = None  # the message of a job that could not run


@dataclass(slots=True, frozen=True, kw_only=True)
class Task:
    """Function that a launcher calls with each job's configuration: it runs the job in a process.

    Attributes:
        sweep: the sweep's folder.
        overrides: the overrides typed for each job, by its folder's name.
        names: the runs' names in W&B, by their folders' names.
        seeds: the seeds of all jobs.
        starter: the id of the process that started the sweep.
    """

    sweep: Path
    overrides: dict[str, list[str]]
    names: dict[str, str]
    seeds: list[int]
    starter: int = field(default_factory=os.getpid)

    def __call__(self, composed: DictConfig) -> Ended:
        if os.getpid() != self.starter:  # with joblib and n_jobs=1 this process is the starter
            # An interrupt from a terminal reaches every process; here only the stop file counts.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            if os.getppid() == self.starter:  # with joblib; Slurm's processes outlive the command
                _end_with(self.starter)
        hydra: Any = HydraConfig.get()
        folder = Path(hydra.runtime.output_dir)
        name = folder.relative_to(self.sweep).as_posix()
        search_places(self.overrides[name])
        config = to_run_config(composed)
        config.tracker.name = self.names[name]
        job = Job(
            config=config,
            overrides=self.overrides[name],
            folder=folder,
            sweep=self.sweep,
            composed=_logging(hydra),
        )
        stop = self.sweep / STOP
        try:
            with own_devices(num_devices(config), stop.exists) as devices:
                if stop.exists():
                    return Ended(outcome=Outcome(status=INTERRUPTED, job=name))
                on = f", on devices {', '.join(devices)}" if devices else ""
                tell(f"job {name} begins{on}: {' '.join(job.overrides)}")
                ended = _in_a_process(job, name, self.seeds, devices)
        except InterruptedError:
            return Ended(outcome=Outcome(status=INTERRUPTED, job=name))
        except (TimeoutError, OSError) as error:
            return Ended(outcome=Outcome(status=FAILED, job=name), said=f"job {name}: {error}")
        tell(f"job {name} ended with status {ended.outcome.status}")
        return ended


def _logging(hydra: Any) -> DictConfig:
    """The part of Hydra's configuration that the job's process needs; the launcher's part cannot be
    pickled."""
    wanted = OmegaConf.masked_copy(hydra, ["job_logging", "verbose"])
    plain = OmegaConf.to_container(wanted, resolve=True)
    return OmegaConf.create({"hydra": plain})


def num_devices(config: RunConfig) -> int:
    """Number of devices of this host that a job needs; 0 for a job with engine.device=cpu."""
    if config.engine.device is Device.cpu:
        return 0
    nodes = config.engine.vllm.nnodes if config.engine.name == VLLM else 1
    return config.parallelism.num_ranks // nodes


def _in_a_process(job: Job, name: str, seeds: list[int], devices: Sequence[str] | None) -> Ended:
    """Run the job in a new process, so that its devices are set before torch is imported, and that
    other jobs and this process go on even if the new one dies.
    """
    environment = dict(os.environ)
    if devices is not None:
        environment[VISIBLE] = ",".join(devices)
    job.folder.mkdir(parents=True, exist_ok=True)
    said, answer = os.pipe()
    try:
        with (job.folder / OUTPUT).open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "hydraspec.cli.launched", str(answer), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=environment,
                pass_fds=[answer],
                start_new_session=True,
            )
        os.close(answer)
        process.communicate(pickle.dumps((job, name, seeds)))
        with os.fdopen(said, closefd=False) as read:
            text = read.read()
    finally:
        os.close(said)
    if not text:
        how = f"of signal {-process.returncode}" if process.returncode < 0 else "without a word"
        where = job.folder / OUTPUT
        return Ended(
            outcome=Outcome(status=FAILED, job=name),
            said=f"job {name} died {how}: see {where}",
        )
    found = json.loads(text)
    return Ended(outcome=Outcome(**found["outcome"]), said=found["said"])


def main() -> None:
    """Run a job in this process; argv has the descriptor for the answer, and the parent's id."""
    answer, parent = map(int, sys.argv[1:])
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the parent ignores SIGINT
    job, name, seeds = pickle.load(sys.stdin.buffer)  # from the parent's memory, through a pipe
    with terminations_as_interrupts():
        stop = job.sweep / STOP
        _watch(
            lambda: stop.exists() or os.getppid() != parent,
            lambda: os.kill(os.getpid(), signal.SIGTERM),
        )
        ended = _run(job, name, seeds)
        ignore_interrupts()
    with suppress(BrokenPipeError), os.fdopen(answer, "w") as write:
        json.dump(asdict(ended), write)  # unread if the command is gone
    sys.exit(ended.outcome.status)


def _run(job: Job, name: str, seeds: list[int]) -> Ended:
    failed = Outcome(status=FAILED, job=name)
    try:
        configure_log(job.composed.hydra.job_logging, job.composed.hydra.verbose)
        sweep.note_idle_seed(job.config, seeds)
        with claimed(job.folder, SWEEP_DIR):
            return Ended(outcome=outcome(run_job(job), name))
    except UserError as error:
        return Ended(
            outcome=replace(failed, status=error.exit_code), said=_said(f"job {name}: {error}")
        )
    except CannotWriteError as error:
        return Ended(outcome=failed, said=_said(f"job {name}: {folder_message(error)}"))
    except KeyboardInterrupt:
        return Ended(outcome=replace(failed, status=INTERRUPTED))
    except Exception as error:
        import traceback

        traceback.print_exc()
        last = "".join(traceback.format_exception_only(error)).strip()
        return Ended(outcome=failed, said=f"job {name}: {last}: see {job.folder / OUTPUT}")


def _said(text: str) -> str:
    """Write a message to the job's output too, and return it."""
    tell(text)
    return text


def _watch(is_over: Callable[[], bool], end: Callable[[], None]) -> None:
    """Start a thread that calls `end` once `is_over` returns true."""

    def look() -> None:
        while not is_over():
            time.sleep(LOOK_EVERY_S)
        end()

    threading.Thread(target=look, daemon=True, name="watch").start()


@cache
def _end_with(starter: int) -> None:
    """End this process once `starter`, its parent, is gone; the job's process then saves what is
    finished, and ends too."""
    _watch(lambda: os.getppid() != starter, lambda: os._exit(1))


def as_ended(value: Any, name: str) -> Ended:
    """The end of job `name`, from what a launcher returned for it, which may be an exception."""
    if isinstance(value, Ended):
        return value
    return Ended(outcome=Outcome(status=FAILED, job=name), said=f"job {name}: {value}")


if __name__ == "__main__":
    main()
