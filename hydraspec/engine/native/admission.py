"""Which requests join a step, and whether the run goes on: decided alone, or by the first rank of a
replica, which the others obey."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Protocol

from hydraspec.distributed.control import Control, RankError
from hydraspec.signals import interrupts_held_back
from hydraspec.types import Request


class Admission(Protocol):
    """Asked before each step of one run.

    Attributes:
        offered_at: when those that joined last were offered (time.perf_counter()); None: just then.
    """

    @property
    def offered_at(self) -> float | None: ...

    def joining(self, num_unfinished: int) -> Sequence[Request] | None:
        """The requests that join the step, beside as many unfinished ones; None: the run is over,
        and none is unfinished or those are to be dropped."""
        ...

    def close(self) -> None:
        """The run ends here, early or not."""
        ...


class Pending:
    """Requests in their order, at most `concurrency` of them unfinished (None: all)."""

    offered_at = None

    def __init__(self, requests: Sequence[Request], concurrency: int | None) -> None:
        self._pending, self._limit = deque(requests), concurrency or len(requests)

    def joining(self, num_unfinished: int) -> Sequence[Request] | None:
        """See Admission."""
        if not self._pending:
            return () if num_unfinished else None
        count = min(self._limit - num_unfinished, len(self._pending))
        return [self._pending.popleft() for _ in range(count)]

    def close(self) -> None:
        """See Admission."""


class Leading:
    """The first rank's: asks another admission, and announces what it says.

    Interrupts wait for the next call: the other ranks cannot leave a step half done.
    """

    def __init__(self, source: Admission, requests: Sequence[Request], control: Control) -> None:
        self._source, self._control = source, control
        self._topic = _topic(control)
        self._places = {id(request): place for place, request in enumerate(requests)}
        self._held = ExitStack()
        self._has_ended = False

    @property
    def offered_at(self) -> float | None:
        """See Admission."""
        return self._source.offered_at

    def joining(self, num_unfinished: int) -> Sequence[Request] | None:
        """See Admission.

        Raises:
            KeyboardInterrupt: that came since the last call.
        """
        self._held.close()
        found = self._source.joining(num_unfinished)
        self._held.enter_context(interrupts_held_back())
        self._announce(num_unfinished, found)
        return found

    def _announce(self, num_unfinished: int, found: Sequence[Request] | None) -> None:
        self._has_ended = found is None
        places = None if found is None else [self._places[id(request)] for request in found]
        self._control.tell(self._control.replica, self._topic, [num_unfinished, places])

    def close(self) -> None:
        """See Admission."""
        with self._held:
            self._source.close()
            if not self._has_ended:
                self._announce(0, None)


class Following:
    """Another rank's: does what the first of its replica announces."""

    offered_at = None

    def __init__(self, requests: Sequence[Request], control: Control) -> None:
        self._requests, self._control = requests, control
        self._topic = _topic(control)

    def joining(self, num_unfinished: int) -> Sequence[Request] | None:
        """See Admission.

        Raises:
            RankError: this rank has finished other requests than the first one has.
        """
        unfinished_there, places = self._control.hear(self._control.replica[0], self._topic)
        if places is None:
            return None
        if unfinished_there != num_unfinished:
            raise RankError(
                self._control.rank,
                f"{num_unfinished} requests are unfinished where the first rank of its replica has "
                f"{unfinished_there}: the tokens of the two differ",
            )
        return [self._requests[place] for place in places]

    def close(self) -> None:
        """See Admission."""


def _topic(control: Control) -> str:
    """Of one run: an error that ranks share leaves the announced end of their run unheard."""
    return f"step{next(control.runs)}"


def obeyed(source: Admission, requests: Sequence[Request], control: Control) -> Admission:
    """What `source` says, on every rank of a replica; only its first rank asks it."""
    if control.layout.num_ranks == 1:
        return source
    return Leading(source, requests, control) if control.leads else Following(requests, control)
