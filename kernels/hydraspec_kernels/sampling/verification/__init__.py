"""Verification by the target's argmax or sampled tokens alone, and writing tokens into the
requests' state. Rules that need the target's distribution are in `rejection`.
"""

from __future__ import annotations

from torch import Tensor

from hydraspec_kernels.runtime.launch import check_contiguous, runs_kernels
from hydraspec_kernels.sampling.records import CommittedBatch, SlotTokens, Verdict, VerifiedBatch
from hydraspec_kernels.sampling.verification import reference

__all__ = ["commit_tokens", "store_drafts", "verify_prefix", "verify_synthetic"]


def verify_prefix(choices: Tensor, batch: VerifiedBatch) -> Verdict:
    """Accepts drafts while they equal the target's choice, then emits the next choice.

    choices [N] are the target's tokens, ~token if the row's logits are not finite: such a choice
    accepts no draft.
    """
    if runs_kernels(choices):
        # Triton is imported only where kernels run.
        from hydraspec_kernels.sampling.verification.kernel import verify_prefix_kernel

        return verify_prefix_kernel(choices, batch)
    return reference.verify_prefix_reference(choices, batch)


def verify_synthetic(
    choices: Tensor,
    batch: VerifiedBatch,
    seed: Tensor,
    acceptance_length: float,
    accepts: Tensor | None = None,
) -> Verdict:
    """Accepts any draft j with probability min(1, max(0, acceptance_length - 1 - j)), then emits
    the choice after the accepted drafts. choices are as in `verify_prefix`; seed [S].

    With accepts [S, L+1] int8 draft j of a step whose first draft is token number t is accepted if
    j < accepts[slot, t], without a draw.
    """
    if runs_kernels(choices):
        from hydraspec_kernels.sampling.verification.kernel import verify_synthetic_kernel

        return verify_synthetic_kernel(choices, batch, seed, acceptance_length, accepts)
    return reference.verify_synthetic_reference(choices, batch, seed, acceptance_length, accepts)


def commit_tokens(state: SlotTokens, batch: CommittedBatch, verdict: Verdict) -> None:
    """Writes a verdict into the state: its tokens after the computed ones of requests that sample,
    then the new computed count.

    Entries of -1 after the emitted tokens are written too: drafts, or the next step, overwrite
    them.
    """
    check_contiguous(state.token_ids, state.num_computed, verdict.tokens, verdict.num_rejected)
    check_contiguous(batch.slots, batch.seq_lens, batch.num_drafts, batch.samples)
    if runs_kernels(state.token_ids):
        from hydraspec_kernels.sampling.verification.kernel import commit_tokens_kernel as run
    else:
        run = reference.commit_tokens_reference
    run(state, batch, verdict)


def store_drafts(state: SlotTokens, batch: CommittedBatch, tokens: Tensor) -> None:
    """Writes drafts [B, K] after each request's newest sampled token, where the next step's rows
    read them. Requests that do not sample keep their tokens.
    """
    check_contiguous(state.token_ids, state.num_computed, batch.slots, batch.samples, tokens)
    if runs_kernels(state.token_ids):
        from hydraspec_kernels.sampling.verification.kernel import store_drafts_kernel as run
    else:
        run = reference.store_drafts_reference
    run(state, batch, tokens)
