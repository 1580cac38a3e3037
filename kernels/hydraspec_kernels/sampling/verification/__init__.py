"""Deciding drafts by the target's choices, and writing verdicts and drafts into the requests'
state.

Rules that need the target's distribution are the business of `rejection_sampling`.
"""

from __future__ import annotations

from torch import Tensor

from hydraspec_kernels.runtime.launch import runs_kernels
from hydraspec_kernels.sampling.verification.reference import (
    Verified,
    commit_tokens_reference,
    store_drafts_reference,
    verify_at_rate_reference,
    verify_prefix_reference,
)

__all__ = ["Verified", "commit_tokens", "store_drafts", "verify_at_rate", "verify_prefix"]


def verify_prefix(
    choices: Tensor,  # [N] the target's token of each row, ~token if its logits are not finite
    verify_rows: Tensor,  # [B, K+1] rows of N
    draft_tokens: Tensor,  # [B, K], -1 where there is no draft
    num_drafts: Tensor,  # [B]
    samples: Tensor,  # [B] bool
) -> Verified:
    """Accept drafts while they equal the target's choice, then emit the choice behind them.

    No draft is accepted by a choice that is ~token.
    """
    if runs_kernels(choices):
        # Triton is imported where kernels run only.
        from hydraspec_kernels.sampling.verification.kernel import verify_prefix_kernel

        return verify_prefix_kernel(choices, verify_rows, draft_tokens, num_drafts, samples)
    return verify_prefix_reference(choices, verify_rows, draft_tokens, num_drafts, samples)


def verify_at_rate(
    choices: Tensor,  # [N] the target's token of each row, ~token if its logits are not finite
    verify_rows: Tensor,  # [B, K+1] rows of N
    draft_tokens: Tensor,  # [B, K], -1 where there is no draft
    num_drafts: Tensor,  # [B]
    samples: Tensor,  # [B] bool
    seq_lens: Tensor,  # [B]
    slots: Tensor,  # [B]
    seed: Tensor,  # [S]
    acceptance_length: float,
) -> Verified:
    """Accept draft j with probability min(1, max(0, acceptance_length - 1 - j)) whatever it is,
    then emit the target's choice behind the accepted ones. No draft is accepted by a choice that is
    ~token.
    """
    if runs_kernels(choices):
        from hydraspec_kernels.sampling.verification.kernel import verify_at_rate_kernel as run
    else:
        run = verify_at_rate_reference
    return run(
        choices, verify_rows, draft_tokens, num_drafts, samples, seq_lens, slots, seed,
        acceptance_length,
    )  # fmt: skip


def commit_tokens(
    token_ids: Tensor,  # [S, L]
    num_computed: Tensor,  # [S]
    slots: Tensor,  # [B]
    seq_lens: Tensor,  # [B]
    num_drafts: Tensor,  # [B]
    samples: Tensor,  # [B] bool
    tokens: Tensor,  # [B, K+1]
    num_rejected: Tensor,  # [B]
) -> None:
    """Write a verdict into the state: the tokens behind the computed ones of requests that sample,
    then the new computed count.

    Entries of -1 behind the emitted tokens are written too: drafts, or the next step, overwrite
    them. The last column of `token_ids` belongs to nobody.
    """
    if runs_kernels(token_ids):
        from hydraspec_kernels.sampling.verification.kernel import commit_tokens_kernel as run
    else:
        run = commit_tokens_reference
    run(token_ids, num_computed, slots, seq_lens, num_drafts, samples, tokens, num_rejected)


def store_drafts(
    token_ids: Tensor, num_computed: Tensor, slots: Tensor, samples: Tensor, tokens: Tensor
) -> None:
    """Put drafts [B, K] behind each request's newest sampled token, where the next step's rows
    read them.

    token_ids [S, L], num_computed [S], slots and samples [B]. Requests that do not sample are left
    alone, but for the last column, which belongs to nobody.
    """
    if runs_kernels(token_ids):
        from hydraspec_kernels.sampling.verification.kernel import store_drafts_kernel as run
    else:
        run = store_drafts_reference
    run(token_ids, num_computed, slots, samples, tokens)
