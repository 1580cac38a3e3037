"""What comes from outside while a run goes on: interrupts, and output that nobody takes.

Light to import: the command line does, before it knows whether anything is to run.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from types import FrameType
from typing import Any, TextIO, cast

TERMINATIONS = (signal.SIGTERM, signal.SIGHUP)  # docker stop, Slurm; a terminal that is closed
INTERRUPTS = (signal.SIGINT, *TERMINATIONS)
IMPORT_SYSTEM = "<frozen importlib"  # the files of its frames
SECONDS_TO_IMPORT = 0.05  # until an interrupt is tried again


@contextmanager
def terminations_as_interrupts() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end a run as a Ctrl-C does; a second one is ignored.

    All three wait while a module is imported: in the middle of torch's or numpy's an exception
    aborts the process, is swallowed, or leaves half a module for later.
    """
    process = os.getpid()
    received: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        if os.getpid() != process:  # a fork would go on as another parent
            os._exit(128 + number)
        if _is_importing(frame):
            _again(number)
            return
        if number in TERMINATIONS:
            received.append(number)
            if len(received) > 1:
                return
        raise KeyboardInterrupt

    with _handled([n for n in INTERRUPTS if signal.getsignal(n) is not signal.SIG_IGN], interrupt):
        yield


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith(IMPORT_SYSTEM):
            return True
        frame = frame.f_back
    return False


def _again(number: int) -> None:
    """The signal once more, to the main thread itself: a flag alone would not end its sleep."""
    main = threading.main_thread().ident
    later = threading.Timer(SECONDS_TO_IMPORT, signal.pthread_kill, (main, number))
    later.daemon = True
    later.start()


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Let an interrupt wait until the files are written; it is raised at the end."""
    received: list[int] = []
    handled = [number for number in INTERRUPTS if callable(signal.getsignal(number))]
    try:
        with _handled(handled, lambda number, frame: received.append(number)):
            yield
    finally:
        if received:
            raise KeyboardInterrupt


@contextmanager
def interrupts_stay_interrupts() -> Iterator[None]:
    """Raise an interrupt again where a library, cut short by it, ends with an error of its own."""
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
    """From here on the process only ends."""
    if _in_main_thread():
        for number in INTERRUPTS:
            signal.signal(number, signal.SIG_IGN)


@contextmanager
def output_may_be_cut() -> Iterator[None]:
    """Let a run go on where what it prints goes nowhere: the reader has left, as in `| head -1`,
    the disk is full, the terminal is closed.
    """
    _open_standard_streams()
    output, errors = _Output(sys.stdout), _Output(sys.stderr)
    with redirect_stdout(cast(TextIO, output)), redirect_stderr(cast(TextIO, errors)):
        try:
            yield
        finally:
            output.flush()
            errors.flush()


def _open_standard_streams() -> None:
    """A process may be started without them; the next file would get such a number, and with it
    what libraries print.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number


class _Output:
    """A stream that cannot be written is no error: what comes from then on is dropped."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream  # None where the process was started without one

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        if self._stream is not None:
            try:
                return self._stream.write(text)
            except OSError:
                self._drop(self._stream)
        return len(text)

    def flush(self) -> None:
        if self._stream is not None:
            try:
                self._stream.flush()
            except OSError:
                self._drop(self._stream)

    def _drop(self, stream: TextIO) -> None:
        """The descriptor too: at its end Python flushes what is left."""
        with suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())


@contextmanager
def _handled(
    numbers: Sequence[signal.Signals], handler: Callable[[int, FrameType | None], object]
) -> Iterator[None]:
    """Signals go to `handler` for a while; they can be had in the main thread only. Who is ignored
    meanwhile, stays so.
    """
    previous = {n: signal.signal(n, handler) for n in numbers} if _in_main_thread() else {}
    try:
        yield
    finally:
        for number, former in previous.items():
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, former)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
