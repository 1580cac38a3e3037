"""The parent of the ranks of one host: starts a process per rank, watches them, and ends them all.

It holds the ranks' store, for which it imports torch while they do. Each rank has its own session,
so that interrupts of a terminal reach the parent alone; the parent passes them on to the first
rank, which saves what is finished.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydraspec.parallel.board import Board
from hydraspec.parallel.faults import Fault, culprit, of_exit
from hydraspec.parallel.progress import Judge
from hydraspec.signals import interrupts_held_back

PREFIX, JOB, RESULT = "hydraspec", "job", "result"  # keys of the store; jobs are counted
HOST, INTERFACE = "127.0.0.1", "lo"
LOOK_EVERY_S = 0.1
JUDGE_EVERY_S = 0.25
TO_SAVE_S = 8.0  # for the first rank, after a fault
TO_END_S = 5.0  # for the first rank after SIGTERM; for the others after a fault
TO_LEAVE_S = 1.0  # for the others after a fault or an interrupt, if the first rank is gone
TO_END_WELL_S = 60.0  # for the others to free what they hold after a run without a fault
PARENT = "HYDRASPEC_PARENT"  # environment: the parent's process id; ranks end with the parent


@dataclass(slots=True, frozen=True, kw_only=True)
class Ended:
    """End of the ranks of a run."""

    fault: Fault | None  # the first one
    interrupted: bool  # whether this process was interrupted
    result: str | None = None  # the first rank's answer


def run_ranks(
    command: Sequence[str],
    num_ranks: int,
    *,
    job: str,
    logs: Path,
    timeout_s: float,
    environment: Mapping[str, str],
    meanwhile: Callable[[], None] = lambda: None,
) -> Ended:
    """Run `command` once per rank, and return when no process is left.

    Args:
        job: text of the job that is announced to the ranks.
        logs: the folder of rank1.log and so on, the output of all ranks but the first.
        timeout_s: seconds for which a rank may stand still in a step.
        meanwhile: called before the job is announced; its exceptions end the ranks.

    Raises:
        Exception: raised by `meanwhile`.
        OSError: a process or a log cannot be made.
    """
    return _Ranks(command, num_ranks, logs, timeout_s, environment).run(job, meanwhile)


class _Ranks:
    def __init__(
        self,
        command: Sequence[str],
        num_ranks: int,
        logs: Path,
        timeout_s: float,
        environment: Mapping[str, str],
    ) -> None:
        self._command, self._num_ranks = command, num_ranks
        self._logs, self._environment = logs, environment
        self._judge = Judge(num_ranks, timeout_s, is_stopped=self._is_stopped)
        self._judge_at = 0.0
        self._processes: list[subprocess.Popen[bytes]] = []
        self._failed_at = 0.0  # time.monotonic() of the first fault
        self._first_ended_at = 0.0
        self._interrupted = False

    def run(self, job: str, meanwhile: Callable[[], None]) -> Ended:
        """See run_ranks."""
        with ExitStack() as opened:
            listener = opened.enter_context(socket.create_server((HOST, 0)))
            opened.callback(self._kill)
            with interrupts_held_back():  # all ranks are started, or none
                self._start(listener.getsockname()[1])
                store = _store(listener)
                self._board = Board(store, self._num_ranks)
                meanwhile()
                store.set(f"{JOB}/0", job)
                store.set(f"{JOB}/1", "")  # there is no further job
            while any(process.poll() is None for process in self._processes):
                try:
                    with interrupts_held_back():
                        self._look()
                        time.sleep(LOOK_EVERY_S)
                except KeyboardInterrupt:
                    self._interrupted = True
                    self._send(0, signal.SIGINT)
            self._look()
            result = store.get(RESULT).decode() if store.check([RESULT]) else None
            fault = culprit(self._board.faults())
        return Ended(fault=fault, interrupted=self._interrupted, result=result)

    def _start(self, port: int) -> None:
        for rank in range(self._num_ranks):
            with ExitStack() as opened:
                output = None
                if rank:
                    self._logs.mkdir(parents=True, exist_ok=True)
                    log = self._logs / f"rank{rank}.log"
                    output = opened.enter_context(log.open("wb"))
                process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env={**self._environment, **self._names(rank, port)},
                    start_new_session=True,
                )
            self._processes.append(process)

    def _names(self, rank: int, port: int) -> dict[str, str]:
        """Environment variables as torchrun sets them."""
        size = str(self._num_ranks)
        return {
            **{"RANK": str(rank), "WORLD_SIZE": size},
            **{"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": size},
            **{"MASTER_ADDR": HOST, "MASTER_PORT": str(port)},
            **{"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"},
            "GLOO_SOCKET_IFNAME": self._environment.get("GLOO_SOCKET_IFNAME", INTERFACE),
            PARENT: str(os.getpid()),
        }

    def _look(self) -> None:
        """Record ranks that have failed, and end those that do not end by themselves."""
        now = time.monotonic()
        alive = []
        for rank, process in enumerate(self._processes):
            code = process.poll()
            if code is None:
                alive.append(rank)
            elif code and not (self._failed_at or self._first_ended_at):  # else killed here
                signs = self._board.signs()
                steps = signs[rank][0].steps if rank in signs else 0
                self._board.add(of_exit(rank, self._num_ranks, steps, code))
        if 0 not in alive:
            self._first_ended_at = self._first_ended_at or now
        if now >= self._judge_at and not (self._failed_at or self._first_ended_at):
            self._judge_at = now + JUDGE_EVERY_S
            self._find_hung(alive)
        if not self._failed_at and self._board.faults():
            self._failed_at = now
        self._end(alive, now)

    def _find_hung(self, alive: Sequence[int]) -> None:
        found = self._board.signs()
        hung = self._judge.look({rank: found[rank][0] for rank in alive if rank in found})
        if hung is not None:
            self._board.add(hung)
            self._send(hung.rank, signal.SIGKILL)  # peers notice this signal, and no other

    def _is_stopped(self, rank: int) -> bool:
        return self._board.signs()[rank][1].is_stopped()

    def _end(self, alive: Sequence[int], now: float) -> None:
        """End ranks that are late, after a fault or after the first rank's end. The first rank gets
        time to save; the others have nothing to save."""
        if self._failed_at:
            late = now - self._failed_at
            if 0 in alive and late > TO_SAVE_S:
                self._send(0, signal.SIGKILL if late > TO_SAVE_S + TO_END_S else signal.SIGTERM)
            limit = TO_END_S if 0 in alive else TO_LEAVE_S
        elif self._first_ended_at:
            # An interrupted first rank may leave others waiting for a call that it never starts.
            late = now - self._first_ended_at
            limit = TO_LEAVE_S if self._interrupted else TO_END_WELL_S
        else:
            return
        for rank in alive:
            if rank and late > limit:
                self._send(rank, signal.SIGKILL)

    def _send(self, rank: int, number: signal.Signals) -> None:
        process = self._processes[rank]
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def _kill(self) -> None:
        """Kill all ranks, and every process that they started in their sessions."""
        for process in self._processes:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _store(listener: socket.socket) -> Any:
    """The store of the ranks, which this process holds; ranks may connect before it is there."""
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    port = listener.getsockname()[1]
    held = TCPStore(
        HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return PrefixStore(f"{PREFIX}/0", held)
