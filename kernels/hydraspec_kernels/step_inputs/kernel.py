"""Input preparation on the device, one launch each.

A program covers a block of rows and, at the same indices, of requests, which are fewer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hydraspec_kernels.runtime.launch import check_contiguous
from hydraspec_kernels.runtime.launch_kernel import (
    dependent_launch,
    start_next,
    wait_for_inputs,
)
from hydraspec_kernels.sampling.records import SlotTokens, Verdict
from hydraspec_kernels.step_inputs.records import (
    DecodeRows,
    GroupTables,
    LaidBatch,
    NewestRows,
    ParallelLayout,
    RowLayout,
    StepInputs,
    new_cache_rows,
)

BLOCK = 128


@triton.jit
def _cache_row(table_ptr, table_width, request, position, is_real, BLOCK_SIZE: tl.constexpr):
    """The cache row of each position; -1 where it is not real or lies past the block table."""
    block = position // BLOCK_SIZE
    is_real = is_real & (block < table_width)
    entry = tl.load(table_ptr + request * table_width + block, mask=is_real, other=0)
    return tl.where(is_real, entry * BLOCK_SIZE + (position - block * BLOCK_SIZE), -1)


@triton.jit
def store_cache_rows(
    cache_rows_ptr,  # G times [T]
    tables,  # G times [B, P]
    table_widths,
    request,
    position,
    is_real,
    row,
    is_row,
    num_rows,
    BLOCK_SIZES: tl.constexpr,
):
    """Stores the cache rows of `position` in every KV group, as `new_cache_rows` lays them out."""
    stride = (num_rows + 1) // 2 * 2
    for group in tl.static_range(len(BLOCK_SIZES)):
        place = _cache_row(
            tables[group], table_widths[group], request, position, is_real, BLOCK_SIZES[group]
        )
        tl.store(cache_rows_ptr + group * stride + row, place, mask=is_row)


@triton.jit(do_not_specialize=["columns", "num_rows", "num_requests"])
def _prepare_rows(
    ids_ptr,  # [T]
    positions_ptr,  # [T]
    seq_lens_ptr,  # [B]
    drafts_ptr,  # [B, K]
    cache_rows_ptr,  # G times [T]
    num_computed_ptr,  # [S]
    token_ids_ptr,  # [S, L+1]
    slots_ptr,  # [B]
    num_rows_ptr,  # [B]
    num_drafts_ptr,  # [B]
    row_request_ptr,  # [T]
    row_offset_ptr,  # [T]
    tables,  # G times [B, P]
    table_widths,
    columns,
    num_rows,
    num_requests,
    BLOCK_SIZES: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,  # power of two, at least K
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row, is_request = row < num_rows, row < num_requests
    wait_for_inputs(PDL)

    # All loads come before the stores: a warp waits for its stores before it loads further.
    request = tl.load(row_request_ptr + row, mask=is_row, other=-1)
    offset = tl.load(row_offset_ptr + row, mask=is_row, other=0)
    rows_of = tl.load(num_rows_ptr + row, mask=is_request, other=0)
    drafts_of = tl.load(num_drafts_ptr + row, mask=is_request, other=0)
    own_slot = tl.load(slots_ptr + row, mask=is_request, other=0)
    is_real = request >= 0
    is_real = is_real & (offset < tl.load(num_rows_ptr + request, mask=is_real, other=0))
    slot = tl.load(slots_ptr + request, mask=is_real, other=0)
    end = tl.load(num_computed_ptr + own_slot, mask=is_request, other=0) + rows_of
    position = tl.load(num_computed_ptr + slot, mask=is_real, other=0) + offset
    position = tl.where(is_real, position, 0)
    token = tl.load(token_ids_ptr + slot * columns + position, mask=is_real, other=0)
    if K > 0:
        k = tl.arange(0, BLOCK_K)[None, :]
        is_draft = is_request[:, None] & (k < drafts_of[:, None])
        places = (own_slot * columns + end - drafts_of)[:, None] + k
        drafts = tl.load(token_ids_ptr + places, mask=is_draft, other=-1)
        places = drafts_ptr + row[:, None] * K + k
        tl.store(places, drafts, mask=is_request[:, None] & (k < K))
    tl.store(ids_ptr + row, tl.maximum(token, 0), mask=is_row)
    tl.store(positions_ptr + row, position, mask=is_row)
    tl.store(seq_lens_ptr + row, tl.where(rows_of > 0, end, 0), mask=is_request)
    store_cache_rows(
        cache_rows_ptr, tables, table_widths, request, position, is_real, row, is_row, num_rows,
        BLOCK_SIZES,
    )  # fmt: skip


def prepare_rows_kernel(
    state: SlotTokens,
    layout: RowLayout,
    slots: Tensor,
    groups: GroupTables,
    num_speculative_tokens: int,
) -> StepInputs:
    """See `step_inputs.prepare_rows`."""
    per_request = (state.num_computed, state.token_ids, slots, layout.num_rows, layout.num_drafts)
    per_row = (layout.row_request, layout.row_offset)
    check_contiguous(*per_request, *per_row, *groups.tables)
    t, b, k = layout.row_request.shape[0], slots.shape[0], num_speculative_tokens
    stored, cache_rows = new_cache_rows(slots, len(groups.tables), t)
    out = StepInputs(
        input_ids=slots.new_empty(t),
        positions=slots.new_empty(t),
        seq_lens=slots.new_empty(b),
        draft_tokens=slots.new_empty(b, k),
        slot_mapping=cache_rows,
    )
    _prepare_rows[(triton.cdiv(max(t, b), BLOCK),)](
        out.input_ids, out.positions, out.seq_lens, out.draft_tokens, stored,
        *per_request, *per_row,
        tuple(groups.tables), groups.widths, state.token_ids.shape[1], t, b,
        BLOCK_SIZES=tuple(groups.block_sizes), K=k, BLOCK_K=triton.next_power_of_2(max(k, 1)),
        BLOCK=BLOCK, **dependent_launch(slots),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["columns", "num_rows"])
def _shifted_tokens(
    ids_ptr,  # [T]
    token_ids_ptr,  # [S, L+1]
    slots_ptr,  # [B]
    row_request_ptr,  # [T]
    positions_ptr,  # [T]
    columns,
    num_rows,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < num_rows
    wait_for_inputs(PDL)
    request = tl.load(row_request_ptr + row, mask=is_row, other=-1)
    is_real = request >= 0
    position = tl.load(positions_ptr + row, mask=is_real, other=0)
    slot = tl.load(slots_ptr + request, mask=is_real, other=0)
    token = tl.load(token_ids_ptr + slot * columns + position + 1, mask=is_real, other=0)
    tl.store(ids_ptr + row, tl.maximum(token, 0), mask=is_row)


def shifted_tokens_kernel(
    token_ids: Tensor, slots: Tensor, row_request: Tensor, positions: Tensor
) -> Tensor:
    """See `step_inputs.shifted_tokens`."""
    check_contiguous(token_ids, slots, row_request, positions)
    ids, t = torch.empty_like(positions), positions.shape[0]
    _shifted_tokens[(triton.cdiv(t, BLOCK),)](
        ids, token_ids, slots, row_request, positions, token_ids.shape[1], t,
        BLOCK=BLOCK, **dependent_launch(token_ids),
    )  # fmt: skip
    return ids


@triton.jit(do_not_specialize=["num_requests", "width"])
def _newest_rows(
    rows_ptr,  # [B]
    ids_ptr,  # [B]
    positions_ptr,  # [B]
    seq_lens_ptr,  # [B]
    tokens_ptr,  # [B, K+1]
    num_sampled_ptr,  # [B]
    num_rejected_ptr,  # [B]
    query_start_loc_ptr,  # [B+1]
    slots_ptr,  # [B]
    num_computed_ptr,  # [S]
    num_requests,
    width,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_request = request < num_requests
    wait_for_inputs(PDL)
    end = tl.load(query_start_loc_ptr + request + 1, mask=is_request, other=0)
    rejected = tl.load(num_rejected_ptr + request, mask=is_request, other=0)
    newest = tl.load(num_sampled_ptr + request, mask=is_request, other=1) - 1
    slot = tl.load(slots_ptr + request, mask=is_request, other=0)
    place = request.to(tl.int64) * width + tl.maximum(newest, 0)
    token = tl.load(tokens_ptr + place, mask=is_request, other=0)
    length = tl.load(num_computed_ptr + slot, mask=is_request, other=0)
    tl.store(rows_ptr + request, tl.maximum(end - 1 - rejected, 0), mask=is_request)
    tl.store(ids_ptr + request, tl.maximum(token, 0), mask=is_request)
    tl.store(positions_ptr + request, tl.maximum(length - 1, 0), mask=is_request)
    tl.store(seq_lens_ptr + request, length, mask=is_request)


def newest_rows_kernel(verdict: Verdict, batch: LaidBatch, num_computed: Tensor) -> NewestRows:
    """See `step_inputs.newest_rows`."""
    tokens, slots = verdict.tokens, batch.slots
    counts = (verdict.num_sampled, verdict.num_rejected)
    check_contiguous(tokens, *counts, batch.query_start_loc, slots, num_computed)
    b = slots.shape[0]
    found = NewestRows(*(torch.empty_like(slots) for _ in range(4)))
    _newest_rows[(triton.cdiv(b, BLOCK),)](
        found.rows, found.token_ids, found.positions, found.seq_lens,
        tokens, *counts, batch.query_start_loc, slots, num_computed,
        b, tokens.shape[1], BLOCK=BLOCK, **dependent_launch(tokens),
    )  # fmt: skip
    return found


@triton.jit(do_not_specialize=["advance", "num_requests"])
def _decode_rows(
    out_positions_ptr,  # [B]
    out_seq_lens_ptr,  # [B]
    cache_rows_ptr,  # G times [B]
    positions_ptr,  # [B]
    seq_lens_ptr,  # [B]
    tables,  # G times [B, P]
    table_widths,
    advance,
    num_requests,
    BLOCK_SIZES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    request = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    is_request = request < num_requests
    wait_for_inputs(PDL)
    is_real = tl.load(seq_lens_ptr + request, mask=is_request, other=0) > 0
    position = tl.load(positions_ptr + request, mask=is_real, other=0) + advance
    position = tl.where(is_real, position, 0)
    tl.store(out_positions_ptr + request, position, mask=is_request)
    tl.store(out_seq_lens_ptr + request, tl.where(is_real, position + 1, 0), mask=is_request)
    store_cache_rows(
        cache_rows_ptr, tables, table_widths, request, position, is_real, request, is_request,
        num_requests, BLOCK_SIZES,
    )  # fmt: skip


def decode_rows_kernel(
    positions: Tensor, seq_lens: Tensor, advance: int, groups: GroupTables
) -> DecodeRows:
    """See `step_inputs.decode_rows`."""
    check_contiguous(positions, seq_lens, *groups.tables)
    b = positions.shape[0]
    stored, cache_rows = new_cache_rows(positions, len(groups.tables), b)
    out = DecodeRows(torch.empty_like(positions), torch.empty_like(positions), cache_rows)
    _decode_rows[(triton.cdiv(b, BLOCK),)](
        out.positions, out.seq_lens, stored, positions, seq_lens,
        tuple(groups.tables), groups.widths, advance, b,
        BLOCK_SIZES=tuple(groups.block_sizes), BLOCK=BLOCK, **dependent_launch(positions),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["mask_token_id", "columns", "num_masks", "num_rows", "num_requests"])
def _parallel_rows(
    ids_ptr,  # [T']
    positions_ptr,  # [T']
    source_ptr,  # [T']
    is_valid_ptr,  # [T'] int8
    newest_ptr,  # [B]
    out_seq_lens_ptr,  # [B]
    cache_rows_ptr,  # G times [T']
    query_start_loc_ptr,  # [B+1]
    seq_lens_ptr,  # [B]
    num_rejected_ptr,  # [B]
    slots_ptr,  # [B]
    token_ids_ptr,  # [S, L+1]
    tables,  # G times [B, P]
    table_widths,
    mask_token_id,
    columns,
    num_masks,
    num_rows,  # T'
    num_requests,
    BLOCK_SIZES: tl.constexpr,
    HALVINGS: tl.constexpr,  # 2**HALVINGS > B
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    is_row, is_request = row < num_rows, row < num_requests
    wait_for_inputs(PDL)

    # The last request that starts at or before the row: request b starts at q[b] + b * masks.
    request = tl.zeros([BLOCK], tl.int64)
    for step in tl.static_range(HALVINGS):
        tried = request + (1 << (HALVINGS - 1 - step))
        can = is_row & (tried < num_requests)
        start = tl.load(query_start_loc_ptr + tried, mask=can, other=0) + tried * num_masks
        request = tl.where(can & (start <= row), tried, request)
    first = tl.load(query_start_loc_ptr + request, mask=is_row, other=0)
    rows_of = tl.load(query_start_loc_ptr + request + 1, mask=is_row, other=0) - first
    offset = row - (first + request * num_masks)
    length = tl.load(seq_lens_ptr + request, mask=is_row, other=0)
    is_real = is_row & (length > 0) & (offset < rows_of + num_masks)
    rejected = tl.load(num_rejected_ptr + request, mask=is_row, other=0)
    is_valid = is_real & (offset < rows_of - rejected)
    position = tl.where(is_real, length - rows_of + offset, 0)
    slot = tl.load(slots_ptr + request, mask=is_real, other=0)
    token = tl.load(token_ids_ptr + slot * columns + position + 1, mask=is_valid, other=0)
    token = tl.where(is_valid, tl.maximum(token, 0), tl.where(is_real, mask_token_id, 0))
    tl.store(ids_ptr + row, token, mask=is_row)
    tl.store(positions_ptr + row, position, mask=is_row)
    source = first + tl.maximum(tl.minimum(offset, rows_of - 1), 0)
    tl.store(source_ptr + row, tl.where(is_real, source, 0), mask=is_row)
    tl.store(is_valid_ptr + row, is_valid.to(tl.int8), mask=is_row)
    store_cache_rows(
        cache_rows_ptr, tables, table_widths, request, position, is_real, row, is_row, num_rows,
        BLOCK_SIZES,
    )  # fmt: skip

    first = tl.load(query_start_loc_ptr + row, mask=is_request, other=0)
    rows_of = tl.load(query_start_loc_ptr + row + 1, mask=is_request, other=0) - first
    rejected = tl.load(num_rejected_ptr + row, mask=is_request, other=0)
    newest = first + row * num_masks + rows_of - rejected - 1
    tl.store(newest_ptr + row, tl.maximum(newest, 0), mask=is_request)
    length = tl.load(seq_lens_ptr + row, mask=is_request, other=0)
    length = tl.where(length > 0, length + num_masks, 0)
    tl.store(out_seq_lens_ptr + row, length, mask=is_request)


def parallel_rows_kernel(
    token_ids: Tensor,
    batch: LaidBatch,
    num_rejected: Tensor,
    groups: GroupTables,
    *,
    num_masks: int,
    mask_token_id: int,
    num_rows: int,
) -> ParallelLayout:
    """See `step_inputs.parallel_rows`."""
    slots, tables = batch.slots, groups.tables
    per_request = (batch.query_start_loc, batch.seq_lens, num_rejected, slots)
    check_contiguous(*per_request, token_ids, *tables)
    b = slots.shape[0]
    t = num_rows + b * num_masks
    stored, cache_rows = new_cache_rows(slots, len(tables), t)
    laid = ParallelLayout(
        input_ids=slots.new_empty(t),
        positions=slots.new_empty(t),
        source=slots.new_empty(t),
        is_valid=slots.new_empty(t, dtype=torch.bool),
        newest=slots.new_empty(b),
        seq_lens=slots.new_empty(b),
        slot_mapping=cache_rows,
    )
    _parallel_rows[(triton.cdiv(max(t, b), BLOCK),)](
        laid.input_ids, laid.positions, laid.source, laid.is_valid.view(torch.int8),
        laid.newest, laid.seq_lens, stored,
        *per_request, token_ids,
        tuple(tables), groups.widths, mask_token_id, token_ids.shape[1], num_masks, t, b,
        BLOCK_SIZES=tuple(groups.block_sizes), HALVINGS=b.bit_length(), BLOCK=BLOCK,
        **dependent_launch(token_ids),
    )  # fmt: skip
    return laid
