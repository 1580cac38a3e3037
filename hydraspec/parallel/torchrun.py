"""This process as a rank. Of the ranks that torchrun started the first runs the command line, and
the others take part in its jobs by `follow`, as those do that parallel/launch.py started.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, Any

from hydraspec import factory
from hydraspec.config import RunConfig
from hydraspec.config.benches import is_bench
from hydraspec.config.engines import NATIVE
from hydraspec.config.messages import refusal
from hydraspec.errors import ConfigurationError, UserError
from hydraspec.parallel.faults import Fault, Kind, LostRankError, culprit
from hydraspec.parallel.job import Program, RankJob
from hydraspec.parallel.launch import PARENT
from hydraspec.parallel.watch import LOOK_EVERY_S
from hydraspec.signals import ignore_interrupts, interrupts_end_process, leave

if TYPE_CHECKING:
    from hydraspec.parallel.fleet import Fleet
    from hydraspec.parallel.ranks import Ranks

TO_SAVE_S = 10.0  # for the first rank, once this one has failed
SPEAKS_FOR_FIRST = 1  # the rank that reports the loss of the first one
REMEDY = (
    "start ranks by torchrun, which sets it, or unset RANK and WORLD_SIZE for a run of one command"
)
MAX_PORT = 65535


def num_ranks(environment: Mapping[str, str] = os.environ) -> int:
    """Number of ranks that torchrun started; 0 where this process is none of them: a run of one
    process, or a rank that hydraspec itself started.

    Raises:
        ConfigurationError: WORLD_SIZE is no whole number from 1.
    """
    if PARENT in environment or not {"RANK", "WORLD_SIZE"} <= environment.keys():
        return 0
    return _number(environment, "WORLD_SIZE", 1, None)


def check_environment(environment: Mapping[str, str] = os.environ) -> None:
    """Refuse values that name no rank, or no place where ranks meet.

    Raises:
        ConfigurationError: for the first such variable.
    """
    size = num_ranks(environment)
    if size:
        _number(environment, "RANK", 0, size - 1)
    if size < 2:
        return
    if "LOCAL_RANK" in environment:
        _number(environment, "LOCAL_RANK", 0, size - 1)
    if not environment.get("MASTER_ADDR"):
        raise _refusal(environment, "MASTER_ADDR", "names no host", "the address of rank 0's host")
    _number(environment, "MASTER_PORT", 1, MAX_PORT)


def is_follower() -> bool:
    """Returns whether this process is a rank of torchrun other than the first."""
    return num_ranks() > 1 and int(os.environ["RANK"]) > 0


def check_size(jobs: Sequence[RunConfig]) -> None:
    """Refuse jobs that the ranks of torchrun cannot run: for another number of ranks, another
    engine, or with processes to start.

    Raises:
        ConfigurationError: for the first such job.
    """
    started = num_ranks()
    for config in jobs:
        axes = config.parallelism
        if started and config.engine.name != NATIVE and started > 1:
            raise refusal(
                "engine.name",
                config.engine.name,
                f"is one process, and torchrun started {started} (WORLD_SIZE)",
                allowed=NATIVE,
                remedy="start it without torchrun",
            )
        if started and config.engine.name == NATIVE and axes.num_ranks != started:
            raise refusal(
                *axes.largest_axis,
                f"makes {axes.num_ranks} ranks, and torchrun started {started} (WORLD_SIZE)",
                allowed=f"parallelism.tensor x parallelism.pipeline x parallelism.data = {started}",
                remedy=f"choose so, start {axes.num_ranks} ranks (--nnodes x --nproc-per-node), or "
                "leave torchrun out: ranks of one host are then started here",
            )
        if started > 1 and is_bench(config) and config.bench.isolate:
            raise refusal(
                "bench.isolate",
                True,
                "starts processes of its own, and torchrun has started the ranks",
                allowed="false",
                remedy="add bench.isolate=false, with one engine and one method",
            )


def refuse_calls() -> None:
    """Refuse `hydraspec.run` in ranks of torchrun: all would call it, and one has the summary."""
    if num_ranks() > 1:
        raise ConfigurationError(
            f"hydraspec.run: was called by each of {num_ranks()} ranks of torchrun\n"
            "  allowed: a call from one process, which starts its ranks\n"
            "  to do: start the script without torchrun, or run torchrun -m hydraspec"
        )


@contextmanager
def leading() -> Iterator[None]:
    """Context of the first rank's command: on exit it ends the other ranks too."""
    try:
        yield
    except Exception:
        if not _has_failed():
            raise
        traceback.print_exc()
        end(1)
    finally:
        if num_ranks() > 1:
            with suppress(LostRankError):  # they did not meet
                met().end()


def end(status: int) -> int:
    """Returns the first rank's exit `status`. If a rank has failed this process ends here, with
    that status: taking groups down could wait for a lost rank."""
    if _has_failed():
        ignore_interrupts()
        met().end()
        met().kill_hung()
        leave(status)
    return status


def _has_failed() -> bool:
    try:
        return num_ranks() > 1 and met().watch.failed
    except LostRankError:
        return False  # there is nothing to take down


