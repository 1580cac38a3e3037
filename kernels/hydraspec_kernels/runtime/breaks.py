"""Calls that stay eager when a forward pass is captured in pieces (piecewise CUDA graphs).

`run(f, *args)` is `f(*args)`, except while a recorder is set: then the recorder runs the call and
keeps it for later replays. This module does not depend on how graphs are captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

__all__ = ["PieceRecorder", "recording", "run"]

T = TypeVar("T")


class PieceRecorder(Protocol):
    """Ends a captured piece before a call and starts the next one after it."""

    def call(self, function: Callable[..., T], args: tuple[Any, ...]) -> T:
        """Runs `function(*args)` outside any capture; the result has the same address in every
        replay.
        """
        ...


_recorder: PieceRecorder | None = None


def run(function: Callable[..., T], *args: Any) -> T:
    """Calls `function(*args)`, which is never part of a captured piece, and returns its result.

    The function returns a tensor, None, or a tuple or dataclass of those, and keeps no host state.
    """
    if _recorder is None:
        return function(*args)
    return _recorder.call(function, args)


@contextmanager
def recording(recorder: PieceRecorder | None) -> Iterator[None]:
    """Context that passes calls of `run` to `recorder`; None: they are made directly."""
    global _recorder
    before, _recorder = _recorder, recorder
    try:
        yield
    finally:
        _recorder = before
