"""Speculative sampling: drafts accepted against the target's distribution, losslessly.

The reference is the specification, and runs on a CPU. The kernels hold no tensor of target
probabilities, and draw the same random numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hydraspec_kernels.runtime.launch import runs_kernels
from hydraspec_kernels.sampling.records import (
    EVERYTHING,
    SamplingFlags,
    SlotSampling,
    Verdict,
    VerifiedBatch,
)
from hydraspec_kernels.sampling.rejection.reference import Rule, verify_sampled_reference
from hydraspec_kernels.sampling.truncation import truncate_

__all__ = ["Rule", "verify_sampled"]


def verify_sampled(
    logits: Tensor,
    batch: VerifiedBatch,
    state: SlotSampling,
    rule: Rule,
    acceptance_length: float = 1.0,
    flags: SamplingFlags = EVERYTHING,
) -> Verdict:
    """Accepts drafts by `rule`, then emits a token drawn from the residual after a rejection, or
    from the target after the last draft.

    logits [N, V] have the rows that `batch.verify_rows` names; kernels truncate them in place.
    With `state.draft_probs` drafts count as sampled from it, else as certain (q = 1). Requests of
    temperature 0 accept, and emit, the argmax. Logits whose maximum is not finite accept no draft,
    and a token emitted from them is marked. Only Rule.SYNTHETIC reads `acceptance_length`.
    """
    if not runs_kernels(logits) or logits.dtype is torch.float64:
        return verify_sampled_reference(logits, batch, state, rule, acceptance_length, flags)
    # Triton is imported only where kernels run.
    from hydraspec_kernels.sampling.rejection.launches import verify_sampled_launches

    if flags.any_truncation:
        truncate_(logits, batch, state)
    return verify_sampled_launches(
        logits, batch, state, rule, acceptance_length, is_truncated=flags.any_truncation
    )
