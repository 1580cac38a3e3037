"""Where a forward pass may be cut when it is captured in pieces: calls that then stay eager.

`run(f, *args)` is `f(*args)`, unless somebody records pieces: then the recorder decides, and keeps
the call for later replays. Knows nothing of graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

__all__ = ["PieceRecorder", "recording", "run", "uncut"]

T = TypeVar("T")


class PieceRecorder(Protocol):
    """Cuts a capture in two around a call."""

    def call(self, function: Callable[..., T], args: tuple[Any, ...]) -> T:
        """Run `function(*args)` outside any capture; what it returns has the same place in memory
        in every replay.
        """
        ...


_recorder: PieceRecorder | None = None


def run(function: Callable[..., T], *args: Any) -> T:
    """`function(*args)`, a call that is never a part of a captured piece.

    It returns a tensor, None, or a tuple or dataclass of those, and keeps no state on the host.
    """
    if _recorder is None:
        return function(*args)
    return _recorder.call(function, args)


@contextmanager
def recording(recorder: PieceRecorder) -> Iterator[None]:
    """Hand calls of `run` to `recorder`; inside one of them, calls are plain again."""
    global _recorder
    before, _recorder = _recorder, recorder
    try:
        yield
    finally:
        _recorder = before


@contextmanager
def uncut() -> Iterator[None]:
    """Calls of `run` are plain ones."""
    global _recorder
    before, _recorder = _recorder, None
    try:
        yield
    finally:
        _recorder = before
