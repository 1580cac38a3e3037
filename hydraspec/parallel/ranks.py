"""The rank of this process. Engines are built for `current()`, by default a run of one rank."""

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
        """The place of this rank."""
        return self.layout.coordinates(self.rank)


ALONE = Ranks()
_current: ContextVar[Ranks] = ContextVar("ranks", default=ALONE)


def current() -> Ranks:
    """This rank's view of the run; in a new thread that of a run of one rank."""
    return _current.get()


@contextmanager
def acting_as(ranks: Ranks) -> Iterator[None]:
    """Make `ranks` the `current()` view during the block."""
    token = _current.set(ranks)
    try:
        yield
    finally:
        _current.reset(token)
