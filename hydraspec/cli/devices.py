"""Devices for jobs that run side by side on a host: a lock file per device gives it to one job.

Under Slurm nothing is locked: Slurm has given the job its devices already.
"""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import islice
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
SLURM = "SLURM_JOB_ID"
LONGEST_WAIT_S = 24 * 3600.0
LOOK_EVERY_S = 0.5


@contextmanager
def own_devices(count: int, is_stopped: Callable[[], bool]) -> Iterator[list[str] | None]:
    """Context that waits for and reserves `count` devices of this host, for one job of this user.

    Yields:
        The names of the devices, for CUDA_VISIBLE_DEVICES; None if `count` is 0, or larger than the
        number of devices.

    Raises:
        InterruptedError: `is_stopped` returned true during the wait.
        TimeoutError: too few devices were free for a day.
    """
    names = visible_devices()
    if count == 0 or count > len(names):
        yield None
        return
    if SLURM in os.environ:
        yield names[:count]
        return
    started = time.monotonic()
    while True:
        with ExitStack() as held:
            free = (name for name in names if _lock(name, held))
            locked = list(islice(free, count))  # locks `count` devices at most
            if len(locked) == count:
                yield locked
                return
        if is_stopped():
            raise InterruptedError
        if time.monotonic() - started > LONGEST_WAIT_S:
            raise TimeoutError(f"waited {LONGEST_WAIT_S / 3600:.0f} h for {count} free devices")
        time.sleep(LOOK_EVERY_S * (0.5 + random.random()))  # not in step with other jobs


def _lock(name: str, held: ExitStack) -> bool:
    """Lock a device's file until `held` is closed or the process ends; returns whether it is
    locked."""
    folder = Path(tempfile.gettempdir()) / f"hydraspec-devices-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    file = held.enter_context((folder / f"{name.replace('/', '_')}.lock").open("a"))
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def visible_devices() -> list[str]:
    """The CUDA devices of this process: entries of CUDA_VISIBLE_DEVICES, or else their numbers."""
    given = os.environ.get(VISIBLE)
    if given is not None:
        return [name.strip() for name in given.split(",") if name.strip()]
    return [str(i) for i in range(_num_devices())]


@cache
def _num_devices() -> int:
    """Number of devices that the driver lists. Importing torch to count them would take seconds."""
    if shutil.which("nvidia-smi") is None:
        return 0
    found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    return sum(line.startswith("GPU ") for line in found.stdout.splitlines())
