"""Pipeline stages as threads of the test's process."""

from __future__ import annotations

import threading
from queue import Empty, Queue
from typing import Any

from torch import Tensor

WAIT_S = 60.0  # for the slowest stage


class Lane:
    """What one stage says to another, in order. Broken: whoever waits raises BrokenBarrierError."""

    _BROKEN = object()

    def __init__(self) -> None:
        self._queue: Queue[Any] = Queue()

    def put(self, x: Any) -> None:
        self._queue.put(x)

    def get(self) -> Any:
        try:
            found = self._queue.get(timeout=WAIT_S)
        except Empty:
            raise threading.BrokenBarrierError(f"nothing came for {WAIT_S} s") from None
        if found is self._BROKEN:
            self.abort()
            raise threading.BrokenBarrierError
        return found

    def abort(self) -> None:
        self._queue.put(self._BROKEN)

    @property
    def is_empty(self) -> bool:
        return self._queue.empty()


class Lanes:
    """Those of one pipeline."""

    def __init__(self, num_stages: int) -> None:
        self.borders = [Lane() for _ in range(num_stages - 1)]
        self.results = [Lane() for _ in range(num_stages - 1)]

    def abort(self) -> None:
        for lane in self.borders + self.results:
            lane.abort()

    @property
    def are_empty(self) -> bool:
        return all(lane.is_empty for lane in self.borders + self.results)


class ThreadLink:
    """One thread's end of a pipeline; see StageLink. Copies what is sent, as wires do."""

    def __init__(self, lanes: Lanes, index: int) -> None:
        self.lanes, self._index = lanes, index
        self.num_sent_bytes = 0

    def send(self, x: Tensor) -> None:
        self.num_sent_bytes += x.nbytes
        self.lanes.borders[self._index].put(x.clone())

    def receive(self, x: Tensor) -> None:
        _fill(x, self.lanes.borders[self._index - 1].get())

    def send_results(self, x: Tensor) -> None:
        for lane in self.lanes.results:
            lane.put(x.clone())

    def receive_results(self, x: Tensor) -> None:
        _fill(x, self.lanes.results[self._index].get())

    def share(self, found: Any) -> Any:
        if self._index < len(self.lanes.results):
            return self.lanes.results[self._index].get()
        for lane in self.lanes.results:
            lane.put(found)
        return found


def _fill(x: Tensor, sent: Tensor) -> None:
    assert x.is_contiguous()
    assert (x.shape, x.dtype) == (sent.shape, sent.dtype), (x.shape, sent.shape)
    x.copy_(sent)
