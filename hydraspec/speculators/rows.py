"""Row layouts of draft passes: what a draft head reads in a pass over its own cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hydraspec_kernels.slot_mapping import slot_mapping
from torch import Tensor

from hydraspec.types import Batch, KVGroupSpec, RequestState, Rows, RowSegment


def target_rows(batch: Batch, state: RequestState, specs: Sequence[KVGroupSpec]) -> Rows:
    """The step's rows as draft rows: the token behind each, at the same position and slot.

    A prompt row reads the next prompt token, the newest row the token sampled behind it. Rows of
    rejected drafts read whatever stands there; their KV is overwritten before any row may see it.
    """
    columns = state.token_ids.shape[1]
    place = (batch.slots * columns + 1).index_select(0, batch.row_request)
    tokens = state.token_ids.view(-1).index_select(0, place.add_(batch.positions))
    first = len(batch.slot_mapping) - len(specs)
    return Rows(
        segments=batch.segments,
        input_ids=tokens.clamp_min(0),
        positions=batch.positions,
        seq_lens=batch.seq_lens,
        slot_mapping=batch.slot_mapping[first:],
        block_tables=batch.block_tables[first:],
        query_start_loc=batch.query_start_loc,
        has_padding=batch.has_padding,
    )


def single_rows(
    batch: Batch,
    specs: Sequence[KVGroupSpec],
    tokens: Tensor,
    positions: Tensor,
    lookahead: int,
) -> Rows:
    """One row per request at `positions` [B], `lookahead` behind its newest row."""
    tables = batch.block_tables[len(batch.block_tables) - len(specs) :]
    max_seq_len = max(segment.max_seq_len for segment in batch.segments) + lookahead
    requests = torch.arange(batch.num_requests, device=positions.device)
    return Rows(
        segments=(RowSegment(0, 0, batch.num_requests, 1, max_seq_len),),
        input_ids=tokens,
        positions=positions,
        seq_lens=positions + 1,
        slot_mapping=[
            slot_mapping(table, requests, positions, spec.block_size)
            for table, spec in zip(tables, specs, strict=True)
        ],
        block_tables=tables,
        query_start_loc=torch.arange(batch.num_requests + 1, device=positions.device),
        has_padding=batch.has_padding,
    )