def run(job: RankJob, program: Program) -> dict[str, Any]:
    """Run, on the first rank, a resolved job with the others, and return its summary.

    Raises:
        LostRankError: another rank failed, was killed or stood still.
        Exception: raised by the job.
    """
    fleet, started = met(), time.time()
    if fleet.watch.failed:
        raise LostRankError(
            "the ranks ended with an earlier job\n"
            "  to do: start the sweep again in its folder: finished jobs are not run twice"
        )
    factory.check_split(job.config)
    fleet.announce(job.to_text())
    ended: BaseException
    try:
        with joined(fleet, job):
            return program.run(job)
    except KeyboardInterrupt as error:
        ended = error
    except Exception as error:
        fleet.watch.record(error)
        ended = error
    # Not in their handlers: an error whose context is an interrupt is taken for one.
    fault = fleet.fault()
    if fault is None or fault.rank == 0 or fault.kind is Kind.mistake:
        raise ended
    ignore_interrupts()  # torchrun's, which answers the failure of another rank with one
    raise program.lost(job, fault, started)


def follow(program: Program) -> int:
    """Run the command of a rank other than the first; returns the exit status, 0 if it succeeds."""
    with interrupts_end_process():  # until the ranks meet, none of them has anything to save
        try:
            fleet = met()
        except LostRankError as error:
            program.tell(error)
            return error.exit_code
        ignore_interrupts()  # the first rank ends the others once it has saved
    job, started = None, 0.0
    try:
        while text := fleet.next_job():
            job, started = RankJob.of_text(text), time.time()
            log = program.logged(job) if fleet.parent else program.quietly()
            with log, joined(fleet, job):
                factory.follow_first_rank(job.config)
            job = None  # it is done, and the first rank has saved it
    except BaseException as error:
        fleet.watch.record(error)
        if not (fleet.watch.lost or isinstance(error, UserError)):
            traceback.print_exc()
        if fleet.parent:
            leave(1)
        fleet.leave(TO_SAVE_S)
        if fleet.watch.rank == SPEAKS_FOR_FIRST:
            _speak_for_first(fleet, program, job, started)
        leave(1)  # taking groups and devices down could wait for a rank that is lost
    fleet.close()
    return 0


def _speak_for_first(fleet: Fleet, program: Program, job: RankJob | None, started: float) -> None:
    """Save what a lost first rank, whichever rank failed first, had finished of the job, if its
    folder is one of this host, and report what happened."""
    faults: list[Fault] = []
    with suppress(RuntimeError):  # torch's, where the store has gone with torchrun
        faults = fleet.board.faults()
    fault, ends = culprit(faults), (Kind.ended, Kind.hung)
    if fault is None or not any(one.rank == 0 and one.kind in ends for one in faults):
        return
    fleet.close()  # the watch's thread ends a process that does not leave at once
    if job is None:
        program.tell(f"{fault}\n  so the run has ended")
        return
    program.save(job, fault, started)
    program.tell(program.lost(job, fault, started))


def joined(fleet: Fleet, job: RankJob) -> AbstractContextManager[Ranks]:
    """Context with the groups of a job that was announced."""
    on_cuda = factory.device_type(job.config) == "cuda"
    return fleet.joined(job.layout, job.config.parallelism.timeout_s, on_cuda=on_cuda)


def met() -> Fleet:
    """This rank's view of all ranks, once they have met.

    Raises:
        LostRankError: the ranks did not meet.
    """
    found = _meet()
    if isinstance(found, LostRankError):
        raise found
    return found


@contextmanager
def _ending_with_parent() -> Iterator[None]:
    """End this process if parallel/launch.py started it and that parent ends during the block."""
    parent, ends = int(os.environ.get(PARENT, "0")), threading.Event()

    def look() -> None:
        while os.getppid() == parent:
            if ends.wait(LOOK_EVERY_S):
                return
        os._exit(1)

    if parent:
        threading.Thread(target=look, daemon=True, name="parent").start()
    try:
        yield
    finally:
        ends.set()


@cache
def _meet() -> Fleet | LostRankError:
    """Wait for the other ranks, once only; returns this rank's view of them, or the error."""
    from hydraspec.parallel.fleet import Fleet

    try:
        # torch returns neither to handle interrupts nor where the parent is gone with the store
        with interrupts_end_process(), _ending_with_parent():
            return Fleet(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    except LostRankError as error:
        return error


def _number(environment: Mapping[str, str], name: str, least: int, most: int | None) -> int:
    allowed = f"a whole number, {least} or more" if most is None else f"{least} to {most}"
    try:
        number = int(environment.get(name, ""))
    except ValueError:
        raise _refusal(environment, name, "is no whole number", allowed) from None
    if number < least or (most is not None and number > most):
        raise _refusal(environment, name, "is out of range", allowed)
    return number


def _refusal(
    environment: Mapping[str, str], name: str, problem: str, allowed: str
) -> ConfigurationError:
    if name not in environment:
        rank, size = environment["RANK"], environment["WORLD_SIZE"]
        problem = f"is not set, and RANK={rank} and WORLD_SIZE={size} are"
        return ConfigurationError(
            f"{name} {problem}\n  allowed: {allowed}\n  to do: {REMEDY}", key=name
        )
    return refusal(name, environment[name], problem, allowed=allowed, remedy=REMEDY)
