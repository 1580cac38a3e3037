"""Processes with a time limit: whatever one started ends with it."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TAIL_LINES = 15
SECONDS_TO_DIE = 20.0  # a driver may hold a killed process while its kernel spins

_live: set[subprocess.Popen[bytes]] = set()
_stopped = threading.Event()


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a process ended."""

    status: int | None  # the exit status, negative for a signal; None: its time was up
    seconds: float
    limit_s: float
    log: Path

    @property
    def problem(self) -> str | None:
        """None after exit status 0, else why not, with the last line it said."""
        if self.status == 0:
            return None
        how = f"exit status {self.status}"
        if self.status is None:
            how = f"cut after {self.limit_s:.0f} s"
        return f"{how}: {last_line(self.log)}"


def run(
    command: Sequence[str],
    *,
    log: Path,
    limit_s: float,
    env: Mapping[str, str],
    cwd: Path,
    interrupt_s: float = 0.0,
) -> Ended:
    """Run a command with its output in `log`.

    Args:
        interrupt_s: when the time is up, interrupt it first and wait so long for it to save.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with log.open("wb") as output:
        process = start(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=dict(env),
            cwd=cwd,
        )
        status: int | None = None
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            if interrupt_s:
                process.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(interrupt_s)
        finally:
            end(process)
    seconds = time.monotonic() - started
    return Ended(status=status, seconds=seconds, limit_s=limit_s, log=log)


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """A process with a session of its own, which `end` and `end_all` end."""
    if _stopped.is_set():
        raise KeyboardInterrupt
    process = subprocess.Popen(list(command), start_new_session=True, **options)
    _live.add(process)
    return process


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its session; harmless after its end."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(SECONDS_TO_DIE)
    _live.discard(process)


def end_all() -> None:
    """After an interrupt: no process is left, and none starts any more."""
    _stopped.set()
    for process in list(_live):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def tail(log: Path, lines: int = TAIL_LINES) -> list[str]:
    """The last lines of a log that hold anything."""
    if not log.is_file():
        return []
    text = log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n")
    return [line.rstrip() for line in text.splitlines() if line.strip()][-lines:]


def last_line(log: Path) -> str:
    """The last message of the command line in a log, else its last line."""
    said = tail(log)
    ours = [line for line in said if line.startswith("hydraspec: ")]
    words = (ours or said or ["it said nothing"])[-1]
    return words[:300]
