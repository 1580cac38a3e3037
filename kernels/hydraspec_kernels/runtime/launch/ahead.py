"""Compiling ahead: a step runs once without its kernels, which are then compiled, all at once.

Between kernels stand operators of torch. Products are left out, too, and writes where indices say;
the others run, on memory that nobody has written: harmless but where it would be indices, which are
zeros instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hydraspec_kernels.runtime.launch.forks import num_processes

if TYPE_CHECKING:
    from hydraspec_kernels.runtime.launch.kernel import Compiled

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
    from hydraspec_kernels.runtime.launch.kernel import has_async_compilation

    return has_async_compilation()


@contextmanager
def compiled_ahead(device: torch.device) -> Iterator[Compiled]:
    """For calls that run for the sake of their kernels: these are compiled and loaded, all at once
    when it ends, and launched nowhere. Results are of no use. Only where `can_compile_ahead`.

    A kernel that cannot be compiled is left to its first launch, which tells why. The process must
    not launch kernels from another thread meanwhile.
    """
    from hydraspec_kernels.runtime.launch.kernel import launches_compile

    with launches_compile(device, num_processes()) as compiled, Rehearsing():
        yield compiled
