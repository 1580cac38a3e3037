"""What comes from outside while a run goes on: interrupts, and readers of its output that leave.

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

INTERRUPTS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def terminations_as_interrupts() -> Iterator[None]:
    """Let SIGTERM (docker stop, Slurm) end a run as a Ctrl-C does; a second one is ignored."""
    process = os.getpid()
    received: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        if os.getpid() != process:  # a fork would go on as another parent
            os._exit(128 + number)
        received.append(number)
        if len(received) == 1:
            raise KeyboardInterrupt

    ignored = signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    with _handled(() if ignored else (signal.SIGTERM,), interrupt):
        yield


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


def ignore_interrupts() -> None:
    """From here on the process only ends."""
    if _in_main_thread():
        for number in INTERRUPTS:
            signal.signal(number, signal.SIG_IGN)


@contextmanager
def output_may_be_cut() -> Iterator[None]:
    """Let a run go on where the reader of what it prints has left, as in `| head -1`."""
    output, errors = _Output(sys.stdout), _Output(sys.stderr)
    with redirect_stdout(cast(TextIO, output)), redirect_stderr(cast(TextIO, errors)):
        try:
            yield
        finally:
            output.flush()
            errors.flush()


class _Output:
    """A stream whose broken pipe is no error: what is written from then on is dropped."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream  # None where the process was started without one

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        if self._stream is not None:
            try:
                return self._stream.write(text)
            except BrokenPipeError:
                self._drop(self._stream)
        return len(text)

    def flush(self) -> None:
        if self._stream is not None:
            try:
                self._stream.flush()
            except BrokenPipeError:
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
