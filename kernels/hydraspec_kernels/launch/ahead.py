"""Compiling ahead: a step runs once without its kernels, which are then compiled, all at once.

Between kernels stand operators of torch. Products are left out, too, and writes where indices say;
the others run, on memory that nobody has written: harmless but where it would be indices, which are
zeros instead.
"""

from __future__ import annotations

import gc
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

MOST_PROCESSES = 32
WORD = 4  # bytes of a call's number
SECONDS_BETWEEN_LOOKS = 0.01
GRACE_S = 1.0  # from an interrupt to the end

PRODUCTS = {"mm", "addmm"}  # their last two arguments are what is multiplied
# Operators that read where indices say, or write into something new.
READING = {
    *("__getitem__", "index_select", "gather", "take", "take_along_dim", "embedding"),
    *("embedding_bag", "index_put", "index_copy", "index_add", "index_fill", "index_reduce"),
    *("scatter", "scatter_add", "scatter_reduce"),
}
# Those that write into what is there: a cache, say, which would keep it.
WRITING = {
    *("__setitem__", "index_put_", "index_copy_", "index_add_", "index_fill_", "index_reduce_"),
    *("scatter_", "scatter_add_", "scatter_reduce_"),
}


class Rehearsing(TorchFunctionMode):
    """Products are left out, and so are writes where indices say. Whole numbers that say where an
    operator reads are zeros.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in PRODUCTS and "out" not in kwargs:
            left, right = args[-2:]
            return left.new_empty(left.shape[0], right.shape[1])
        if name in WRITING:
            return args[0]
        if name in READING:
            args = tuple(map(_zeroed, args))
            kwargs = {key: _zeroed(value) for key, value in kwargs.items()}
        return func(*args, **kwargs)


def _zeroed(argument: Any) -> Any:
    if isinstance(argument, list | tuple):
        return type(argument)(_zeroed(part) for part in argument)
    is_index = isinstance(argument, Tensor) and not argument.is_floating_point()
    return torch.zeros_like(argument) if is_index else argument


def can_compile_ahead(device: torch.device) -> bool:
    """Whether there is anything to compile, and a Triton that can do it without launching."""
    if device.type != "cuda":
        return False
    from hydraspec_kernels.launch.kernel import has_async_compilation

    return has_async_compilation()


@dataclass(slots=True)
class Compiled:
    """What compiling ahead did; known once it has ended."""

    num_kernels: int = 0
    stepping_s: float = 0.0  # the calls
    compiling_s: float = 0.0
    loading_s: float = 0.0


@contextmanager
def compiled_ahead(device: torch.device) -> Iterator[Compiled]:
    """For calls that run for the sake of their kernels: these are compiled and loaded, all at once
    when it ends, and launched nowhere. Results are of no use. Only where `can_compile_ahead`.

    A kernel that cannot be compiled is left to its first launch, which tells why. The process must
    not launch kernels from another thread meanwhile.
    """
    from hydraspec_kernels.launch.kernel import launches_compile

    with launches_compile(device, num_processes()) as compiled, Rehearsing():
        yield compiled


def num_processes() -> int:
    """The cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return min(MOST_PROCESSES, cores)


def run_in_forks(calls: Sequence[Callable[[], object]], count: int, timeout_s: float) -> None:
    """Make every call in one of `count` forked processes, for what it leaves on the disk.

    Their errors are dropped, and after `timeout_s` seconds so is what is not done. The calls must
    not use the device, which a fork cannot.
    """
    if not hasattr(os, "fork"):
        return
    take, give = os.pipe()
    with os.fdopen(give, "wb") as numbers:
        numbers.write(b"".join(number.to_bytes(WORD, "little") for number in range(len(calls))))
    children = set[int]()
    try:
        with suppress(OSError):  # as many as there may be
            for _ in range(min(count, len(calls))):
                children.add(_fork(calls, take))
        _await(children, timeout_s)
    finally:
        os.close(take)
        _end(children)


def _await(children: set[int], timeout_s: float) -> None:
    """Takes out of the set who has ended."""
    deadline = time.monotonic() + timeout_s
    while children and time.monotonic() < deadline:
        children -= {child for child in children if _has_ended(child, os.WNOHANG)}
        time.sleep(SECONDS_BETWEEN_LOOKS)


def _end(children: set[int]) -> None:
    """An interrupt first: at it they end the compilers that they run, and remove their files."""
    try:
        _kill(children, signal.SIGINT)
        _await(children, GRACE_S)
    finally:
        _kill(children, signal.SIGKILL)
        for child in children:
            _has_ended(child, 0)


def _kill(children: set[int], number: int) -> None:
    for child in children:
        with suppress(ProcessLookupError):
            os.kill(child, number)


def _fork(calls: Sequence[Callable[[], object]], take: int) -> int:
    """A process that makes those calls whose numbers it gets hold of."""
    parent = os.getpid()
    # Interrupted before its `try`, a child would go on as another parent.
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with warnings.catch_warnings():
            # Of locks that other threads hold: a child that waits for one is ended in time.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child:
            return child
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
            gc.disable()  # it would free memory of the device
            while os.getppid() == parent and (word := os.read(take, WORD)):
                with suppress(Exception):
                    calls[int.from_bytes(word, "little")]()
        finally:
            os._exit(0)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


def _has_ended(child: int, options: int) -> bool:
    try:
        return os.waitpid(child, options)[0] == child
    except ChildProcessError:  # somebody else has asked
        return True
