"""The records of sampling and verification.

Letters: B requests, K drafts of a request, S request slots, N rows of logits, V vocabulary, V' the
drafter's vocabulary, L tokens that a slot can hold. Tensors are int64 unless they say otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor


@dataclass(slots=True, frozen=True, kw_only=True)
class SamplingFlags:
    """Host facts of a batch. True means "some request may"; false skips that work for all rows.

    A flag that is true without need costs time, never correctness; a flag wrongly false ignores the
    parameter.
    """

    any_greedy: bool = True  # some request has temperature 0
    any_top_k: bool = True
    any_top_p: bool = True
    any_min_p: bool = True
    any_penalties: bool = True  # presence, frequency or repetition
    any_biases: bool = True  # logit_bias, bad_words or min_tokens
    any_masks: bool = True  # tokens are allowed by SlotRules.masks
    any_logprobs: bool = True  # log probabilities of sampled tokens are kept

    @property
    def any_rules(self) -> bool:
        """Returns whether logits of some request may change before anything else reads them."""
        return self.any_penalties or self.any_biases or self.any_masks

    @property
    def any_truncation(self) -> bool:
        """Returns whether top_k, top_p or min_p of some request may cut tokens off."""
        return self.any_top_k or self.any_top_p or self.any_min_p


EVERYTHING = SamplingFlags()  # skips no work


@dataclass(slots=True, frozen=True, kw_only=True)
class SamplingTensors:
    """Sampling parameters of N rows."""

    temperature: Tensor  # [N] float32, 0 is greedy
    top_k: Tensor  # [N], 0 is off
    top_p: Tensor  # [N] float32, 1 is off
    min_p: Tensor  # [N] float32, 0 is off


@dataclass(slots=True, frozen=True, kw_only=True)
class SlotRules:
    """Rules on the logits of each slot's request, which do not change while it runs unless they say
    so. Slots without rules, the last one among them, have values that change nothing.

    Letters beside the module's: M biases, E ending tokens, W bad words of at most C tokens, D
    tokens banned whatever comes before them.
    """

    num_prompt: Tensor  # [S] tokens of the prompt
    presence: Tensor  # [S] float32, 0 is off
    frequency: Tensor  # [S] float32, 0 is off
    repetition: Tensor  # [S] float32, 1 is off
    bias_ids: Tensor  # [S, M], 0 where there is none
    biases: Tensor  # [S, M] float32, 0 where there is none
    num_least: Tensor  # [S] tokens of prompt and output before which no ending token is sampled
    end_ids: Tensor  # [S, E], -1 where there is none
    bad_words: Tensor  # [S, W, C], aligned right after -1; -1 alone where there is none
    # [S, D] tokens that a drafter leaves out while fewer tokens than `ban_until` [S, D] are known,
    # 0 where there is none: what the rules above ban whatever comes before, as far as D reaches.
    ban_ids: Tensor
    ban_until: Tensor
    # [S, K+1, ceil(V / 32)] int32: the tokens that a grammar allows after so many drafts of a step,
    # token 32 i + j as bit j of word i. The one rule that changes from step to step.
    masks: Tensor


@dataclass(slots=True, frozen=True, kw_only=True)
class TokenMasks:
    """Tokens that grammars allow in a step, in host memory, as SlotRules.masks has them, and the D
    drafts that grammars decide (docs/adr/0051)."""

    rows: np.ndarray  # [R] int64: slot * (K+1) + drafts before the token
    words: np.ndarray  # [R, ceil(V / 32)] int32
    decided: np.ndarray  # [4, D] int64: slot, column of its tokens, place of the draft, its token


class SlotSampling(Protocol):
    """Sampling parameters of each slot's request, and the distributions that its drafts were drawn
    from: a part of `hydraspec.types.RequestState`."""

    temperature: Tensor  # [S] float32, 0 is greedy
    top_k: Tensor  # [S], 0 is off
    top_p: Tensor  # [S] float32, 1 is off
    min_p: Tensor  # [S] float32, 0 is off
    seed: Tensor  # [S]
    # [S, L + 1] int8, of Rule.SYNTHETIC: the most drafts that a step accepts whose first one is
    # token number t; None: a mean length decides.
    accepts: Tensor | None
    draft_probs: Tensor | None  # [S, K, V'] float32; None: drafts are certain, q = 1
    draft_vocab_map: Tensor | None  # [V'] the target's ids of the drafter's tokens; None: V' is V


class SlotTokens(Protocol):
    """The tokens of each slot: a part of `hydraspec.types.RequestState`."""

    token_ids: Tensor  # [S, L + 1]; the last column may be overwritten by masked writes
    num_computed: Tensor  # [S] tokens with valid KV


class CommittedBatch(Protocol):
    """The requests of a step whose tokens are written, and the slots that hold their state."""

    num_drafts: Tensor  # [B] drafts under verification
    samples: Tensor  # [B] bool: whether the request samples in this step
    seq_lens: Tensor  # [B] computed tokens plus the rows of this step
    slots: Tensor  # [B]


class VerifiedBatch(CommittedBatch, Protocol):
    """The drafts under verification: a part of `hydraspec.types.Batch`."""

    verify_rows: Tensor  # [B, K+1] rows of N; entries past num_drafts repeat a valid row
    draft_tokens: Tensor  # [B, K], -1 where there is no draft


@dataclass(slots=True, kw_only=True)
class Verdict:
    """The decision of verification. tokens[b, :num_sampled[b]] are the emitted tokens (accepted
    drafts, then one more)."""

    tokens: Tensor  # [B, K+1], -1 from num_sampled on
    num_sampled: Tensor  # [B], 0 for requests that do not sample in this step
    num_rejected: Tensor  # [B] drafts under verification that were not accepted
    # [B]: 1 where the last emitted token comes from logits whose maximum is not finite (a NaN,
    # +inf, or nothing but -inf), else 0. No draft is accepted by such logits.
    not_finite: Tensor

    @classmethod
    def empty_like(cls, batch: VerifiedBatch) -> Verdict:
        """An unwritten verdict on a batch."""
        count = batch.num_drafts
        return cls(
            tokens=count.new_empty(batch.verify_rows.shape),
            num_sampled=count.new_empty(count.shape),
            num_rejected=count.new_empty(count.shape),
            not_finite=count.new_empty(count.shape),
        )
