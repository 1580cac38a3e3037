"""This process as one of the ranks that torchrun started: the first one runs the command line, the
others take part in its jobs.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, Any

from hydraspec import factory
from hydraspec.cli.complain import complain, tell
from hydraspec.cli.compose import Job
from hydraspec.cli.rank_environment import num_ranks
from hydraspec.cli.rank_job import RankJob, errors_alone_logged, layout_of, runner
from hydraspec.config import RunConfig
from hydraspec.config.benches import is_bench
from hydraspec.config.engines import NATIVE
from hydraspec.config.messages import refusal
from hydraspec.errors import ConfigurationError, UserError
from hydraspec.parallel.faults import Fault, Kind, LostRankError, culprit
from hydraspec.signals import ignore_interrupts, interrupts_end_process, leave

if TYPE_CHECKING:
    from hydraspec.parallel.fleet import Fleet
    from hydraspec.parallel.ranks import Ranks

TO_SAVE_S = 10.0  # for the first rank, once this one has failed
SPEAKS_FOR_FIRST = 1  # the rank that says that the first one is lost


def is_follower() -> bool:
    """Returns whether this is not the first one."""
    return num_ranks() > 1 and int(os.environ["RANK"]) > 0


def check_size(jobs: Sequence[RunConfig]) -> None:
    """Refuse jobs that are not for as many ranks as there are.

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
    """Refuse `hydraspec.run` in ranks: which of them should get the summary?"""
    if num_ranks() > 1:
        raise ConfigurationError(
            f"hydraspec.run: was called by each of {num_ranks()} ranks of torchrun\n"
            "  allowed: a call from one process, which starts its ranks\n"
            "  to do: start the script without torchrun, or run torchrun -m hydraspec"
        )


@contextmanager
def leading() -> Iterator[None]:
    """The first rank's command: at its end the others end too."""
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
    """The first rank's exit status. Where a rank is lost this process ends here, with that status:
    taking groups down could wait for the lost one."""
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


def run(job: Job, *, quiet: bool, logs: bool) -> dict[str, Any]:
    """The first rank: run a resolved job with the others, and return its summary.

    Raises:
        as cli.ranks.run does.
    """
    fleet, started = met(), time.time()
    if fleet.watch.failed:
        raise LostRankError(
            "the ranks ended with an earlier job\n"
            "  to do: start the sweep again in its folder: finished jobs are not run twice"
        )
    factory.check_split(job.config)
    fleet.announce(RankJob.text_of(job, quiet=quiet, logs=logs))
    ended: BaseException
    try:
        with joined(fleet, job.config):
            return runner(job.config)(
                job.config, run_dir=job.folder, overrides=job.overrides, quiet=quiet
            )
    except KeyboardInterrupt as error:
        ended = error
    except Exception as error:
        fleet.watch.record(error)
        ended = error
    # Not in their handlers: an error whose context is an interrupt is taken for one.
    lost = _fault_of_another(fleet, job, started)
    if lost is not None:
        ignore_interrupts()  # torchrun's, for the same reason
    raise lost or ended


def _fault_of_another(fleet: Fleet, job: Job, started: float) -> LostRankError | None:
    """The failure of another rank, which torchrun answers with an interrupt of this one."""
    from hydraspec.cli.ranks import what_happened

    fault = fleet.fault()
    if fault is None or fault.rank == 0 or fault.kind is Kind.mistake:
        return None
    return LostRankError(what_happened(fault, job.folder.absolute(), started))


def follow() -> int:
    """Another rank's command: its exit status is 0 unless it fails itself."""
    with interrupts_end_process():  # until the ranks meet, none of them has anything to save
        try:
            fleet = met()
        except LostRankError as error:
            return complain(error, error.exit_code)
        ignore_interrupts()  # the first rank ends the others once it has saved
    job, started = None, 0.0
    try:
        while text := fleet.next_job():
            job, started = RankJob.of_text(text), time.time()
            log = job.logged() if fleet.parent else errors_alone_logged()
            with log, joined(fleet, job.config):
                factory.follow_first_rank(job.config)
            job = None  # and the first rank has saved it
    except BaseException as error:
        fleet.watch.record(error)
        if not (fleet.watch.lost or isinstance(error, UserError)):
            traceback.print_exc()
        if fleet.parent:
            leave(1)
        fleet.leave(TO_SAVE_S)
        if fleet.watch.rank == SPEAKS_FOR_FIRST:
            _speak_for_first(fleet, job, started)
        leave(1)  # taking groups and devices down could wait for a rank that is lost
    fleet.close()
    return 0


def _speak_for_first(fleet: Fleet, job: RankJob | None, started: float) -> None:
    """Where the first rank is lost, whichever failed first: save what it had finished of the job,
    if its folder is one of this host, and say what happened."""
    from hydraspec.cli.ranks import save_for_first, what_happened

    faults: list[Fault] = []
    with suppress(RuntimeError):  # torch's, where the store has gone with torchrun
        faults = fleet.board.faults()
    fault, ends = culprit(faults), (Kind.ended, Kind.hung)
    if fault is None or not any(one.rank == 0 and one.kind in ends for one in faults):
        return
    fleet.close()  # its thread ends a process that does not leave at once
    if job is None:
        tell(f"{fault}\n  so the run has ended")
        return
    save_for_first(job, fault, started, quiet=job.quiet)
    tell(what_happened(fault, job.folder.absolute(), started))


def joined(fleet: Fleet, config: RunConfig) -> AbstractContextManager[Ranks]:
    """The groups of a job that was announced, for a while."""
    on_cuda = factory.device_type(config) == "cuda"
    return fleet.joined(layout_of(config), config.parallelism.timeout_s, on_cuda=on_cuda)


def met() -> Fleet:
    """This rank's end of all ranks.

    Raises:
        LostRankError: they did not meet.
    """
    found = _meet()
    if isinstance(found, LostRankError):
        raise found
    return found


@cache
def _meet() -> Fleet | LostRankError:
    """Wait for the others, once only."""
    from hydraspec.parallel.fleet import Fleet

    try:
        with interrupts_end_process():  # torch does not return to handle them
            return Fleet(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    except LostRankError as error:
        return error
