"""Processes as /proc of their host shows them. Processes of other hosts, and all on systems without
/proc, count as neither gone nor stopped.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PROC = Path("/proc")


@dataclass(slots=True, frozen=True)
class Process:
    """A process, named so that other hosts can tell that it is not theirs."""

    host: str  # the host's boot and namespace of process ids; "-": unknown
    pid: int
    started: str  # time of its start: a later process can have the same id

    @staticmethod
    def of_text(text: str) -> Process:
        """The process that `str` wrote as `text`."""
        host, pid, started = text.split()
        return Process(host, int(pid), started)

    def __str__(self) -> str:
        return f"{self.host} {self.pid} {self.started}"

    def is_gone(self) -> bool:
        """Returns whether the process is known to have ended, reaped or not."""
        if not self._is_here():
            return False
        state, started = _stat(self.pid)
        return state in ("", "Z", "X") or started != self.started

    def is_stopped(self) -> bool:
        """Returns whether the process is known to be stopped by a signal, as SIGSTOP."""
        return self._is_here() and _stat(self.pid)[0] == "T"

    def kill(self) -> None:
        """Send SIGKILL to the process, if it is one of this host."""
        if self._is_here() and not self.is_gone():
            with suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)

    def _is_here(self) -> bool:
        return self.host == _host() != "-"


def this_process() -> Process:
    """The calling process."""
    return Process(_host(), os.getpid(), _stat(os.getpid())[1] or "-")


@cache
def _host() -> str:
    try:
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{(PROC / 'self/ns/pid').readlink()}"
    except OSError:
        return "-"


def _stat(pid: int) -> tuple[str, str]:
    """State of a process, one letter, and its time of start; empty if there is no such process."""
    try:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]
