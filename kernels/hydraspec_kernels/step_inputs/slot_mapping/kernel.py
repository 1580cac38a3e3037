"""Cache rows of token rows on the device, and the piece of it that other kernels share."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hydraspec_kernels.runtime.launch_kernel import dependent_launch, start_next, wait_for_inputs

BLOCK = 128


@triton.jit
def cache_row(table_ptr, table_width, request, position, is_real, BLOCK_SIZE: tl.constexpr):
    """The cache row of each position; -1 where it is not real or lies behind the block table."""
    block = position // BLOCK_SIZE
    is_real = is_real & (block < table_width)
    entry = tl.load(table_ptr + request * table_width + block, mask=is_real, other=0)
    return tl.where(is_real, entry * BLOCK_SIZE + (position - block * BLOCK_SIZE), -1)


@triton.jit(do_not_specialize=["table_width", "num_rows"])
def _slot_mapping(
    slots_ptr,  # [T]
    table_ptr,  # [B, P]
    request_ptr,  # [T]
    positions_ptr,  # [T]
    table_width,
    num_rows,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < num_rows
    wait_for_inputs(PDL)
    request = tl.load(request_ptr + row, mask=is_row, other=-1)
    position = tl.load(positions_ptr + row, mask=is_row, other=0)
    place = cache_row(table_ptr, table_width, request, position, request >= 0, BLOCK_SIZE)
    tl.store(slots_ptr + row, place, mask=is_row)


def slot_mapping_kernel(
    table: Tensor, request: Tensor, positions: Tensor, block_size: int
) -> Tensor:
    """See `slot_mapping`."""
    assert table.is_contiguous()
    assert request.is_contiguous()
    assert positions.is_contiguous()
    out = torch.empty_like(positions)
    num_rows = positions.shape[0]
    if num_rows:
        _slot_mapping[(triton.cdiv(num_rows, BLOCK),)](
            out, table, request, positions, table.shape[1], num_rows,
            BLOCK_SIZE=block_size, BLOCK=BLOCK, **dependent_launch(positions),
        )  # fmt: skip
    return out
