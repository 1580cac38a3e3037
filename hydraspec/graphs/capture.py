"""Capture and replay of calls as CUDA graphs, whole or in pieces.

Captures of one manager share a memory pool, those of two do not: a graph may be replayed between
two pieces of another manager's, whose tensors it must not touch. Captures happen on a
separate stream. A piece is replayed as soon as it is captured, because the eager call after it
reads what the piece computes.
"""

from __future__ import annotations

import gc
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, Protocol, TypeVar

import torch
from hydraspec_kernels.runtime import breaks
from torch import Tensor

T = TypeVar("T")


class Replayable(Protocol):
    """A captured call."""

    def replay(self) -> None:
        """Run the call again on the present content of its inputs' memory."""
        ...


class GraphBackend(Protocol):
    """Interface for capturing calls; tests have other implementations than CUDA's."""

    is_capturing: bool

    def warm_up(self, run: Callable[[], object]) -> None:
        """Run a call as it will run in a capture, so that compiling and initialising happen now."""
        ...

    def capture(self, run: Callable[[], T], *, in_pieces: bool, pool: str) -> tuple[T, Replayable]:
        """Capture a call, and run it once; returns its outputs, which every replay overwrites, and
        its replay.

        Captures of one `pool` share memory: none of them may be replayed between the pieces of
        another.
        """
        ...

    def num_bytes(self) -> int:
        """Device memory that the captured graphs hold."""
        ...

    def free_bytes(self) -> int:
        """Device memory that captures can still take."""
        ...


class Pieces:
    """Graphs and the eager calls between them, replayed in order."""

    def __init__(self) -> None:
        self.parts: list[Callable[[], None]] = []

    def replay(self) -> None:
        for part in self.parts:
            part()


class KeptOutputs:
    """Memory for outputs of breaks (eager calls between pieces), in captures that share a pool: the
    n-th break of a capture writes where that of an earlier, larger one did. No two of these
    captures are replayed at once.
    """

    def __init__(self) -> None:
        self._tensors: dict[tuple[int, int], Tensor] = {}

    def copied(self, place: int, value: T) -> T:
        """A copy of what break number `place` returned, which `copy_into` may write to."""
        leaves = itertools.count()
        return copied(value, lambda tensor: self._kept((place, next(leaves)), tensor))

    def _kept(self, key: tuple[int, int], tensor: Tensor) -> Tensor:
        before = self._tensors.get(key)
        if before is None or not _holds(before, tensor):
            self._tensors[key] = tensor.clone(memory_format=torch.contiguous_format)
            return self._tensors[key]
        return before[: tensor.shape[0]].copy_(tensor)


def _holds(kept: Tensor, tensor: Tensor) -> bool:
    """Returns whether the first rows of `kept` can hold `tensor`."""
    return (
        0 < tensor.dim() == kept.dim()
        and tensor.shape[0] <= kept.shape[0]
        and (tensor.shape[1:], tensor.dtype) == (kept.shape[1:], kept.dtype)
    )


class PieceCapture(breaks.PieceRecorder):
    """Records a call in pieces: at every break a graph ends, the call runs eagerly into static
    outputs, and the next graph begins.
    """

    def __init__(self, new_graph: Callable[[], OpenGraph], kept: KeptOutputs) -> None:
        self._new_graph = new_graph
        self._open: OpenGraph | None = new_graph()
        self._kept, self._num_breaks = kept, 0
        self.pieces = Pieces()

    def call(self, function: Callable[..., T], args: tuple[Any, ...]) -> T:
        self.close()
        with breaks.recording(None):
            static = self._kept.copied(self._num_breaks, function(*args))
        self._num_breaks += 1

        def again() -> None:
            copy_into(static, function(*args))

        self.pieces.parts.append(again)
        self._open = self._new_graph()
        return static

    def close(self) -> None:
        """End the graph that is open, and run it."""
        assert self._open is not None, "no graph is open inside a break"
        ended, self._open = self._open, None
        replay = ended.end()
        replay()
        self.pieces.parts.append(replay)

    def abandon(self) -> None:
        """End the open graph after a failure, unless the failure was between two graphs."""
        if self._open is not None:
            self._open.abandon()


class OpenGraph(Protocol):
    """A capture under way."""

    def end(self) -> Callable[[], None]:
        """End the capture; returns a call that replays it."""
        ...

    def abandon(self) -> None: ...


class _OpenCudaGraph:
    def __init__(self, pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")

    def end(self) -> Callable[[], None]:
        self._graph.capture_end()
        replay: Callable[[], None] = self._graph.replay
        return replay

    def abandon(self) -> None:
        try:
            self._graph.capture_end()
        except RuntimeError:  # the capture was invalidated, as the error in flight reports
            return


class CudaGraphBackend:
    """torch.cuda graphs on one device."""

    def __init__(self, device: torch.device) -> None:
        self.is_capturing = False
        self._device = device
        self._pools: dict[str, Any] = {}
        self._kept = defaultdict[str, KeptOutputs](KeptOutputs)  # by pool
        self._stream = torch.cuda.Stream(device)
        self._num_bytes = 0

    def warm_up(self, run: Callable[[], object]) -> None:
        with self._aside():
            run()

    def capture(self, run: Callable[[], T], *, in_pieces: bool, pool: str) -> tuple[T, Replayable]:
        if pool not in self._pools:
            self._pools[pool] = torch.cuda.graph_pool_handle()
        handle = self._pools[pool]
        before = torch.cuda.memory_reserved(self._device)
        with self._aside(), _no_collection():
            recorder = PieceCapture(lambda: _OpenCudaGraph(handle), self._kept[pool])
            try:
                with breaks.recording(recorder if in_pieces else None):
                    outputs = run()
            except BaseException:
                recorder.abandon()
                raise
            recorder.close()
        self._num_bytes += max(0, torch.cuda.memory_reserved(self._device) - before)
        return outputs, recorder.pieces

    def num_bytes(self) -> int:
        """Bytes that the captures took from the device, as torch's allocator counts it."""
        return self._num_bytes

    def free_bytes(self) -> int:
        """Bytes that no process holds, after torch's allocator has given back its unused memory."""
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Run the block on the capture stream, in order with the work of the current stream."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        self.is_capturing = True
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            self.is_capturing = False
            current.wait_stream(self._stream)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable garbage collection: freeing a tensor of another stream ends a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def copied(value: T, copy: Callable[[Tensor], Tensor] = Tensor.clone) -> T:
    """A copy of a tensor, of None, or of a tuple or dataclass of those; `copy` copies a tensor."""
    if isinstance(value, Tensor):
        return copy(value)  # type: ignore[return-value]
    if isinstance(value, tuple):
        return tuple(copied(part, copy) for part in value)  # type: ignore[return-value]
    if is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: copied(getattr(value, field.name), copy) for field in fields(value)}
        return type(value)(**parts)
    if value is None:
        return value
    raise TypeError(f"a break returns tensors, tuples or dataclasses, not {type(value).__name__}")


def copy_into(static: object, value: object) -> None:
    """Write the tensors of `value` into those of `static`, which has the same structure."""
    if isinstance(static, Tensor):
        assert isinstance(value, Tensor)
        static.copy_(value)
    elif isinstance(static, tuple):
        assert isinstance(value, tuple)
        for to, part in zip(static, value, strict=True):
            copy_into(to, part)
    elif is_dataclass(static):
        for field in fields(static):
            copy_into(getattr(static, field.name), getattr(value, field.name))
