"""Deciding drafts and writing the outcome into the state of the requests, in few launches.

What each rule accepts is specified in plain torch, here for rules that need the target's choices
only, and in the sampling package for those that need its distribution.
"""

from __future__ import annotations

from torch import Tensor

from hydraspec_kernels.launch import runs_kernels
from hydraspec_kernels.verification.reference import commit_tokens_reference, store_drafts_reference

__all__ = ["commit_tokens", "store_drafts"]


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
        # Triton is imported where kernels run only.
        from hydraspec_kernels.verification.kernel import commit_tokens_kernel as run
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
        from hydraspec_kernels.verification.kernel import store_drafts_kernel as run
    else:
        run = store_drafts_reference
    run(token_ids, num_computed, slots, samples, tokens)
