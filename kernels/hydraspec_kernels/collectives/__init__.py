"""Sums and gathers over the ranks of one host, by messages that kernels store in each other's
memory. They are for a few rows; sums may include the residual sum and the norms after it.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from hydraspec_kernels.collectives.records import (
    BOX_BYTES,
    MAX_BOXES,
    Fault,
    Mailboxes,
    num_bytes,
)
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

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def fits_add_norm(h: Tensor) -> bool:
    """Returns whether `add_norm_over_ranks` takes a stream h [T, D]."""
    rows, width = h.shape
    limit = min(MAX_WIDTH, BOX_BYTES // h.element_size())
    return h.dtype in FLOATS and 0 < rows <= MAX_BOXES and _padded(width) <= limit


def fits_all_reduce(x: Tensor) -> bool:
    """Returns whether `all_reduce` takes x."""
    limit = MAX_BOXES * BOX_BYTES // x.element_size()
    return x.dtype in FLOATS and x.is_contiguous() and 0 < x.numel() <= limit


def fits_all_gather(x: Tensor) -> bool:
    """Returns whether `all_gather` takes x."""
    sent = 2 * x.numel() * x.element_size()  # 16 bits travel in 32
    return x.element_size() > 1 and x.is_contiguous() and 0 < sent <= MAX_BOXES * BOX_BYTES


def add_norm_over_ranks(
    boxes: Mailboxes,
    h: Tensor,
    x: Tensor,
    **options: Unpack[AddNormOptions],
) -> AddNorm:
    """Runs `hydraspec_kernels.norms.add_norm` on the sum of every rank's x, in one kernel.

    Each rank's x, itself summed over parts, is rounded to h's dtype; the sum over ranks is in
    float32 in the order of ranks, so h and y have the same bits on every rank. h must satisfy
    `fits_add_norm`.
    """
    from hydraspec_kernels.collectives.kernel import add_norm_cuda  # Triton

    return add_norm_cuda(boxes, h, x, **options)


def all_reduce(boxes: Mailboxes, x: Tensor) -> Tensor:
    """The sum of every rank's x, in float32 in the order of ranks, rounded once; a new tensor.
    x must satisfy `fits_all_reduce`.
    """
    from hydraspec_kernels.collectives.kernel import all_reduce_cuda  # Triton

    return all_reduce_cuda(boxes, x)


def all_gather(boxes: Mailboxes, x: Tensor) -> Tensor:
    """Every rank's x, bit by bit: [size, *x.shape]. x must satisfy `fits_all_gather`."""
    from hydraspec_kernels.collectives.kernel import all_gather_cuda  # Triton

    return all_gather_cuda(boxes, x)


def _padded(width: int) -> int:
    return 1 << (width - 1).bit_length()
