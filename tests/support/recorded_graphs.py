"""Stand-ins for CUDA graphs that run anywhere.

`RecordedOps` is what a CUDA graph is, on a CPU: a capture keeps the operations and the memory they
read and write, and a replay runs these again into the same memory. No Python of the engine runs in
a replay, so a number of the host that a capture froze stays frozen, and a tensor that is not
written anew keeps what it held. `CalledAgain` calls the Python again, into the same outputs: eager
mode at the padded shapes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from enum import Enum, auto
from functools import cache
from typing import Any, TypeVar

import torch
from hydraspec_kernels.runtime import breaks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hydraspec.graphs.capture import KeptOutputs, PieceCapture, Replayable, copy_into

T = TypeVar("T")
AMPLE = 1 << 60  # bytes
_NESTED = (list, tuple)


class OpRecorder(TorchDispatchMode):
    """Keeps every operation that computes; views are kept by their memory."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Callable[[], object]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No recording is compiled, and torch's guard against that doubles the time of a call."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = _kind_of(func)
        if kind is _Kind.asks:
            raise AssertionError(f"{func} asks the device in a capture")
        out = func(*args, **kwargs)
        if kind is _Kind.writes:
            self.ops.append(lambda: func(*args, **kwargs))
        elif kind is _Kind.computes:
            if out.numel():
                self.ops.append(lambda: out.copy_(func(*args, **kwargs)))
        elif kind is _Kind.either:
            made = _tensors(out)
            memory = set(map(_memory_of, _tensors((args, tuple(kwargs.values())))))
            if any(x.numel() and _memory_of(x) not in memory for x in made):
                self.ops.append(lambda: _again(func, args, kwargs, made))
        return out


class _Kind(Enum):
    asks = auto()
    writes = auto()  # into its arguments
    computes = auto()  # one tensor, in memory of its own
    views = auto()
    either = auto()  # computes or views, or gives several tensors


@cache
def _kind_of(func: Any) -> _Kind:
    """What an operation does by its schema, where that says it."""
    if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
        return _Kind.asks
    if func._schema.is_mutable:
        return _Kind.writes
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        return _Kind.either  # reshape and to, which copy if they must
    returns = func._schema.returns
    if all(each.alias_info is not None for each in returns):
        return _Kind.views
    one = len(returns) == 1 and isinstance(returns[0].type, torch.TensorType)
    return _Kind.computes if one else _Kind.either


def _again(func: Any, args: Any, kwargs: Any, made: list[Tensor]) -> None:
    for to, value in zip(made, _tensors(func(*args, **kwargs)), strict=True):
        to.copy_(value)


def _tensors(values: Any) -> list[Tensor]:
    """The tensors of an operation's arguments or results, which nest lists and tuples only."""
    if isinstance(values, Tensor):
        return [values]
    found: list[Tensor] = []
    if isinstance(values, _NESTED):
        for value in values:
            if isinstance(value, Tensor):
                found.append(value)
            elif isinstance(value, _NESTED):
                found += _tensors(value)
    return found


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _OpenRecording:
    def __init__(self) -> None:
        self._recorder = OpRecorder()
        self._recorder.__enter__()

    def end(self) -> Callable[[], None]:
        self._recorder.__exit__(None, None, None)
        ops = self._recorder.ops
        ran = False

        def replay() -> None:
            nonlocal ran
            if not ran:  # the capture itself has computed everything
                ran = True
                return
            for op in ops:
                op()

        return replay

    def abandon(self) -> None:
        self._recorder.__exit__(None, None, None)


class RecordedOps:
    """A GraphBackend whose graphs are lists of operations."""

    def __init__(self) -> None:
        self.is_capturing = False
        self.num_captures = 0
        self.num_replays = 0
        self.num_pieces: list[int] = []
        self._kept = defaultdict[str, KeptOutputs](KeptOutputs)

    def warm_up(self, run: Callable[[], object]) -> None:
        self.is_capturing = True
        run()
        self.is_capturing = False

    def capture(
        self, run: Callable[[], T], *, in_pieces: bool, pool: str = ""
    ) -> tuple[T, Replayable]:
        self.is_capturing = True
        recorder = PieceCapture(_OpenRecording, self._kept[pool])
        try:
            with breaks.recording(recorder if in_pieces else None):
                out = run()
        except BaseException:
            recorder.abandon()
            raise
        finally:
            self.is_capturing = False
        recorder.close()
        self.num_captures += 1
        self.num_pieces.append(len(recorder.pieces.parts))
        return out, _Counted(self, recorder.pieces)

    def num_bytes(self) -> int:
        return 0

    def free_bytes(self) -> int:
        return AMPLE


class _Counted:
    def __init__(self, backend: RecordedOps, graph: Replayable) -> None:
        self._backend, self._graph = backend, graph

    def replay(self) -> None:
        self._backend.num_replays += 1
        self._graph.replay()


class CalledAgain:
    """A GraphBackend that replays by calling: eager steps at the shapes of graphs. It keeps what it
    calls, and so its engine in a cycle of references, which graphs do not."""

    def __init__(self) -> None:
        self.is_capturing = False

    def warm_up(self, run: Callable[[], object]) -> None:
        self.is_capturing = True
        run()
        self.is_capturing = False

    def capture(
        self, run: Callable[[], T], *, in_pieces: bool, pool: str = ""
    ) -> tuple[T, Replayable]:
        self.is_capturing = True
        out = run()
        self.is_capturing = False
        return out, _Call(run, out)

    def num_bytes(self) -> int:
        return 0

    def free_bytes(self) -> int:
        return AMPLE


class _Call:
    def __init__(self, run: Callable[[], object], out: object) -> None:
        self._run, self._out = run, out

    def replay(self) -> None:
        copy_into(self._out, self._run())


class SmallMemory(RecordedOps):
    """Every capture takes a byte; of those that come late, few find one."""

    def __init__(self) -> None:
        super().__init__()
        self.num_left, self.num_refused = 1000, 0

    def capture(self, run: Callable[[], T], *, in_pieces: bool, pool: str) -> tuple[T, Replayable]:
        if not self.num_left:
            self.num_refused += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0")
        self.num_left -= 1
        return super().capture(run, in_pieces=in_pieces, pool=pool)

    def num_bytes(self) -> int:
        return self.num_captures

    def free_bytes(self) -> int:
        return AMPLE if self.num_left else 0
