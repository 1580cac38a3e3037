"""Inputs of a forward pass, from the state on the device: ids, positions, lengths, cache rows.

Graphs run padded batches. A padding request has no rows, no drafts, does not sample and has the
padding slot; a row past its request's rows, or of request -1, is padding. Padding rows have id 0,
position 0 and cache row -1 (nothing is written); padding requests have length 0. `padded` is a host
fact that the references need: some row or request may be padding. Kernels always allow for it.
"""

from __future__ import annotations

from torch import Tensor

from hydraspec_kernels.runtime.launch import runs_kernels
from hydraspec_kernels.sampling.records import SlotTokens, Verdict
from hydraspec_kernels.step_inputs import reference
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

__all__ = [
    "BlockRows",
    "DecodeRows",
    "GroupTables",
    "NewestRows",
    "ParallelLayout",
    "RowLayout",
    "StepInputs",
    "block_rows",
    "copy_words",
    "decode_rows",
    "newest_rows",
    "parallel_rows",
    "prepare_rows",
    "shifted_tokens",
]


def prepare_rows(
    state: SlotTokens,
    layout: RowLayout,
    slots: Tensor,  # [B]
    groups: GroupTables,
    num_speculative_tokens: int,
    *,
    padded: bool = False,
) -> StepInputs:
    """Inputs of the target's pass. A request's rows are its next tokens, the last `num_drafts` of
    them drafts; a missing draft (-1) still needs a row, with id 0.
    """
    if runs_kernels(slots):
        # Triton is imported only where kernels run.
        from hydraspec_kernels.step_inputs.kernel import prepare_rows_kernel

        return prepare_rows_kernel(state, layout, slots, groups, num_speculative_tokens)
    return reference.prepare_rows_reference(
        state, layout, slots, groups, num_speculative_tokens, padded=padded
    )


def shifted_tokens(
    token_ids: Tensor,
    slots: Tensor,
    row_request: Tensor,
    positions: Tensor,
    *,
    padded: bool = False,
) -> Tensor:
    """The token [T] after each row's token, from token_ids [S, L+1], slots [B], and row_request and
    positions [T].

    Rows of request -1 and places with no token (-1) give 0.
    """
    if runs_kernels(slots):
        from hydraspec_kernels.step_inputs.kernel import shifted_tokens_kernel

        return shifted_tokens_kernel(token_ids, slots, row_request, positions)
    return reference.shifted_tokens_reference(
        token_ids, slots, row_request, positions, padded=padded
    )


def newest_rows(verdict: Verdict, batch: LaidBatch, num_computed: Tensor) -> NewestRows:
    """Newest computed row of each request, and the token sampled after the row; num_computed [S]
    is read after the verdict is committed. Requests that did not sample give an unused row and
    token in range.
    """
    if runs_kernels(num_computed):
        from hydraspec_kernels.step_inputs.kernel import newest_rows_kernel as run
    else:
        run = reference.newest_rows_reference
    return run(verdict, batch, num_computed)


def decode_rows(
    positions: Tensor,  # [B]
    seq_lens: Tensor,  # [B]; 0 marks padding
    advance: int,
    groups: GroupTables,
    *,
    padded: bool = False,
) -> DecodeRows:
    """Inputs of a pass with a row per request, `advance` positions after `positions`."""
    if runs_kernels(positions):
        from hydraspec_kernels.step_inputs.kernel import decode_rows_kernel

        return decode_rows_kernel(positions, seq_lens, advance, groups)
    return reference.decode_rows_reference(positions, seq_lens, advance, groups, padded=padded)


def block_rows(
    token_ids: Tensor,  # [B] the newest token of each request
    seq_lens: Tensor,  # [B] its position; 0 marks padding
    groups: GroupTables,
    *,
    num_rows: int,
    mask_token_id: int,
    padded: bool = False,
) -> BlockRows:
    """Blocks of `num_rows` rows, one per request: its newest token, then mask tokens, at positions
    seq_lens, seq_lens + 1, ..."""
    if runs_kernels(token_ids):
        from hydraspec_kernels.step_inputs.block_kernel import block_rows_kernel

        return block_rows_kernel(
            token_ids, seq_lens, groups, num_rows=num_rows, mask_token_id=mask_token_id
        )
    return reference.block_rows_reference(
        token_ids,
        seq_lens,
        groups,
        num_rows=num_rows,
        mask_token_id=mask_token_id,
        padded=padded,
    )


def copy_words(to: Tensor, words: Tensor) -> None:
    """Fills `to`, contiguous, with `words` [N] or [B, N] of the same shape and dtype: from pinned
    host memory to a device or back, in stream order, without a wait. Off a device it is a copy."""
    if runs_kernels(to) or runs_kernels(words):
        from hydraspec_kernels.step_inputs.copy_kernel import copy_words_kernel

        copy_words_kernel(to, words, from_host=not words.is_cuda)
    else:
        to.copy_(words)


def parallel_rows(
    token_ids: Tensor,  # [S, L+1]
    batch: LaidBatch,
    num_rejected: Tensor,  # [B]
    groups: GroupTables,
    *,
    num_masks: int,
    mask_token_id: int,
    num_rows: int,
    padded: bool = False,
) -> ParallelLayout:
    """The step's rows with `num_masks` more after each request's newest row, for drafters that
    propose everything in one pass.

    A request with R rows, the first at position s and r of them rejected, has R + num_masks rows at
    positions s, s + 1, ...: its R - r valid rows, the mask rows, then r rows of padding, which no
    valid or mask row can see. `num_rows` is the step's T.
    """
    masks = {"num_masks": num_masks, "mask_token_id": mask_token_id, "num_rows": num_rows}
    if runs_kernels(token_ids):
        from hydraspec_kernels.step_inputs.kernel import parallel_rows_kernel

        return parallel_rows_kernel(token_ids, batch, num_rejected, groups, **masks)
    return reference.parallel_rows_reference(
        token_ids, batch, num_rejected, groups, **masks, padded=padded
    )
