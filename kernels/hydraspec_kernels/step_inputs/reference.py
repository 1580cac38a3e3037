"""Input preparation in plain torch: the specification, and what runs on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hydraspec_kernels.step_inputs.records import DecodeRows, NewestRows, ParallelLayout, StepInputs
from hydraspec_kernels.step_inputs.slot_mapping.reference import slot_mapping_reference


def prepare_rows_reference(
    num_computed: Tensor,
    token_ids: Tensor,
    slots: Tensor,
    num_rows: Tensor,
    num_drafts: Tensor,
    row_request: Tensor,
    row_offset: Tensor,
    tables: Sequence[Tensor],
    block_sizes: Sequence[int],
    num_speculative_tokens: int,
    *,
    padded: bool,
) -> StepInputs:
    """See `step_inputs.prepare_rows`."""
    columns, first = token_ids.shape[1], num_computed.index_select(0, slots)
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
    behind = (start + first).add_(num_rows).sub_(num_drafts).unsqueeze(1) + draft
    drafts = token_ids.view(-1).take(behind)
    return StepInputs(
        input_ids=ids,
        positions=positions,
        seq_lens=seq_lens,
        draft_tokens=drafts.masked_fill_(draft >= num_drafts.unsqueeze(1), -1),
        slot_mapping=_slot_mappings(tables, block_sizes, row_request, positions, padded),
    )


def _slot_mappings(
    tables: Sequence[Tensor],
    block_sizes: Sequence[int],
    request: Tensor,
    positions: Tensor,
    padded: bool = False,
) -> list[Tensor]:
    """The cache rows per KV group; request -1 (where `padded`) gives -1."""
    return [
        slot_mapping_reference(table, request, positions, size, padded=padded)
        for table, size in zip(tables, block_sizes, strict=True)
    ]


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
        behind = shifted_tokens_reference(token_ids, slots, row_request.clamp_min(0), positions)
        return behind.where(row_request >= 0, 0)
    place = (slots * token_ids.shape[1] + 1).index_select(0, row_request).add_(positions)
    return token_ids.view(-1).index_select(0, place).clamp_min_(0)


def newest_rows_reference(
    tokens: Tensor,
    num_sampled: Tensor,
    num_rejected: Tensor,
    query_start_loc: Tensor,
    slots: Tensor,
    num_computed: Tensor,
) -> NewestRows:
    """See `step_inputs.newest_rows`."""
    newest = (num_sampled - 1).clamp_min_(0).unsqueeze(1)
    seq_lens = num_computed.index_select(0, slots)
    return NewestRows(
        rows=(query_start_loc[1:] - 1).sub_(num_rejected).clamp_min_(0),
        token_ids=tokens.gather(1, newest).squeeze(1).clamp_min_(0),
        positions=(seq_lens - 1).clamp_min_(0),
        seq_lens=seq_lens,
    )


def decode_rows_reference(
    positions: Tensor,
    seq_lens: Tensor,
    advance: int,
    tables: Sequence[Tensor],
    block_sizes: Sequence[int],
    *,
    padded: bool = False,
) -> DecodeRows:
    """See `step_inputs.decode_rows`."""
    positions = positions + advance
    request = torch.arange(positions.shape[0], device=positions.device)
    behind = positions + 1
    if padded:
        positions, behind = positions.where(seq_lens > 0, 0), behind.where(seq_lens > 0, 0)
        request = request.where(seq_lens > 0, -1)
    return DecodeRows(
        positions=positions,
        seq_lens=behind,
        slot_mapping=_slot_mappings(tables, block_sizes, request, positions, padded),
    )


def parallel_rows_reference(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    num_rejected: Tensor,
    slots: Tensor,
    token_ids: Tensor,
    tables: Sequence[Tensor],
    block_sizes: Sequence[int],
    *,
    num_masks: int,
    mask_token_id: int,
    num_rows: int,
    padded: bool = False,
) -> ParallelLayout:
    """See `step_inputs.parallel_rows`."""
    b, device = slots.shape[0], slots.device
    each = torch.arange(b, device=device)
    rows_of = query_start_loc[1:] - query_start_loc[:-1]
    starts = query_start_loc[:-1] + each * num_masks
    total = num_rows + b * num_masks
    if padded:  # rows behind the last request's are nobody's
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
    behind = shifted_tokens_reference(token_ids, slots, request, positions)
    laid = ParallelLayout(
        input_ids=behind.where(is_valid, mask_token_id),
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
    laid.slot_mapping = _slot_mappings(tables, block_sizes, request, positions, padded)
    return laid
