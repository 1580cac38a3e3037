"""Which requests may be in a pipeline's next step: its stages have several in flight."""

from __future__ import annotations

from collections.abc import Iterable

from hydraspec.engine.schedule.sequence import Scheduled, Sequence


class MicroBatches:
    """Steps in flight of disjoint requests, as many as stages; with one stage there is no rule."""

    def __init__(self, count: int, *, runs_ahead: bool) -> None:
        """runs_ahead: of several, the next step of requests may be launched before the results of
        their last one are in, once that is the oldest of `count` steps."""
        self.count, self._runs_ahead = count, runs_ahead
        self._num_launched = 0

    def share(self, num_requests: int) -> int:
        """The most requests of a step: an even part of all."""
        return -(-num_requests // self.count)

    def launched(self, scheduled: Iterable[Scheduled]) -> None:
        """Number a step that is in flight from now on."""
        self._num_launched += 1
        for item in scheduled:
            item.number = self._num_launched

    def hold(self, sequence: Sequence) -> bool:
        """Returns whether it is in a step that the next one overlaps in the stages."""
        flight = sequence.in_flight
        if self.count == 1 or flight is None:
            return False
        return not self._runs_ahead or self._num_launched - flight.number < self.count - 1
