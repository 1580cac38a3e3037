"""Which rank this is. Engines are built for `current()`; a process that was not told is alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from hydraspec.parallel.control import ALONE as ALONE_CONTROL
from hydraspec.parallel.control import Control
from hydraspec.parallel.group import SOLO, TensorGroup
from hydraspec.parallel.layout import Coordinates, Layout
from hydraspec.parallel.stages import StageLink
from hydraspec.parallel.watch import ALONE as UNWATCHED
from hydraspec.parallel.watch import Watch


@dataclass(slots=True, frozen=True, kw_only=True)
class Ranks:
    """A rank's view of the run."""

    layout: Layout = field(default_factory=Layout)
    rank: int = 0
    group: TensorGroup = SOLO  # the ranks that share this one's layers
    link: StageLink | None = None  # to the other pipeline stages; None: there are none
    control: Control = ALONE_CONTROL  # plain data to and from every rank
    watch: Watch = UNWATCHED  # over the other ranks: in every wait, and around every step

    @property
    def at(self) -> Coordinates:
        """Where this rank stands."""
        return self.layout.coordinates(self.rank)


ALONE = Ranks()
_current: ContextVar[Ranks] = ContextVar("ranks", default=ALONE)


def current() -> Ranks:
    """This rank's view. A new thread starts alone."""
    return _current.get()


@contextmanager
def acting_as(ranks: Ranks) -> Iterator[None]:
    """While it lasts, `current()` is `ranks`."""
    token = _current.set(ranks)
    try:
        yield
    finally:
        _current.reset(token)
