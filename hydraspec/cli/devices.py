"""Devices for jobs that run side by side on a host: each job has its own, by a lock file each.

Under Slurm nothing is locked: it has given the job its devices already.
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
    """`count` devices of this host that no other job of this user's has, for a while.

    Yields:
        Their names, for CUDA_VISIBLE_DEVICES; None where there is nothing to choose: fewer devices
        than asked for, or none asked for.

    Raises:
        InterruptedError: is_stopped said so during the wait.
        TimeoutError: after a day.
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
            locked = list(islice(free, count))  # no more are locked than that
            if len(locked) == count:
                yield locked
                return
        if is_stopped():
            raise InterruptedError
        if time.monotonic() - started > LONGEST_WAIT_S:
            raise TimeoutError(f"waited {LONGEST_WAIT_S / 3600:.0f} h for {count} free devices")
        time.sleep(LOOK_EVERY_S * (0.5 + random.random()))  # not in step with other jobs


def _lock(name: str, held: ExitStack) -> bool:
    """Lock a device's file until `held` is closed; the system does when the process ends."""
    folder = Path(tempfile.gettempdir()) / f"hydraspec-devices-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    file = held.enter_context((folder / f"{name.replace('/', '_')}.lock").open("a"))
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def visible_devices() -> list[str]:
    """This process's CUDA devices, as CUDA_VISIBLE_DEVICES names or counts them."""
    given = os.environ.get(VISIBLE)
    if given is not None:
        return [name.strip() for name in given.split(",") if name.strip()]
    return [str(i) for i in range(_num_devices())]


@cache
def _num_devices() -> int:
    """What the driver lists; torch would take seconds, and is not needed here otherwise."""
    if shutil.which("nvidia-smi") is None:
        return 0
    found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    return sum(line.startswith("GPU ") for line in found.stdout.splitlines())
