"""What a forward pass reads, from the state on the device: ids, positions, lengths, cache rows.

Graphs run padded batches. A padding request has no rows, no drafts, does not sample and has a slot
that no request owns; a row beyond its request's rows, or of request -1, is padding. Padding rows
have id 0, position 0 and cache row -1 (nothing is written); padding requests have length 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hydraspec_kernels.runtime.launch import runs_kernels
from hydraspec_kernels.step_inputs.records import DecodeRows, NewestRows, ParallelLayout, StepInputs
from hydraspec_kernels.step_inputs.reference import (
    decode_rows_reference,
    newest_rows_reference,
    parallel_rows_reference,
    prepare_rows_reference,
    shifted_tokens_reference,
)

__all__ = [
    "DecodeRows",
    "NewestRows",
    "ParallelLayout",
    "StepInputs",
    "decode_rows",
    "newest_rows",
    "parallel_rows",
    "prepare_rows",
    "shifted_tokens",
]


def prepare_rows(
    num_computed: Tensor,  # [S]
    token_ids: Tensor,  # [S, L]
    slots: Tensor,  # [B]
    num_rows: Tensor,  # [B]
    num_drafts: Tensor,  # [B]
    row_request: Tensor,  # [T]
    row_offset: Tensor,  # [T] place of the row within its request's rows
    tables: Sequence[Tensor],  # per KV group [B, P]
    block_sizes: Sequence[int],  # per KV group
    num_speculative_tokens: int,
    *,
    padded: bool = False,
) -> StepInputs:
    """The target's rows. A request's rows are its next tokens, the last `num_drafts` of them
    drafts; a missing draft (-1) still needs a row, with id 0.

    `padded` is a host fact: some row or request may be padding (kernels take it as given).
    """
    if runs_kernels(token_ids):
        # Triton is imported where kernels run only.
        from hydraspec_kernels.step_inputs.kernel import prepare_rows_kernel

        return prepare_rows_kernel(
            num_computed, token_ids, slots, num_rows, num_drafts, row_request, row_offset,
            tables, block_sizes, num_speculative_tokens,
        )  # fmt: skip
    return prepare_rows_reference(
        num_computed, token_ids, slots, num_rows, num_drafts, row_request, row_offset,
        tables, block_sizes, num_speculative_tokens, padded=padded,
    )  # fmt: skip


def shifted_tokens(
    token_ids: Tensor,
    slots: Tensor,
    row_request: Tensor,
    positions: Tensor,
    *,
    padded: bool = False,
) -> Tensor:
    """The token behind each row: token_ids [S, L], slots [B], row_request, positions [T] -> [T].

    Rows of request -1 and places with no token (-1) give 0.
    """
    if runs_kernels(token_ids):
        from hydraspec_kernels.step_inputs.kernel import shifted_tokens_kernel

        return shifted_tokens_kernel(token_ids, slots, row_request, positions)
    return shifted_tokens_reference(token_ids, slots, row_request, positions, padded=padded)


def newest_rows(
    tokens: Tensor,  # [B, K+1] emitted tokens
    num_sampled: Tensor,  # [B]
    num_rejected: Tensor,  # [B]
    query_start_loc: Tensor,  # [B+1]
    slots: Tensor,  # [B]
    num_computed: Tensor,  # [S] after the verdict was committed
) -> NewestRows:
    """Each request's newest computed row, and the token sampled behind it.

    Requests that did not sample give a harmless row and token.
    """
    if runs_kernels(tokens):
        from hydraspec_kernels.step_inputs.kernel import newest_rows_kernel

        return newest_rows_kernel(
            tokens, num_sampled, num_rejected, query_start_loc, slots, num_computed
        )
    return newest_rows_reference(
        tokens, num_sampled, num_rejected, query_start_loc, slots, num_computed
    )


def decode_rows(
    positions: Tensor,  # [B]
    seq_lens: Tensor,  # [B]; 0 marks padding
    advance: int,
    tables: Sequence[Tensor],  # per KV group [B, P]
    block_sizes: Sequence[int],
    *,
    padded: bool = False,
) -> DecodeRows:
    """One row per request, `advance` positions behind `positions`."""
    if runs_kernels(positions):
        from hydraspec_kernels.step_inputs.kernel import decode_rows_kernel

        return decode_rows_kernel(positions, seq_lens, advance, tables, block_sizes)
    return decode_rows_reference(positions, seq_lens, advance, tables, block_sizes, padded=padded)


def parallel_rows(
    query_start_loc: Tensor,  # [B+1]
    seq_lens: Tensor,  # [B]
    num_rejected: Tensor,  # [B]
    slots: Tensor,  # [B]
    token_ids: Tensor,  # [S, L]
    tables: Sequence[Tensor],  # per KV group [B, P]
    block_sizes: Sequence[int],
    *,
    num_masks: int,
    mask_token_id: int,
    num_rows: int,
    padded: bool = False,
) -> ParallelLayout:
    """The step's rows with `num_masks` more behind each request's newest row, for drafters that
    propose everything in one pass.

    A request with R rows, the first at position s and r of them rejected, has R + num_masks rows at
    positions s, s + 1, ...: its R - r valid rows, the mask rows, then r rows of padding that no row
    that counts can see. `num_rows` is the step's T.
    """
    if runs_kernels(token_ids):
        from hydraspec_kernels.step_inputs.kernel import parallel_rows_kernel

        return parallel_rows_kernel(
            query_start_loc, seq_lens, num_rejected, slots, token_ids, tables, block_sizes,
            num_masks=num_masks, mask_token_id=mask_token_id, num_rows=num_rows,
        )  # fmt: skip
    return parallel_rows_reference(
        query_start_loc, seq_lens, num_rejected, slots, token_ids, tables, block_sizes,
        num_masks=num_masks, mask_token_id=mask_token_id, num_rows=num_rows, padded=padded,
    )  # fmt: skip
