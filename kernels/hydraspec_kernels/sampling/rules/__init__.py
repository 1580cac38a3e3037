"""Rules on logits: what changes the target's rows before temperature, truncation and verification.

Row j of a request reads its known tokens and the j drafts before it, so that rules are exact at
every draft and nothing has to be taken back for rejected ones (docs/adr/0050).
"""

from __future__ import annotations

from torch import Tensor

from hydraspec_kernels.sampling.records import (
    SamplingFlags,
    SlotRules,
    SlotTokens,
    VerifiedBatch,
)
from hydraspec_kernels.sampling.rules.reference import (
    constrained_reference,
    row_places,
    without_bans_reference,
)

__all__ = ["constrained", "row_places", "without_bans"]


def constrained(
    logits: Tensor,
    batch: VerifiedBatch,
    state: SlotTokens,
    rules: SlotRules,
    flags: SamplingFlags,
) -> Tensor:
    """Logits [N, V] under the rules of each row's request, in a new tensor of float32 (float64 for
    float64). Biases and bans come first, then the repetition penalty, then those of frequency and
    presence. `state` is that before the step; `flags` say which rules some request has.

    It reads nothing back and has shapes of its inputs alone: a graph may hold it.
    """
    return constrained_reference(logits, batch, state, rules, flags)


def without_bans(
    logits: Tensor, slots: Tensor, num_known: Tensor, rules: SlotRules, token_ids: Tensor | None
) -> Tensor:
    """Draft logits [B, V'] without the tokens that the target never samples there, or next to
    never, in a new tensor of float32 (float64 for float64): bad words of one token, biases of -100
    and below, and ends before the least length. slots [B]; num_known [B] tokens before the
    predicted one, drafts among them; token_ids [V'] are the target's ids of the columns, None: the
    same.
    """
    return without_bans_reference(logits, slots, num_known, rules, token_ids)
