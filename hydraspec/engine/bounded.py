"""Time and memory limits on work that a checkpoint's files control: a chat template may loop, a
tokenizer's pattern may backtrack for hours, and neither can be interrupted.

The work runs in a forked process. On systems other than Linux, where forking a process with threads
is unsafe, it runs without limits.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import sys
import warnings
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

SECONDS_PER_ITEM = 30
EXTRA_BYTES = 4 << 30  # address space beyond that of the process
_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class OutOfBoundsError(Exception):
    """Error of an item that failed or exceeded a limit; its text says which, for a message."""


def bounded(work: Callable[[T], Any], items: Sequence[T]) -> Generator[Any, None, None]:
    """Yields work(item) for each item in turn, computed in a forked process; results must be JSON
    values. The process ends with the generator: close the generator if it may be left early.

    Raises:
        OutOfBoundsError: in place of a result: `work` raised an exception of any kind, whose text
            is kept, the process ended, or no result came within SECONDS_PER_ITEM.
    """
    if sys.platform != "linux":
        yield from (_value(_outcome(work, item)) for item in items)
        return
    reading, writing = os.pipe()
    child = _fork(work, items, writing)
    os.close(writing)
    status = None
    try:
        with os.fdopen(reading, encoding="utf-8") as lines:
            for _ in items:
                line = lines.readline()
                if not line.endswith("\n"):
                    status = os.waitpid(child, 0)[1]
                    raise OutOfBoundsError(_ended(os.waitstatus_to_exitcode(status)))
                yield _value(json.loads(line))
    finally:
        if status is None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _fork(work: Callable[[T], Any], items: Sequence[T], writing: int) -> int:
    """Fork the process that computes the results; returns its id. A signal that arrives meanwhile
    is handled by the parent."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
    collects = gc.isenabled()
    # A collection in the child, at once after the fork too, would free memory of the device, which
    # aborts a forked process.
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the child needs no threads
            child = os.fork()
        if child == 0:
            _serve(work, items, writing)
    finally:
        if collects:
            gc.enable()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return child


def _serve(work: Callable[[T], Any], items: Sequence[T], writing: int) -> None:
    """Compute results in the forked process, and exit without returning. SIGALRM ends the process
    when an item's time is up."""
    try:
        for number in (*_HANDLED, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (*_HANDLED, signal.SIGALRM))
        _limit_memory()
        with open(os.devnull, "wb") as nowhere:  # a library's panic prints more than the message
            os.dup2(nowhere.fileno(), 2)
        with os.fdopen(writing, "w", encoding="utf-8") as results:
            for item in items:
                signal.alarm(SECONDS_PER_ITEM)
                results.write(json.dumps(_outcome(work, item)) + "\n")
                results.flush()
    finally:
        os._exit(0)


def _limit_memory() -> None:
    with open("/proc/self/statm", encoding="ascii") as sizes:
        used = int(sizes.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = used + EXTRA_BYTES
    if hard == resource.RLIM_INFINITY or wanted < hard:
        resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))


def _outcome(work: Callable[[T], Any], item: T) -> dict[str, Any]:
    try:
        return {"value": work(item)}
    except MemoryError:
        return {"error": f"it needs more than {EXTRA_BYTES >> 30} GiB of memory"}
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the tokenizer's library is no Exception
        return {"error": str(error) or type(error).__name__}


def _value(outcome: dict[str, Any]) -> Any:
    if "error" in outcome:
        raise OutOfBoundsError(outcome["error"])
    return outcome["value"]


def _ended(status: int) -> str:
    if status == -signal.SIGALRM:
        return f"it takes more than {SECONDS_PER_ITEM} seconds"
    return f"its process ended ({'signal' if status < 0 else 'status'} {abs(status)})"
