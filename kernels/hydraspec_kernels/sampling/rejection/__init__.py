"""Verification against the target's distribution, without tensors of probabilities.

The specification is the sampling package's verifiers: their rules in plain torch are what runs on
a CPU. The draws are the same.
"""

from __future__ import annotations

from enum import IntEnum

from torch import Tensor

from hydraspec_kernels.sampling.verification import Verified

__all__ = ["Rule", "verify_sampled"]


class Rule(IntEnum):
    """How drafts are accepted."""

    STANDARD = 0  # token by token, by p / q
    BLOCK = 1  # the longest prefix that passes
    AT_RATE = 2  # by a fixed mean, whatever the drafts


def verify_sampled(
    logits: Tensor,  # [N, V]
    verify_rows: Tensor,  # [B, K+1] rows of N
    draft_tokens: Tensor,  # [B, K], -1 where there is no draft
    num_drafts: Tensor,  # [B]
    samples: Tensor,  # [B] bool
    seq_lens: Tensor,  # [B]
    slots: Tensor,  # [B]
    temperature: Tensor,  # [S]
    seed: Tensor,  # [S]
    draft_probs: Tensor | None,  # [S, K, V'] float32; None: drafts were chosen outright
    rule: Rule,
    acceptance_length: float = 1.0,  # of Rule.AT_RATE
    draft_vocab_map: Tensor | None = None,  # [V'] ids of the drafter's tokens; None: V' is V
    is_truncated: bool = False,
) -> Verified:
    """Accept drafts by `rule`, then emit a token recovered from the residual, or the bonus.

    Only where kernels run. The target's distribution is that of the logits at the temperature:
    what is cut off them is -inf already. Requests of temperature 0 accept, and emit, the argmax.
    Logits whose maximum is not finite accept no draft, and what is emitted from them is marked.
    `is_truncated` is a host fact that saves work, not a matter of results: much is cut off.
    """
    # Triton is imported where kernels run only.
    from hydraspec_kernels.sampling.rejection.launches import verify_sampled_launches

    return verify_sampled_launches(
        logits, verify_rows, draft_tokens, num_drafts, samples, seq_lens, slots, temperature, seed,
        draft_probs, rule, acceptance_length, draft_vocab_map, is_truncated,
    )  # fmt: skip
