"""Memory of one rank's device that the devices of other ranks load from and store to."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from hydraspec_kernels.collectives.records import MAX_BOXES, Fault, Mailboxes, num_bytes


def open_mailboxes(group: dist.ProcessGroup, device: torch.device, wait_s: float) -> Mailboxes:
    """Opens empty boxes for every rank of an NCCL group. Every rank calls this at the same time."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    boxes, addresses = shared_memory(group, device, num_bytes(size))
    boxes.fill_(0xFF)
    fault = torch.zeros(1, dtype=torch.int64).pin_memory()  # its address is the device's too
    control = torch.tensor([fault.data_ptr(), round(wait_s * 1e9)], device=device)
    counts = torch.zeros(MAX_BOXES, dtype=torch.int32, device=device)
    dist.all_reduce(counts, group=group)  # a message must not arrive before its box is empty
    torch.cuda.synchronize(device)
    return Mailboxes(
        rank=rank,
        size=size,
        boxes=boxes,
        peers=tuple(addresses[(rank + 1 + i) % size] for i in range(size)),
        counts=counts,
        control=control,
        fault=fault,
    )


def found_fault(boxes: Mailboxes) -> Fault | None:
    """The first message that was given up, after which results are wrong; None if none was."""
    word = int(boxes.fault.item())
    return Fault.of(word) if word else None


def shared_memory(
    group: dist.ProcessGroup, device: torch.device, size: int
) -> tuple[Tensor, list[int]]:
    """Shared memory of `size` bytes on this rank, and the addresses of every rank's memory as this
    device sees them. Every rank calls this at the same time.
    """
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    memory = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
    handle = symmetric_memory.rendezvous(memory, group)
    bases: list[int] = handle.buffer_ptrs  # of allocations; a pool may place the memory inside one
    offset = torch.tensor([memory.data_ptr() - bases[dist.get_rank(group)]], device=device)
    offsets = torch.empty(len(bases), dtype=offset.dtype, device=device)
    dist.all_gather_into_tensor(offsets, offset, group=group)
    return memory, [base + at for base, at in zip(bases, offsets.tolist(), strict=True)]
