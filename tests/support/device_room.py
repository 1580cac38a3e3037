"""Room on a device that several processes of pytest share, for tests that need most of it."""

from __future__ import annotations

import fcntl
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

GIB = 1 << 30
POLL_S = 0.5


@contextmanager
def room_on_device(gib: float, *, limit_s: float) -> Iterator[None]:
    """Context that one process has at a time on a device; it begins when that much memory is free.
    The test fails where this takes more than limit_s seconds."""
    end = time.monotonic() + limit_s
    name = f"hydraspec-tests-{torch.cuda.get_device_properties(0).uuid}.lock"
    with (Path(tempfile.gettempdir()) / name).open("w") as lock:
        while not _has_lock(lock.fileno()) or torch.cuda.mem_get_info()[0] < gib * GIB:
            if time.monotonic() > end:
                free = torch.cuda.mem_get_info()[0] / GIB
                pytest.fail(f"after {limit_s} s {free:.1f} GiB of the device are free, not {gib}")
            time.sleep(POLL_S)
        yield


def _has_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
