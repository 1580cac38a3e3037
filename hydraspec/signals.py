"""Signals and standard streams during a run: interrupts, terminations, output whose reader left.

The module imports the standard library only, as it is the first one that a command loads.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from types import FrameType
from typing import Any, NoReturn, TextIO, cast

TERMINATIONS = (signal.SIGTERM, signal.SIGHUP)  # docker stop, Slurm; a terminal that is closed
INTERRUPTS = (signal.SIGINT, *TERMINATIONS)
IMPORT_SYSTEM = "<frozen importlib"  # the file name of the import system's stack frames
FULL = (errno.ENOSPC, errno.EDQUOT)  # errors of a full disk
RETRY_AFTER_S = 0.05  # delay of an interrupt that arrived during an import


@contextmanager
def terminations_as_interrupts() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into KeyboardInterrupt, as Ctrl-C is; a second one is ignored.

    All three are delayed while a module is imported: in the middle of torch's or numpy's import an
    exception aborts the process, is swallowed, or leaves the module half loaded.
    """
    process = os.getpid()
    received: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        if os.getpid() != process:  # a forked child would run the parent's cleanup too
            os._exit(128 + number)
        if _is_importing(frame):
            _again(number)
            return
        if number in TERMINATIONS:
            received.append(number)
            if len(received) > 1:
                return
        raise KeyboardInterrupt

    with _handled(_not_ignored(), interrupt):
        yield


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith(IMPORT_SYSTEM):
            return True
        frame = frame.f_back
    return False


def _again(number: int) -> None:
    """Send the signal again later, to the main thread: a flag would not end that thread's sleep."""
    main = threading.main_thread().ident
    later = threading.Timer(RETRY_AFTER_S, signal.pthread_kill, (main, number))
    later.daemon = True
    later.start()


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Delay interrupts until the end of the block, where one KeyboardInterrupt is raised."""
    received: list[int] = []
    handled = [number for number in INTERRUPTS if callable(signal.getsignal(number))]
    try:
        with _handled(handled, lambda number, frame: received.append(number)):
            yield
    finally:
        if received:
            raise KeyboardInterrupt


@contextmanager
def on_interrupts(react: Callable[[], None]) -> Iterator[None]:
    """Call `react` at each interrupt during the block; its exceptions are raised in the block."""
    handled = [number for number in INTERRUPTS if callable(signal.getsignal(number))]
    with _handled(handled, lambda number, frame: react()):
        yield


@contextmanager
def interrupts_end_process() -> Iterator[None]:
    """Let interrupts end the process at once during the block, around library calls that do not
    return for a Python handler. Ignored signals stay ignored."""
    with _handled(_not_ignored(), signal.SIG_DFL):
        yield


def leave(status: int) -> NoReturn:
    """End this process at once, after its output is flushed; no cleanup runs."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@contextmanager
def interrupts_stay_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt where a library that was interrupted raises another error instead."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, KeyboardInterrupt):
                raise KeyboardInterrupt from None
            cause = cause.__context__
        raise


def ignore_interrupts() -> None:
    """Ignore all later interrupts, while the process ends."""
    if _in_main_thread():
        for number in INTERRUPTS:
            signal.signal(number, signal.SIG_IGN)


@contextmanager
def output_may_be_cut() -> Iterator[Output]:
    """Keep running where output cannot be written: the reader of a pipe has left (`| head -1`), the
    disk is full, the terminal is closed. Yields standard output.
    """
    _open_standard_streams()
    output, errors = Output(sys.stdout), Output(sys.stderr)
    with redirect_stdout(cast(TextIO, output)), redirect_stderr(cast(TextIO, errors)):
        try:
            yield output
        finally:
            output.flush()
            errors.flush()


def _open_standard_streams() -> None:
    """Open /dev/null for standard streams that the process was started without: the next file to be
    opened would take the descriptor, and receive what libraries print.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number


class Output:
    """A stream that drops its output, without an error, once it cannot be written."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream  # None where the process was started without one
        self._is_full = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write text, or drop it; returns its length."""
        if self._stream is not None:
            try:
                return self._stream.write(text)
            except OSError as error:
                self._drop(self._stream, error)
        return len(text)

    def flush(self) -> None:
        """Flush what was written, or drop it."""
        if self._stream is not None:
            try:
                self._stream.flush()
            except OSError as error:
                self._drop(self._stream, error)

    def is_full(self) -> bool:
        """Returns whether output was dropped because the disk is full."""
        self.flush()
        return self._is_full

    def _drop(self, stream: TextIO, error: OSError) -> None:
        """Point the stream's descriptor at /dev/null: Python flushes the rest when it exits."""
        self._is_full = self._is_full or error.errno in FULL
        with suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())


@contextmanager
def _handled(
    numbers: Sequence[signal.Signals],
    handler: Callable[[int, FrameType | None], object] | signal.Handlers,
) -> Iterator[None]:
    """Handle signals with `handler` during the block, in the main thread only. Signals that are
    ignored by the end of the block stay ignored.
    """
    previous = {n: signal.signal(n, handler) for n in numbers} if _in_main_thread() else {}
    try:
        yield
    finally:
        for number, former in previous.items():
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, former)


def _not_ignored() -> list[signal.Signals]:
    return [number for number in INTERRUPTS if signal.getsignal(number) is not signal.SIG_IGN]


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
