"""Row layouts of draft passes over a draft head's own cache."""

from __future__ import annotations

from collections.abc import Sequence

from hydraspec_kernels.step_inputs import GroupTables, NewestRows, decode_rows, shifted_tokens
from torch import Tensor

from hydraspec.types import Batch, KVGroupSpec, RequestState, Rows, RowSegment


def target_rows(batch: Batch, state: RequestState, specs: Sequence[KVGroupSpec]) -> Rows:
    """The step's rows as draft rows: each reads the following token, at the same position and cache
    row.

    A prompt row reads the next prompt token, the newest row the token sampled after it. Rows of
    rejected drafts read arbitrary tokens; their KV is overwritten before any row may see it.
    """
    first = len(batch.slot_mapping) - len(specs)
    return Rows(
        segments=batch.segments,
        input_ids=shifted_tokens(
            state.token_ids,
            batch.slots,
            batch.row_request,
            batch.positions,
            padded=batch.has_padding,
        ),
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
    row: NewestRows,
    lookahead: int,
    query_start_loc: Tensor,
) -> Rows:
    """A row per request, `lookahead` positions after its newest row."""
    tables = batch.block_tables[len(batch.block_tables) - len(specs) :]
    max_seq_len = max(segment.max_seq_len for segment in batch.segments) + lookahead
    groups = GroupTables(tables, [spec.block_size for spec in specs])
    rows = decode_rows(row.positions, row.seq_lens, lookahead, groups, padded=batch.has_padding)
    return Rows(
        segments=(RowSegment(0, 0, batch.num_requests, 1, max_seq_len),),
        input_ids=tokens,
        positions=rows.positions,
        seq_lens=rows.seq_lens,
        slot_mapping=rows.slot_mapping,
        block_tables=tables,
        query_start_loc=query_start_loc,
        has_padding=batch.has_padding,
    )
