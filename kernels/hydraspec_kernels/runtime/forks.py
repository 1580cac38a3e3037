"""Runs calls in forked processes for their effects on the disk."""

from __future__ import annotations

import gc
import os
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress

MOST_PROCESSES = 32
WORD = 4  # bytes of a call's index in the pipe
POLL_S = 0.01
GRACE_S = 1.0  # from SIGINT to SIGKILL


def num_processes() -> int:
    """Number of cores that this process may use, at most MOST_PROCESSES."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return min(MOST_PROCESSES, cores)


def run_in_forks(calls: Sequence[Callable[[], object]], count: int, timeout_s: float) -> None:
    """Makes every call in one of `count` forked processes.

    Errors are dropped, and so are calls that have not ended after `timeout_s` seconds. The calls
    must not use the device: CUDA does not work in a forked process.
    """
    if not hasattr(os, "fork"):
        return
    take, give = os.pipe()
    with os.fdopen(give, "wb") as numbers:
        numbers.write(b"".join(number.to_bytes(WORD, "little") for number in range(len(calls))))
    children = set[int]()
    try:
        with suppress(OSError):  # fewer processes where the system allows no more
            for _ in range(min(count, len(calls))):
                children.add(_fork(calls, take))
        _await(children, timeout_s)
    finally:
        os.close(take)
        _end(children)


def _await(children: set[int], timeout_s: float) -> None:
    """Waits for the children up to `timeout_s`, and removes those that ended from the set."""
    deadline = time.monotonic() + timeout_s
    while children and time.monotonic() < deadline:
        children -= {child for child in children if _has_ended(child, os.WNOHANG)}
        time.sleep(POLL_S)


def _end(children: set[int]) -> None:
    """Ends the children: SIGINT lets them end their compilers and remove temporary files, SIGKILL
    follows after GRACE_S seconds.
    """
    try:
        _kill(children, signal.SIGINT)
        _await(children, GRACE_S)
    finally:
        _kill(children, signal.SIGKILL)
        for child in children:
            _has_ended(child, 0)


def _kill(children: set[int], number: int) -> None:
    for child in children:
        with suppress(ProcessLookupError):
            os.kill(child, number)


def _fork(calls: Sequence[Callable[[], object]], take: int) -> int:
    """Forks a process that makes the calls whose indices it reads from the pipe; returns its id."""
    parent = os.getpid()
    # A child interrupted before its `try` would return into the parent's code.
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with warnings.catch_warnings():
            # The warning is about locks of other threads: the timeout ends a child that waits.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child:
            return child
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
            gc.disable()  # collecting would free device memory
            while os.getppid() == parent and (word := os.read(take, WORD)):
                with suppress(Exception):
                    calls[int.from_bytes(word, "little")]()
        finally:
            os._exit(0)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


def _has_ended(child: int, options: int) -> bool:
    try:
        return os.waitpid(child, options)[0] == child
    except ChildProcessError:  # waited for elsewhere
        return True
