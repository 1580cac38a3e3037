"""Verification of drafts: which are accepted and what is emitted after them, for every drafter.

A draft of -1 counts as rejected, and so do all drafts after it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hydraspec_kernels.sampling.records import EVERYTHING
from hydraspec_kernels.sampling.rejection import Rule, verify_sampled
from hydraspec_kernels.sampling.rules import constrained
from hydraspec_kernels.sampling.verification import verify_prefix, verify_synthetic
from torch import Tensor

from hydraspec.parallel.vocabulary import WHOLE, Vocabulary
from hydraspec.types import Batch, RequestState, SamplingFlags, Verdict


@dataclass(slots=True, frozen=True)
class Verifier:
    """Decides one step's drafts; one object serves all steps and keeps no state between them."""

    rule: Rule
    acceptance_length: float = 1.0  # of Rule.SYNTHETIC
    vocabulary: Vocabulary = WHOLE  # tokens of the columns of logits

    def __call__(
        self, logits: Tensor, batch: Batch, state: RequestState, flags: SamplingFlags = EVERYTHING
    ) -> Verdict:
        """The verdict on `batch.draft_tokens`.

        `logits` [N, V], or this rank's columns of them, are of the N rows that `batch.verify_rows`
        names; `state` is that before the step. Every rank comes to the same verdict.
        With `state.draft_probs` drafts count as sampled from these, else as certain. `flags` are
        host facts that save work. A request without drafts, as before its first token or without a
        drafter, gets one token. `logits` must not be read afterwards: kernels truncate in place.
        """
        if logits.shape[0] == 0:
            return _nothing_sampled(batch)
        vocabulary = self.vocabulary
        if flags.any_rules and state.rules is not None:
            whole, vocabulary = vocabulary.whole(logits), WHOLE
            logits = constrained(whole, batch, state, state.rules, flags)
        if not batch.all_greedy:
            whole = vocabulary.whole(logits)
            return verify_sampled(whole, batch, state, self.rule, self.acceptance_length, flags)
        choices = vocabulary.greedy_tokens(logits, marks_not_finite=True)
        if self.rule is Rule.SYNTHETIC:
            length = self.acceptance_length
            return verify_synthetic(choices, batch, state.seed, length, state.accepts)
        # At temperature 0 a lossless rule accepts while the draft is the argmax, without draws.
        return verify_prefix(choices, batch)


def _nothing_sampled(batch: Batch) -> Verdict:
    """The verdict of a step of prefill chunks only, which has no logits."""
    none = torch.zeros_like(batch.num_drafts)
    tokens = torch.full_like(batch.verify_rows, -1)
    return Verdict(
        tokens=tokens, num_sampled=none, num_rejected=none.clone(), not_finite=none.clone()
    )


def build_verifier(
    verification: str,
    *,
    synthetic_acceptance_length: float | None,
    vocabulary: Vocabulary = WHOLE,
) -> Verifier:
    """The verifier of `method.verification`; configurations are checked already."""
    return Verifier(Rule[verification.upper()], synthetic_acceptance_length or 1.0, vocabulary)
