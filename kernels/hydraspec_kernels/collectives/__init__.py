"""Sums and gathers over the ranks of one host, by messages that kernels store in each other's
memory. For a few rows; sums may include the residual sum and the norms after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from hydraspec_kernels.norms import MAX_WIDTH, AddNorm, AddNormOptions

__all__ = [
    "MAX_BOXES",
    "Fault",
    "Mailboxes",
    "add_norm_over_ranks",
    "all_gather",
    "all_reduce",
    "fits_add_norm",
    "fits_all_gather",
    "fits_all_reduce",
    "num_bytes",
]

# A program has one box. The programs of a launch wait for each other across ranks, so all of them
# have to run at once: fewer than an H100 or H200 has SMs.
MAX_BOXES = 128
BOX_BYTES = 32768
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(slots=True, frozen=True)
class Fault:
    """A message that did not arrive in time."""

    peer: int  # the rank that did not send it
    box: int
    count: int  # messages that had arrived in this box before, modulo 2^32

    @classmethod
    def of(cls, word: int) -> Fault:
        """From what a kernel wrote: bit 0 is set; then peer, box and count from bits 8, 16, 32."""
        return cls(word >> 8 & 0xFF, word >> 16 & 0xFFFF, word >> 32 & 0xFFFFFFFF)


@dataclass(slots=True, frozen=True)
class Mailboxes:
    """One rank's end of the message boxes of `size` ranks.

    Every rank has boxes [2, size, MAX_BOXES, BOX_BYTES]: for alternating messages, from each rank.
    All bits are set where no message is. Ranks make the same calls in the same order, on one stream
    each; a call that was not made by every rank leaves the boxes unusable.
    """

    rank: int
    size: int
    boxes: Tensor  # this rank's, uint8
    peers: tuple[int, ...]  # addresses of every rank's boxes: rank + 1, rank + 2, ..., rank
    counts: Tensor  # [MAX_BOXES] int32: messages received
    control: Tensor  # [2] int64: address of `fault`, nanoseconds to wait for a message
    fault: Tensor  # [1] int64 in pinned host memory: 0, or see `Fault.of`


def num_bytes(size: int) -> int:
    """Bytes of a rank's boxes."""
    return 2 * size * MAX_BOXES * BOX_BYTES


def fits_add_norm(h: Tensor) -> bool:
    """Whether `add_norm_over_ranks` takes a stream h [T, D]."""
    rows, width = h.shape
    limit = min(MAX_WIDTH, BOX_BYTES // h.element_size())
    return h.dtype in FLOATS and 0 < rows <= MAX_BOXES and _padded(width) <= limit


def fits_all_reduce(x: Tensor) -> bool:
    """Whether `all_reduce` takes x."""
    limit = MAX_BOXES * BOX_BYTES // x.element_size()
    return x.dtype in FLOATS and x.is_contiguous() and 0 < x.numel() <= limit


def fits_all_gather(x: Tensor) -> bool:
    """Whether `all_gather` takes x."""
    sent = 2 * x.numel() * x.element_size()  # 16 bits travel in 32
    return x.element_size() > 1 and x.is_contiguous() and 0 < sent <= MAX_BOXES * BOX_BYTES


def add_norm_over_ranks(
    boxes: Mailboxes,
    h: Tensor,
    x: Tensor,
    **options: Unpack[AddNormOptions],
) -> AddNorm:
    """`hydraspec_kernels.norms.add_norm` of the sum of every rank's x, in one kernel.

    Each rank's x, itself summed over parts, is rounded to h's dtype; the sum over ranks is of
    float32 in the order of ranks, so h and y have the same bits on every rank. `fits_add_norm`.
    """
    from hydraspec_kernels.collectives.kernel import add_norm_cuda  # Triton

    return add_norm_cuda(boxes, h, x, **options)


def all_reduce(boxes: Mailboxes, x: Tensor) -> Tensor:
    """The sum of every rank's x, of float32 in the order of ranks, rounded once; a new tensor.
    `fits_all_reduce`.
    """
    from hydraspec_kernels.collectives.kernel import all_reduce_cuda  # Triton

    return all_reduce_cuda(boxes, x)


def all_gather(boxes: Mailboxes, x: Tensor) -> Tensor:
    """[size, *x.shape]: every rank's x, bit by bit. `fits_all_gather`."""
    from hydraspec_kernels.collectives.kernel import all_gather_cuda  # Triton

    return all_gather_cuda(boxes, x)


def _padded(width: int) -> int:
    return 1 << (width - 1).bit_length()
