"""Jobs that run as several ranks, which this process or torchrun starts.

A job travels to its ranks through their store, composed and resolved; the first rank runs it, and
its summary or its error travels back the same way.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydraspec import factory
from hydraspec.cli.complain import tell
from hydraspec.cli.compose import Job
from hydraspec.cli.rank_job import errors_alone_logged, logged, rank_job, run_here
from hydraspec.config import RunConfig
from hydraspec.config.benches import is_bench
from hydraspec.config.engines import runs_over_ranks
from hydraspec.errors import (
    CannotWriteError,
    CheckpointError,
    ConfigurationError,
    UserError,
    WorkloadError,
)
from hydraspec.metrics.run_files import RANKS, SUMMARY, UNSAVED, read_result, written_since
from hydraspec.parallel import torchrun
from hydraspec.parallel.faults import Fault, Kind, LostRankError
from hydraspec.parallel.job import Program, RankJob
from hydraspec.parallel.launch import run_ranks

MISTAKES = (ConfigurationError, CheckpointError, WorkloadError)
log = logging.getLogger(__name__)
WORKER = [sys.executable, "-m", "hydraspec.cli.rank"]


def needs_ranks(config: RunConfig) -> bool:
    """Returns whether a job runs as several ranks that HydraSpec starts. With bench.isolate each
    process of a benchmark starts its own ranks; vLLM starts its own processes."""
    return runs_over_ranks(config) and not (is_bench(config) and config.bench.isolate)


def run(job: Job, *, quiet: bool, logs: bool) -> dict[str, Any]:
    """Run a resolved job as ranks of this host, or with the ranks of torchrun; returns its summary.

    Args:
        logs: whether ranks configure their log as hydra.job_logging says.

    Raises:
        UserError: a rank reported a user's mistake.
        CannotWriteError: the first rank could not write a file.
        LostRankError: a rank failed, was killed or stood still; what was finished is saved.
        KeyboardInterrupt: after the finished requests were saved.
    """
    config = job.config
    folder, started = job.folder.absolute(), time.time()
    told = rank_job(job, quiet=quiet, logs=logs)
    if torchrun.num_ranks():
        return torchrun.run(told, PROGRAM)
    outnumbered = config.parallelism.num_ranks > _num_cores()
    if outnumbered:  # the check would wait for so many processes to start
        factory.check_split(config)
        if not quiet and factory.device_type(config) == "cpu":
            log.warning(_crowded(config))
    ended = run_ranks(
        WORKER,
        config.parallelism.num_ranks,
        job=told.to_text(),
        logs=folder / RANKS,
        timeout_s=config.parallelism.timeout_s,
        environment=_environment(config),
        meanwhile=lambda: None if outnumbered else factory.check_split(config),
    )
    _remove_empty(folder / RANKS)
    result = None if ended.result is None else json.loads(ended.result)
    fault = ended.fault
    if fault is not None and fault.kind is not Kind.mistake and result is None:
        save_for_first(told, fault, started)
    if ended.interrupted:
        raise KeyboardInterrupt
    if result is not None and "cannot_write" in result:  # its message says more than the fault
        raise CannotWriteError(*result["cannot_write"])
    if fault is not None and fault.kind is not Kind.mistake:
        raise what_happened(told, fault, started)
    if result is None:
        assert fault is not None, "the first rank ends with a result or a fault"
        raise _mistake(fault.exit_code, fault.why)
    return _summary(result)


def _num_cores() -> int:
    return os.cpu_count() or 1


def _crowded(config: RunConfig) -> str:
    """The warning of more ranks on CPUs than cores."""
    axis, size = config.parallelism.largest_axis
    return (
        f"{axis}={size}: {config.parallelism.num_ranks} ranks share {_num_cores()} CPU cores: they "
        "start slowly, and run slower than as many ranks as there are cores"
    )


def _environment(config: RunConfig) -> dict[str, str]:
    """The environment of ranks: this process's, with CPU threads divided among the ranks, as
    OpenMP would use all cores in each."""
    environment = dict(os.environ)
    share = max(1, _num_cores() // config.parallelism.num_ranks)
    environment.setdefault("OMP_NUM_THREADS", str(config.engine.num_threads or share))
    environment["OMP_PROC_BIND"] = "false"  # it would bind every rank to the same cores
    return environment


def _summary(result: Mapping[str, Any]) -> dict[str, Any]:
    if "mistake" in result:
        raise _mistake(**result["mistake"])
    summary: dict[str, Any] = result["summary"]
    return summary


def _mistake(exit_code: int, text: str, name: str = "", **fields: str | None) -> UserError:
    """The UserError that a rank reported, of the class `name`, else of one with its exit status."""
    known = {kind.__name__: kind for kind in MISTAKES}
    by_status = {2: ConfigurationError, 3: CheckpointError}
    return known.get(name, by_status.get(exit_code, UserError))(text, **fields)


def save_for_first(job: RankJob, fault: Fault, started: float) -> None:
    """Save the requests that the first rank had finished, if it had begun to decode: its process
    has ended, whichever rank failed first. `started`: time.time() before the run."""
    folder = job.folder.absolute()
    if not written_since(folder / UNSAVED, started):
        return  # without the import of torch
    from hydraspec.lab.lost import save_finished

    save_finished(
        job.config,
        run_dir=folder,
        overrides=job.overrides,
        error=LostRankError(str(fault)),
        since_s=started,
        quiet=job.quiet,
    )


def what_happened(job: RankJob, fault: Fault, started: float) -> LostRankError:
    """The error of a run that lost a rank; `started`: time.time() before the run."""
    folder = job.folder.absolute()
    lines = [f"{fault}\n  so the run has ended"]
    summary, kept = (written_since(folder / name, started) for name in (SUMMARY, UNSAVED))
    if summary and read_result(folder).get("num_requests") == 0:
        lines.append(f"  saved: that no request was finished, in {folder}")
    elif summary:
        lines.append(f"  saved: the requests that were finished, in {folder}")
    elif kept or fault.rank == 0:
        lines.append(f"  saved: only what rank 0 had written by then, in {folder}")
    else:
        lines.append("  saved: nothing, as the run had not begun to decode")
    log = folder / RANKS / f"rank{fault.rank}.log"
    look = f"look into {log}, " if log.is_file() else ""
    lines.append(f"  to do: {look}mend what it names, and start the run again")
    return LostRankError("\n".join(lines))


def _remove_empty(logs: Path) -> None:
    """Remove empty logs of ranks, and their folder if no log is left."""
    for log in logs.glob("rank*.log"):
        if not log.stat().st_size:
            log.unlink()
    with suppress(OSError):
        logs.rmdir()


PROGRAM = Program(
    run=run_here,
    logged=logged,
    quietly=errors_alone_logged,
    save=save_for_first,
    lost=what_happened,
    tell=tell,
)
