"""The ranks that share a layer, and what they compute together."""

from __future__ import annotations

import os
from typing import Protocol, Unpack

import torch.distributed as dist
from hydraspec_kernels.norms import AddNorm, AddNormOptions
from torch import Tensor

from hydraspec.parallel.watch import ALONE, Watch

# NVLink multicast is off: a program that uses it can put devices of a shared host out of service.
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


def leave_out_multicast() -> None:
    """Turn NVLink multicast off for every group of CUDA devices that this process makes later."""
    for name, value in NO_MULTICAST.items():
        os.environ.setdefault(name, value)


class LostPeerError(RuntimeError):
    """A rank did not take part in an exchange."""

    def __init__(self, rank: int, waited_s: float) -> None:
        """rank: number of the silent rank in the run. waited_s: seconds."""
        super().__init__(f"rank {rank} sent nothing for {waited_s:g} s in which others waited")
        self.silent_rank = rank


class TensorGroup(Protocol):
    """The tensor-parallel ranks of a stage. Every rank calls the same methods in the same order."""

    rank: int  # among the ranks of this group
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's x, with the same bits on every rank; may overwrite x."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's x as [size, *x.shape], in the order of ranks."""
        ...

    def add_norm(self, h: Tensor, x: Tensor, **options: Unpack[AddNormOptions]) -> AddNorm | None:
        """`hydraspec_kernels.norms.add_norm` of the sum of every rank's x, as one kernel; may
        overwrite x. Returns None, and does nothing, if this group has no kernel for x.
        """
        return None

    def check(self) -> None:
        """Raise LostPeerError if an exchange was given up, whose results are wrong then. It reads
        nothing from the device, and is called when results of a step have arrived.
        """
        return None


class SoloGroup(TensorGroup):
    """A group of one rank."""

    rank, size = 0, 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """Returns x itself."""
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Returns x as [1, *x.shape]."""
        return x.unsqueeze(0)


SOLO = SoloGroup()


class ProcessGroup(TensorGroup):
    """Ranks in separate processes, over a torch.distributed group."""

    def __init__(self, group: dist.ProcessGroup, watch: Watch = ALONE) -> None:
        """watch: ends the host's waits if a rank is lost."""
        self._group, self._watch = group, watch
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def all_reduce(self, x: Tensor) -> Tensor:
        """See TensorGroup."""
        x = x.contiguous()
        self._finish(dist.all_reduce(x, group=self._group, async_op=True), x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """See TensorGroup."""
        gathered = x.new_empty((self.size, *x.shape))
        parts = list(gathered.unbind())
        self._finish(dist.all_gather(parts, x.contiguous(), group=self._group, async_op=True), x)
        return gathered

    def _finish(self, work: dist.Work | None, x: Tensor) -> None:
        assert work is not None, "this rank is of the group"
        if x.is_cuda:
            work.wait()  # the stream waits, not the host
        else:
            self._watch.finish(work)
