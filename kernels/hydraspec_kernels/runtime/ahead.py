"""Compilation ahead: a step runs once without launching its kernels, which are then all compiled.

torch's operators between the kernels see memory that no kernel has written. Matrix products and
indexed writes are skipped; indices of reads are replaced by zeros; other operators run as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hydraspec_kernels.runtime.forks import num_processes

if TYPE_CHECKING:
    from hydraspec_kernels.runtime.compilation import Compiled

PRODUCTS = {"mm", "addmm"}  # their last two arguments are the factors
# Operators that read by index, or write by index into a new tensor.
READING = {
    *("__getitem__", "index_select", "gather", "take", "take_along_dim", "embedding"),
    *("embedding_bag", "index_put", "index_copy", "index_add", "index_fill", "index_reduce"),
    *("scatter", "scatter_add", "scatter_reduce"),
}
# Operators that write by index into an existing tensor, such as a cache.
WRITING = {
    *("__setitem__", "index_put_", "index_copy_", "index_add_", "index_fill_", "index_reduce_"),
    *("scatter_", "scatter_add_", "scatter_reduce_"),
}


class Rehearsing(TorchFunctionMode):
    """Mode that skips matrix products and indexed writes, and reads with zeros as indices."""

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


_is_rehearsing = False


def is_rehearsing() -> bool:
    """Returns whether launches are only recorded, so that nothing may wait for other processes."""
    return _is_rehearsing


def _zeroed(argument: Any) -> Any:
    if isinstance(argument, list | tuple):
        return type(argument)(_zeroed(part) for part in argument)
    is_index = isinstance(argument, Tensor) and not argument.is_floating_point()
    return torch.zeros_like(argument) if is_index else argument


def num_compiled(device: torch.device) -> int:
    """Number of kernels that this process has compiled, or read from Triton's cache on the disk,
    since the first call.
    """
    if device.type != "cuda":
        return 0
    from hydraspec_kernels.runtime.compilation import count_compiled  # Triton

    return count_compiled()


def can_compile_ahead(device: torch.device) -> bool:
    """Returns whether the device has kernels to compile, and Triton can compile them without
    launching."""
    if device.type != "cuda":
        return False
    from hydraspec_kernels.runtime.compilation import has_async_compilation

    return has_async_compilation()


@contextmanager
def compiled_ahead(device: torch.device) -> Iterator[Compiled]:
    """Context in which launches are recorded instead of run; when it ends, their kernels are
    compiled and loaded in parallel. Results of the calls are undefined. `can_compile_ahead` must be
    true.

    A kernel that fails to compile raises at its first real launch. No other thread of the process
    may launch kernels meanwhile.
    """
    from hydraspec_kernels.runtime.compilation import launches_compile

    global _is_rehearsing
    _is_rehearsing = True
    try:
        with launches_compile(device, num_processes()) as compiled, Rehearsing():
            yield compiled
    finally:
        _is_rehearsing = False
