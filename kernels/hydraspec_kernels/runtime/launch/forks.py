"""Calls in forked processes, for what they leave on the disk."""

from __future__ import annotations

import gc
import os
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress

MOST_PROCESSES = 32
WORD = 4  # bytes of a call's number
SECONDS_BETWEEN_LOOKS = 0.01
GRACE_S = 1.0  # from an interrupt to the end


def num_processes() -> int:
    """The cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return min(MOST_PROCESSES, cores)


def run_in_forks(calls: Sequence[Callable[[], object]], count: int, timeout_s: float) -> None:
    """Make every call in one of `count` forked processes, for what it leaves on the disk.

    Their errors are dropped, and after `timeout_s` seconds so is what is not done. The calls must
    not use the device, which a fork cannot.
    """
    if not hasattr(os, "fork"):
        return
    take, give = os.pipe()
    with os.fdopen(give, "wb") as numbers:
        numbers.write(b"".join(number.to_bytes(WORD, "little") for number in range(len(calls))))
    children = set[int]()
    try:
        with suppress(OSError):  # as many as there may be
            for _ in range(min(count, len(calls))):
                children.add(_fork(calls, take))
        _await(children, timeout_s)
    finally:
        os.close(take)
        _end(children)


def _await(children: set[int], timeout_s: float) -> None:
    """Takes out of the set who has ended."""
    deadline = time.monotonic() + timeout_s
    while children and time.monotonic() < deadline:
        children -= {child for child in children if _has_ended(child, os.WNOHANG)}
        time.sleep(SECONDS_BETWEEN_LOOKS)


def _end(children: set[int]) -> None:
    """An interrupt first: at it they end the compilers that they run, and remove their files."""
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
    """A process that makes those calls whose numbers it gets hold of."""
    parent = os.getpid()
    # Interrupted before its `try`, a child would go on as another parent.
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with warnings.catch_warnings():
            # Of locks that other threads hold: a child that waits for one is ended in time.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child:
            return child
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
            gc.disable()  # it would free memory of the device
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
    except ChildProcessError:  # somebody else has asked
        return True
