"""Graphs by the shape of the batch they were captured for, and the choice of one for a batch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from hydraspec.graphs.capture import GraphBackend, Replayable
from hydraspec.graphs.progress import progress_bar

log = logging.getLogger(__name__)

MAX_SERVED = 4096  # batch shapes whose graph is remembered

I = TypeVar("I")  # noqa: E741  inputs of the callable
O = TypeVar("O")  # noqa: E741  its outputs


@dataclass(slots=True, frozen=True, kw_only=True)
class Descriptor:
    """The padded shape of a batch, and `variant`, the host's facts that its code path depends on.

    rows_per_request None: mixed, any split of the rows over the requests in which none has more
    than `most_rows` (None: any number).
    """

    num_requests: int
    num_rows: int
    rows_per_request: int | None
    most_rows: int | None = None
    variant: Hashable = ()

    def covers(self, other: Descriptor) -> bool:
        """Returns whether a batch of the shape `other` can be padded to this shape."""
        return (
            self.variant == other.variant
            and self.num_requests >= other.num_requests
            and self.num_rows >= other.num_rows
            and self.rows_per_request in (None, other.rows_per_request)
            and self.most_rows in (None, other.most_rows)
        )


@dataclass(slots=True, frozen=True)
class Captured(Generic[I, O]):
    """A captured call: write `inputs` in place, replay, read `outputs`. Both keep their memory."""

    descriptor: Descriptor
    inputs: I
    outputs: O
    graph: Replayable

    def replay(self) -> O:
        """Run the call on the present content of `inputs`; returns `outputs`."""
        self.graph.replay()
        return self.outputs


class GraphManager(Generic[I, O]):
    """Captures one callable over descriptors. Managers of the same name share graph memory.

    The callable is given with each capture and not kept: it is a method of an object that keeps
    this manager, whose memory would then be freed by a garbage collection only. Outputs stay valid
    until the next replay of any graph of the manager.
    """

    def __init__(
        self,
        name: str,
        backend: GraphBackend,
        *,
        in_pieces: Callable[[Descriptor], bool] = lambda descriptor: False,
    ) -> None:
        self.name, self.backend = name, backend
        self.is_paused = False  # nothing is served: everything runs eagerly
        self.num_captured = 0  # over all time, graphs that were replaced included
        self._in_pieces = in_pieces
        self._graphs: dict[Descriptor, Captured[I, O]] = {}
        self._served: dict[Descriptor, Captured[I, O] | None] = {}  # answers of dispatch

    def has(self, descriptor: Descriptor) -> bool:
        """Returns whether exactly this shape is captured."""
        return descriptor in self._graphs

    @property
    def descriptors(self) -> list[Descriptor]:
        """Captured shapes, smallest first."""
        return sorted(self._graphs, key=_size)

    def capture_all(
        self,
        descriptors: list[Descriptor],
        capture: Callable[[Descriptor], object],
    ) -> None:
        """Call `capture` from large to small, so that small graphs reuse the memory of large ones;
        each is logged with its place in the count, above a bar on a terminal.
        """
        ordered = sorted(descriptors, key=_size, reverse=True)
        with progress_bar(f"capturing {self.name} graphs", len(ordered)) as advance:
            for number, descriptor in enumerate(ordered, 1):
                start = time.perf_counter()
                capture(descriptor)
                log.info(
                    "%s graph %d of %d: %s, %.2f s",
                    *(self.name, number, len(ordered), _words(descriptor)),
                    time.perf_counter() - start,
                )
                advance()

    def capture(
        self,
        descriptor: Descriptor,
        make_inputs: Callable[[Descriptor], I],
        run: Callable[[I], O],
    ) -> Captured[I, O]:
        """Warm up, then capture `run`; the graph replaces an older one of the same descriptor.

        `make_inputs` is called anew for the warm-up and for the capture: what a first use
        initialises must happen in the capture too.
        """
        backend, in_pieces = self.backend, self._in_pieces(descriptor)
        warm = make_inputs(descriptor)
        try:
            backend.warm_up(lambda: run(warm))
            inputs = make_inputs(descriptor)
            outputs, graph = backend.capture(
                lambda: run(inputs), in_pieces=in_pieces, pool=self.name
            )
        except Exception as error:
            error.add_note(
                f"while capturing the {self.name} graph of {_words(descriptor)}; "
                "cudagraph=none runs without graphs"
            )
            raise
        found = Captured(descriptor, inputs, outputs, graph)
        self._graphs[descriptor] = found
        self.num_captured += 1
        self._served.clear()
        return found

    def drop(self, descriptor: Descriptor) -> None:
        """Forget a graph, if there is one."""
        self._graphs.pop(descriptor, None)
        self._served.clear()

    def dispatch(self, wanted: Descriptor) -> Captured[I, O] | None:
        """The smallest graph that a batch of shape `wanted` can be padded to; None: run it eagerly.

        A graph for this very split of rows comes before a mixed one of the same size; a size
        without a fitting graph falls through to larger ones. Returns None during a capture.
        """
        if self.is_paused or self.backend.is_capturing:
            return None
        if wanted not in self._served:
            fitting = [found for found in self._graphs if found.covers(wanted)]
            best = min(fitting, key=_size, default=None)
            if len(self._served) >= MAX_SERVED:
                self._served.clear()
            self._served[wanted] = None if best is None else self._graphs[best]
        return self._served[wanted]


def _size(descriptor: Descriptor) -> tuple[int, bool, int]:
    return descriptor.num_rows, descriptor.rows_per_request is None, descriptor.num_requests


def _words(descriptor: Descriptor) -> str:
    rows, most = descriptor.rows_per_request, descriptor.most_rows
    split = f"{rows} each" if rows is not None else f"up to {most} each" if most else "mixed"
    return f"{descriptor.num_requests} requests, {descriptor.num_rows} rows ({split})"
