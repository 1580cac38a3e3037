"""The rows of blocks on the device, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hydraspec_kernels.runtime.launch import check_contiguous
from hydraspec_kernels.runtime.launch_kernel import (
    dependent_launch,
    start_next,
    wait_for_inputs,
)
from hydraspec_kernels.step_inputs.kernel import BLOCK, store_cache_rows
from hydraspec_kernels.step_inputs.records import BlockRows, GroupTables, new_cache_rows


@triton.jit(do_not_specialize=["mask_token_id", "block_rows", "num_rows", "num_requests"])
def _block_rows(
    ids_ptr,  # [B * R]
    positions_ptr,  # [B * R]
    out_seq_lens_ptr,  # [B]
    query_start_loc_ptr,  # [B+1]
    cache_rows_ptr,  # G times [B * R]
    token_ids_ptr,  # [B]
    seq_lens_ptr,  # [B]
    tables,  # G times [B, P]
    table_widths,
    mask_token_id,
    block_rows,  # R
    num_rows,  # B * R
    num_requests,
    BLOCK_SIZES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    is_row, is_request = row < num_rows, row < num_requests
    request = row // block_rows
    offset = row - request * block_rows
    wait_for_inputs(PDL)

    length = tl.load(seq_lens_ptr + request, mask=is_row, other=0)
    token = tl.load(token_ids_ptr + request, mask=is_row, other=0)
    own_length = tl.load(seq_lens_ptr + row, mask=is_request, other=0)
    is_real = length > 0
    position = tl.where(is_real, length + offset, 0)
    token = tl.where(is_real, tl.where(offset == 0, token, mask_token_id), 0)
    tl.store(ids_ptr + row, token, mask=is_row)
    tl.store(positions_ptr + row, position, mask=is_row)
    ends = tl.where(own_length > 0, own_length + block_rows, 0)
    tl.store(out_seq_lens_ptr + row, ends, mask=is_request)
    tl.store(query_start_loc_ptr + row, row * block_rows, mask=row <= num_requests)
    store_cache_rows(
        cache_rows_ptr, tables, table_widths, request, position, is_real, row, is_row, num_rows,
        BLOCK_SIZES,
    )  # fmt: skip


def block_rows_kernel(
    token_ids: Tensor, seq_lens: Tensor, groups: GroupTables, *, num_rows: int, mask_token_id: int
) -> BlockRows:
    """See `step_inputs.block_rows`."""
    check_contiguous(token_ids, seq_lens, *groups.tables)
    b = token_ids.shape[0]
    t = b * num_rows
    stored, cache_rows = new_cache_rows(token_ids, len(groups.tables), t)
    laid = BlockRows(
        input_ids=token_ids.new_empty(t),
        positions=token_ids.new_empty(t),
        seq_lens=token_ids.new_empty(b),
        query_start_loc=token_ids.new_empty(b + 1),
        slot_mapping=cache_rows,
    )
    _block_rows[(triton.cdiv(max(t, b + 1), BLOCK),)](
        laid.input_ids, laid.positions, laid.seq_lens, laid.query_start_loc, stored,
        token_ids, seq_lens,
        tuple(groups.tables), groups.widths, mask_token_id, num_rows, t, b,
        BLOCK_SIZES=tuple(groups.block_sizes), BLOCK=BLOCK, **dependent_launch(token_ids),
    )  # fmt: skip
    return laid
