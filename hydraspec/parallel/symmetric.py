"""Sums and gathers of tensor-parallel ranks on CUDA devices, by the quickest way for each size.

Few rows go through kernels (hydraspec_kernels.collectives) that store to the memory of the other
ranks' devices, more through torch's two-shot reduction over such memory, and still more, other
dtypes, or devices out of reach through NCCL. Every way gives every rank the same bits, and may be
captured in CUDA graphs; see ADR 21.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Unpack

import torch
import torch.distributed as dist
from hydraspec_kernels import collectives
from hydraspec_kernels.collectives import Mailboxes
from hydraspec_kernels.collectives.memory import found_fault, open_mailboxes, shared_memory
from hydraspec_kernels.norms import AddNorm, AddNormOptions, add_norm
from hydraspec_kernels.runtime.ahead import is_rehearsing
from torch import Tensor

from hydraspec.parallel.group import LostPeerError, TensorGroup, leave_out_multicast

KIB, MIB = 1 << 10, 1 << 20
WAIT_S = 20.0  # for a message; hosts of ranks that run alike differ by milliseconds
ALIGNMENT = 16  # bytes of a rank's part of a two-shot reduction
TWO_SHOT_TYPES = (torch.bfloat16, torch.float32)


@dataclass(slots=True, frozen=True)
class Sizes:
    """The largest arguments, in bytes, for which each way is the quickest; NCCL is for larger."""

    messages: int  # sums, with or without norms
    two_shot: int
    gather: int  # by messages


# By number of ranks, from kernels/benchmarks/bench_all_reduce.py: two on H200s, up to 21 MiB; four
# are estimates.
SIZES = {
    2: Sizes(messages=2 * MIB, two_shot=32 * MIB, gather=256 * KIB),
    4: Sizes(messages=3 * MIB // 2, two_shot=32 * MIB, gather=128 * KIB),
}
OTHER = Sizes(messages=512 * KIB, two_shot=0, gather=64 * KIB)


class SymmetricGroup(TensorGroup):
    """Ranks in processes with a CUDA device each. Calls must be made on one stream at a time."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        sizes: Sizes | None = None,
        wait_s: float = WAIT_S,
    ) -> None:
        """group: a group of NCCL. Every rank calls this at the same time; `wait_s` bounds the wait
        for a message, not that for NCCL or the two-shot reduction.
        """
        leave_out_multicast()
        self._group, self._wait_s = group, wait_s
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._sizes = sizes or SIZES.get(self.size, OTHER)
        self._boxes: Mailboxes | None = None
        self._workspace: Tensor | None = None
        if are_reachable(group, device):  # NCCL has run now, before any capture
            self._boxes = open_mailboxes(group, device, wait_s)
            if self._sizes.two_shot:
                self._workspace = shared_memory(group, device, self._sizes.two_shot)[0]

    def add_norm(self, h: Tensor, x: Tensor, **options: Unpack[AddNormOptions]) -> AddNorm | None:
        """See TensorGroup."""
        if self._boxes is not None and self._sends(h) and collectives.fits_add_norm(h):
            return collectives.add_norm_over_ranks(self._boxes, h, x, **options)
        if x.dim() == 3:
            x = (x[0] if x.shape[0] == 1 else x.sum(0)).to(h.dtype)
        return add_norm(h, self._sum(x.contiguous()), **options)

    def all_reduce(self, x: Tensor) -> Tensor:
        """See TensorGroup."""
        x = x.contiguous()
        if self._boxes is not None and self._sends(x) and collectives.fits_all_reduce(x):
            return collectives.all_reduce(self._boxes, x)
        total = self._sum(x)
        return total if total is x else x.copy_(total)

    def all_gather(self, x: Tensor) -> Tensor:
        """See TensorGroup."""
        x = x.contiguous()
        few = x.numel() * x.element_size() <= self._sizes.gather
        if self._boxes is not None and few and collectives.fits_all_gather(x):
            return collectives.all_gather(self._boxes, x)
        gathered = x.new_empty((self.size, *x.shape))
        if not is_rehearsing():
            dist.all_gather_into_tensor(gathered.view(-1), x.view(-1), group=self._group)
        return gathered

    def check(self) -> None:
        """See TensorGroup."""
        fault = None if self._boxes is None else found_fault(self._boxes)
        if fault is not None:
            peer = dist.get_global_rank(self._group, fault.peer)
            raise LostPeerError(peer, self._wait_s)

    def _sends(self, x: Tensor) -> bool:
        return x.numel() * x.element_size() <= self._sizes.messages

    def _sum(self, x: Tensor) -> Tensor:
        """The sum of every rank's x, in x or in memory that the next call overwrites."""
        if is_rehearsing() or not x.numel():
            return x
        step = ALIGNMENT * self.size // x.element_size()
        count = -(-x.numel() // step) * step
        fits = x.dtype in TWO_SHOT_TYPES and count * x.element_size() <= self._sizes.two_shot
        if self._workspace is None or not fits:
            dist.all_reduce(x, group=self._group)
            return x
        memory = self._workspace.view(x.dtype)[:count]
        total = memory[: x.numel()].view(x.shape).copy_(x)
        _two_shot(memory, self._group)
        return total


def are_reachable(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Returns whether every rank's device can store to every other's; the same answer on every
    rank.

    A rank has to see the others' devices (CUDA_VISIBLE_DEVICES), on one host.
    """
    visible = {_uuid(index): index for index in range(torch.cuda.device_count())}
    own = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
    ranks: list[tuple[str, str]] = [("", "")] * dist.get_world_size(group)
    dist.all_gather_object(ranks, (socket.gethostname(), _uuid(own.index)), group=group)
    peers = [visible.get(uuid) for host, uuid in ranks if host == socket.gethostname()]
    can = len(peers) == len(ranks) == len(set(peers)) and all(
        peer is not None
        and (peer == own.index or torch.cuda.can_device_access_peer(own.index, peer))
        for peer in peers
    )
    agreed = torch.tensor(int(can), device=device)
    dist.all_reduce(agreed, dist.ReduceOp.MIN, group=group)
    return bool(agreed.item())


def _two_shot(x: Tensor, group: dist.ProcessGroup) -> None:
    torch.ops.symm_mem.two_shot_all_reduce_(x, "sum", group.group_name)


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)
