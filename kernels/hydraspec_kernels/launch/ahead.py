"""Compiling ahead: a step runs once without its kernels, which are compiled meanwhile, all at once.

Between kernels stand operators of torch. Those run, on memory that no kernel has written: harmless
but where it would be indices, which are zeros instead.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

MOST_THREADS = 32

aten = torch.ops.aten
INDEXED = {
    *(aten.index, aten.index_select, aten.gather, aten.embedding),
    *(aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index),
    *(aten.index_copy, aten.index_copy_, aten.index_add, aten.index_add_),
    *(aten.index_fill, aten.index_fill_, aten.scatter, aten.scatter_),
    *(aten.scatter_add, aten.scatter_add_, aten.scatter_reduce, aten.scatter_reduce_),
}


class ZeroIndices(TorchDispatchMode):
    """Whole numbers that say where an operator reads or writes are zeros.

    These are all whole numbers behind its first argument: what it writes is of no interest.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.overloadpacket in INDEXED:
            args = (args[0], *(_zeroed(argument) for argument in args[1:]))
            kwargs = {name: _zeroed(value) for name, value in (kwargs or {}).items()}
        return func(*args, **(kwargs or {}))


def _zeroed(argument: Any) -> Any:
    if isinstance(argument, list | tuple):
        return type(argument)(_zeroed(part) for part in argument)
    if isinstance(argument, Tensor) and not argument.is_floating_point():
        return torch.zeros_like(argument)
    return argument


@contextmanager
def compiled_ahead(device: torch.device) -> Iterator[None]:
    """For calls that run for the sake of their kernels: these are compiled and loaded by a pool of
    threads, all of them once it ends, and launched nowhere. Results are of no use.

    A kernel that cannot be compiled is left to its first launch, which tells why. The process must
    not launch kernels from another thread meanwhile. Elsewhere than on CUDA nothing is different.
    """
    if device.type != "cuda":
        yield
        return
    from hydraspec_kernels.launch import kernel

    with kernel.launches_compile(device, num_threads()), ZeroIndices():
        yield


def num_threads() -> int:
    """The cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return min(MOST_THREADS, cores)
