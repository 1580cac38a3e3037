"""Verification by choices, and writing into the state, in plain torch: what runs on a CPU.

Letters: S slots, L columns, N rows with a choice, B requests, K drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hydraspec_kernels.sampling.random_streams import Purpose, uniform


@dataclass(slots=True)
class Verified:
    """tokens[b, :num_sampled[b]] are accepted drafts, then one more; -1 behind them."""

    tokens: Tensor  # [B, K+1]
    num_sampled: Tensor  # [B], 0 for requests that do not sample
    num_rejected: Tensor  # [B]
    not_finite: Tensor  # [B] 1 if the last emitted token comes from logits that are not finite


def verify_prefix_reference(
    choices: Tensor,
    verify_rows: Tensor,
    draft_tokens: Tensor,
    num_drafts: Tensor,
    samples: Tensor,
) -> Verified:
    """See `verification.verify_prefix`. Few operations, because on a CPU each costs as much as
    the arithmetic.
    """
    choices = choices.take(verify_rows)
    broken = choices < 0
    before = choices.narrow(1, 0, draft_tokens.shape[1])
    matches = (before == draft_tokens) & (before >= 0)  # ~0 is no missing draft
    return _emit(choices, matches, broken, num_drafts, samples)


def verify_at_rate_reference(
    choices: Tensor,
    verify_rows: Tensor,
    draft_tokens: Tensor,
    num_drafts: Tensor,
    samples: Tensor,
    seq_lens: Tensor,
    slots: Tensor,
    seed: Tensor,
    acceptance_length: float,
) -> Verified:
    """See `verification.verify_at_rate`."""
    choices = choices.take(verify_rows)
    broken = choices < 0
    index = torch.arange(draft_tokens.shape[1], device=choices.device)
    position = (seq_lens - num_drafts).unsqueeze(1) + index
    draws = uniform(seed.index_select(0, slots).unsqueeze(1), position, Purpose.ACCEPT, index)
    rate = (acceptance_length - 1 - index.to(torch.float64)).clamp_(0, 1)
    accepted = (draws < rate) & (draft_tokens >= 0) & ~broken[:, :-1]
    drafts, is_draft = (torch.nn.functional.pad(x, (0, 1)) for x in (draft_tokens, accepted))
    tokens = torch.where(is_draft, drafts, choices)
    return _emit(tokens, accepted, broken, num_drafts, samples)


def _emit(
    tokens: Tensor, accepted: Tensor, broken: Tensor, num_drafts: Tensor, samples: Tensor
) -> Verified:
    """The verdict, if token 0 is emitted whenever the request samples, and token j+1 if draft j is
    accepted and token j is emitted. broken [B, K+1]: the tokens that are ~token; no draft there is
    accepted, so only the last emitted one can be.
    """
    emitted = torch.cat([samples.unsqueeze(1), accepted], 1).cummin(1).values
    num_sampled = emitted.sum(1)
    return Verified(
        tokens=torch.where(emitted, torch.where(broken, ~tokens, tokens), -1),
        num_sampled=num_sampled,
        num_rejected=(num_drafts + 1).mul_(samples).sub_(num_sampled),
        not_finite=(emitted & broken).sum(1),
    )


def commit_tokens_reference(
    token_ids: Tensor,
    num_computed: Tensor,
    slots: Tensor,
    seq_lens: Tensor,
    num_drafts: Tensor,
    samples: Tensor,
    tokens: Tensor,
    num_rejected: Tensor,
) -> None:
    """See `verification.commit_tokens`."""
    ends = seq_lens - num_drafts  # position of the first predicted token
    _write_behind(token_ids, slots, samples, ends, tokens)
    num_computed.index_copy_(0, slots, seq_lens - num_rejected)


def store_drafts_reference(
    token_ids: Tensor, num_computed: Tensor, slots: Tensor, samples: Tensor, tokens: Tensor
) -> None:
    """See `verification.store_drafts`."""
    newest = num_computed.index_select(0, slots)
    _write_behind(token_ids, slots, samples, newest + 1, tokens)


def _write_behind(
    token_ids: Tensor, slots: Tensor, samples: Tensor, first: Tensor, tokens: Tensor
) -> None:
    """token_ids[slot, first + j] = tokens[:, j] for requests that sample; the others write the
    last column.
    """
    columns = token_ids.shape[1]
    offsets = torch.arange(tokens.shape[1], device=tokens.device)
    places = torch.where(samples.unsqueeze(1), first.unsqueeze(1) + offsets, columns - 1)
    places = places + (slots * columns).unsqueeze(1)
    token_ids.view(-1).index_copy_(0, places.view(-1), tokens.reshape(-1))
