"""A rank without an engine: steps that exchange a file each, and one that fails as it is told to.

`python faulty_rank.py SHARED RANK:STEP:FAULT`, where SHARED is a folder.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

from hydraspec.errors import CannotWriteError, ConfigurationError
from hydraspec.parallel.watch import STILL_WAITING

NUM_STEPS, STEP_S = 20, 0.02


class Exchange:
    """What a collective is: done once every rank has come, an error once one of them is gone."""

    def __init__(self, shared: Path, rank: int, num_ranks: int, step: int) -> None:
        (shared / f"at-{rank}-{step}").touch()
        self._needed = [shared / f"at-{other}-{step}" for other in range(num_ranks)]
        self._pids = [shared / f"pid-{other}" for other in range(num_ranks)]

    def wait(self, timeout: timedelta) -> bool:
        until = time.monotonic() + min(timeout.total_seconds(), 0.2)
        while not all(file.exists() for file in self._needed):
            for pid in self._pids:
                if pid.exists() and is_gone(int(pid.read_text())):
                    raise RuntimeError("Connection closed by peer")
            if time.monotonic() > until:
                raise RuntimeError(STILL_WAITING)
            time.sleep(0.005)
        return True


def is_gone(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state in "ZX"


def misbehave(fault: str) -> None:
    """Fail as `fault` says."""
    if fault == "raise":
        raise ValueError("the seventh head is missing")
    if fault == "memory":
        raise MemoryError("out of memory: 20 GiB asked for")
    if fault == "mistake":
        raise ConfigurationError("parallelism.tensor=2 does not divide 3 heads")
    if fault == "disk":
        raise CannotWriteError(errno.ENOSPC, "No space left on device", "outputs/requests.jsonl")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "exit":
        os._exit(7)
    if fault == "device":  # which then comes to no later kernel
        import torch

        torch.cuda._sleep(1 << 40)
    while fault == "spin":
        pass


def start(fault: str) -> None:
    """Misbehave before the first step: come late, import for long, or be stopped there."""
    if fault == "late":
        time.sleep(300)
    elif fault == "import":
        ctypes.PyDLL(None).sleep(3)  # no other thread runs, as while a library is loaded
    else:
        misbehave(fault)


def main() -> None:
    shared, (who, when, fault) = Path(sys.argv[1]), sys.argv[2].split(":")
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    own = shared / f"own-{rank}"
    own.write_text(str(os.getpid()))
    own.rename(shared / f"pid-{rank}")
    from hydraspec.parallel.fleet import Fleet

    fleet = Fleet(rank, num_ranks)
    watch, saved = fleet.watch, shared / f"saved-{rank}"
    (shared / "started").touch()
    try:
        if who == str(rank) and int(when) == 0:
            start(fault)
        for step in range(1, NUM_STEPS + 1):
            with watch.step():
                if who in (str(rank), "*") and step == int(when):
                    misbehave(fault)
                watch.finish(Exchange(shared, rank, num_ranks, step))
                time.sleep(STEP_S)
    except KeyboardInterrupt:
        saved.write_text("interrupted")
    except Exception as error:
        watch.record(error)
        sys.stdout.write(f"said by rank {rank}: {error}\n")
        sys.stdout.flush()
        if rank == 0:
            saved.write_text(str(error))
        os._exit(1)
    else:
        saved.write_text("done")
    fleet.close()
    os._exit(0)  # at once: the parent waits 2 s for a sign of life


if __name__ == "__main__":
    main()
