"""Input preparation in plain torch: the specification, which runs on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from hydraspec_kernels.sampling.records import SlotTokens, Verdict
from hydraspec_kernels.step_inputs.records import (
    BlockRows,
    DecodeRows,
    GroupTables,
    LaidBatch,
    NewestRows,
    ParallelLayout,
    RowLayout,
    StepInputs,
)


def slot_mapping_reference(
    table: Tensor, request: Tensor, positions: Tensor, block_size: int, *, padded: bool = False
) -> Tensor:
    """The cache row of each token row: table [B, P] block ids, request [T], positions p [T] ->
    table[request, p // size] * size + p % size. With `padded`, rows of request -1 give -1.
    """
    blocks = positions.div(block_size, rounding_mode="floor")
    entry = (request * table.shape[1]).add_(blocks)
    if padded:
        entry = entry.clamp_min_(0)
    rows = table.reshape(-1).index_select(0, entry).mul_(block_size)
    rows = rows.add_(positions).sub_(blocks.mul_(block_size))
    return rows.where(request >= 0, -1) if padded else rows


def _slot_mappings(
    groups: GroupTables, request: Tensor, positions: Tensor, padded: bool
) -> list[Tensor]:
    """The cache rows [T] per KV group; request -1 (where `padded`) gives -1."""
    return [
        slot_mapping_reference(table, request, positions, size, padded=padded)
        for table, size in zip(groups.tables, groups.block_sizes, strict=True)
    ]


def prepare_rows_reference(
    state: SlotTokens,
    layout: RowLayout,
    slots: Tensor,
    groups: GroupTables,
    num_speculative_tokens: int,
    *,
    padded: bool,
) -> StepInputs:
    """See `step_inputs.prepare_rows`."""
    token_ids, num_rows, num_drafts = state.token_ids, layout.num_rows, layout.num_drafts
    row_request, row_offset = layout.row_request, layout.row_offset
    columns, first = token_ids.shape[1], state.num_computed.index_select(0, slots)
    request, seq_lens = row_request, first + num_rows
    if padded:
        request = row_request.clamp_min(0)
        seq_lens = seq_lens.where(num_rows > 0, 0)
        row_request = row_request.where(row_offset < num_rows.index_select(0, request), -1)
    positions = first.index_select(0, request).add_(row_offset)
    if padded:
        positions = positions.where(row_request >= 0, 0)
    start = slots * columns
    ids = token_ids.view(-1).index_select(0, start.index_select(0, request).add_(positions))
    ids = ids.clamp_min_(0)
    if padded:
        ids = ids.where(row_request >= 0, 0)
    draft = torch.arange(num_speculative_tokens, device=slots.device)
    places = (start + first).add_(num_rows).sub_(num_drafts).unsqueeze(1) + draft
    drafts = token_ids.view(-1).take(places)
    return StepInputs(
        input_ids=ids,
        positions=positions,
        seq_lens=seq_lens,
        draft_tokens=drafts.masked_fill_(draft >= num_drafts.unsqueeze(1), -1),
        slot_mapping=_slot_mappings(groups, row_request, positions, padded),
    )


def shifted_tokens_reference(
    token_ids: Tensor,
    slots: Tensor,
    row_request: Tensor,
    positions: Tensor,
    *,
    padded: bool = False,
) -> Tensor:
    """See `step_inputs.shifted_tokens`."""
    if padded:
        shifted = shifted_tokens_reference(token_ids, slots, row_request.clamp_min(0), positions)
        return shifted.where(row_request >= 0, 0)
    place = (slots * token_ids.shape[1] + 1).index_select(0, row_request).add_(positions)
    return token_ids.view(-1).index_select(0, place).clamp_min_(0)


def newest_rows_reference(verdict: Verdict, batch: LaidBatch, num_computed: Tensor) -> NewestRows:
    """See `step_inputs.newest_rows`."""
    newest = (verdict.num_sampled - 1).clamp_min_(0).unsqueeze(1)
    seq_lens = num_computed.index_select(0, batch.slots)
    return NewestRows(
        rows=(batch.query_start_loc[1:] - 1).sub_(verdict.num_rejected).clamp_min_(0),
        token_ids=verdict.tokens.gather(1, newest).squeeze(1).clamp_min_(0),
        positions=(seq_lens - 1).clamp_min_(0),
        seq_lens=seq_lens,
    )


def decode_rows_reference(
    positions: Tensor,
    seq_lens: Tensor,
    advance: int,
    groups: GroupTables,
    *,
    padded: bool = False,
) -> DecodeRows:
    """See `step_inputs.decode_rows`."""
    positions = positions + advance
    request = torch.arange(positions.shape[0], device=positions.device)
    ends = positions + 1
    if padded:
        positions, ends = positions.where(seq_lens > 0, 0), ends.where(seq_lens > 0, 0)
        request = request.where(seq_lens > 0, -1)
    return DecodeRows(
        positions=positions,
        seq_lens=ends,
        slot_mapping=_slot_mappings(groups, request, positions, padded),
    )


def block_rows_reference(
    token_ids: Tensor,
    seq_lens: Tensor,
    groups: GroupTables,
    *,
    num_rows: int,
    mask_token_id: int,
    padded: bool = False,
) -> BlockRows:
    """See `step_inputs.block_rows`."""
    b, device = token_ids.shape[0], token_ids.device
    row = torch.arange(num_rows, device=device)
    ids = token_ids.unsqueeze(1).where(row == 0, mask_token_id)  # [B, R]
    positions, ends = seq_lens.unsqueeze(1) + row, seq_lens + num_rows
    request = torch.arange(b, device=device)
    if padded:
        is_real = seq_lens > 0
        ids, positions = ids.where(is_real[:, None], 0), positions.where(is_real[:, None], 0)
        ends, request = ends.where(is_real, 0), request.where(is_real, -1)
    request = request.unsqueeze(1).expand(b, num_rows).reshape(-1)
    positions = positions.reshape(-1)
    return BlockRows(
        input_ids=ids.reshape(-1),
        positions=positions,
        seq_lens=ends,
        query_start_loc=torch.arange(b + 1, device=device) * num_rows,
        slot_mapping=_slot_mappings(groups, request, positions, padded),
    )


def parallel_rows_reference(
    token_ids: Tensor,
    batch: LaidBatch,
    num_rejected: Tensor,
    groups: GroupTables,
    *,
    num_masks: int,
    mask_token_id: int,
    num_rows: int,
    padded: bool = False,
) -> ParallelLayout:
    """See `step_inputs.parallel_rows`."""
    slots, seq_lens, query_start_loc = batch.slots, batch.seq_lens, batch.query_start_loc
    b, device = slots.shape[0], slots.device
    each = torch.arange(b, device=device)
    rows_of = query_start_loc[1:] - query_start_loc[:-1]
    starts = query_start_loc[:-1] + each * num_masks
    total = num_rows + b * num_masks
    if padded:  # rows after those of the last request are padding
        ends = starts + rows_of + num_masks
        row = torch.arange(total, device=device)
        request = torch.searchsorted(ends, row, right=True)
        is_real = (request < b) & (seq_lens > 0).index_select(0, request.clamp_max(b - 1))
        request.clamp_max_(b - 1)
    else:
        request = torch.repeat_interleave(each, rows_of + num_masks, output_size=total)
    offset = torch.arange(total, device=device).sub_(starts.index_select(0, request))
    num_valid = rows_of - num_rejected
    is_valid = offset < num_valid.index_select(0, request)
    positions = (seq_lens - rows_of).index_select(0, request).add_(offset)
    inside = torch.minimum(offset, (rows_of - 1).index_select(0, request))
    if padded:
        inside.clamp_min_(0)
        is_valid, positions = is_valid & is_real, positions.where(is_real, 0)
    shifted = shifted_tokens_reference(token_ids, slots, request, positions)
    laid = ParallelLayout(
        input_ids=shifted.where(is_valid, mask_token_id),
        positions=positions,
        source=query_start_loc.index_select(0, request).add_(inside),
        is_valid=is_valid,
        newest=(starts + num_valid).sub_(1),
        seq_lens=seq_lens + num_masks,
        slot_mapping=[],
    )
    if padded:
        request = request.where(is_real, -1)
        laid.input_ids = laid.input_ids.where(is_real, 0)
        laid.source.clamp_max_(num_rows - 1)
        laid.newest.clamp_min_(0)
        laid.seq_lens = laid.seq_lens.where(seq_lens > 0, 0)
    laid.slot_mapping = _slot_mappings(groups, request, positions, padded)
    return laid
