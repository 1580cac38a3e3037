"""Verification by choices, and writing into the state, in plain torch, as it runs on a CPU.

Letters: S slots, L columns, N rows with a choice, B requests, K drafts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hydraspec_kernels.sampling.random_streams import Purpose, uniform
from hydraspec_kernels.sampling.records import CommittedBatch, SlotTokens, Verdict, VerifiedBatch


def verify_prefix_reference(choices: Tensor, batch: VerifiedBatch) -> Verdict:
    """See `verification.verify_prefix`. It has few operations, because on a CPU each costs as much
    as its arithmetic.
    """
    choices = choices.take(batch.verify_rows)
    broken = choices < 0
    before = choices.narrow(1, 0, batch.draft_tokens.shape[1])
    matches = (before == batch.draft_tokens) & (before >= 0)  # ~0 is -1, but no missing draft
    return _emit(choices, matches, broken, batch)


def mean_accepted(
    batch: VerifiedBatch, acceptance_length: float, accepts: Tensor | None
) -> Tensor | float:
    """Drafts that a step accepts by the synthetic rule on average: one number, or [B, 1] float64 of
    `accepts`, of which each step accepts exactly so many, as each draw is in [0, 1)."""
    if accepts is None:
        return acceptance_length - 1
    first = batch.seq_lens - batch.num_drafts
    places = batch.slots * accepts.shape[1] + first
    return accepts.view(-1).take(places).to(torch.float64).unsqueeze(1)


def verify_synthetic_reference(
    choices: Tensor,
    batch: VerifiedBatch,
    seed: Tensor,
    acceptance_length: float,
    accepts: Tensor | None = None,
) -> Verdict:
    """See `verification.verify_synthetic`."""
    choices = choices.take(batch.verify_rows)
    broken = choices < 0
    index = torch.arange(batch.draft_tokens.shape[1], device=choices.device)
    position = (batch.seq_lens - batch.num_drafts).unsqueeze(1) + index
    seed = seed.index_select(0, batch.slots).unsqueeze(1)
    draws = uniform(seed, position, Purpose.ACCEPT, index)
    rate = mean_accepted(batch, acceptance_length, accepts) - index.to(torch.float64)
    accepted = (draws < rate) & (batch.draft_tokens >= 0) & ~broken[:, :-1]
    drafts, is_draft = (torch.nn.functional.pad(x, (0, 1)) for x in (batch.draft_tokens, accepted))
    tokens = torch.where(is_draft, drafts, choices)
    return _emit(tokens, accepted, broken, batch)


def _emit(tokens: Tensor, accepted: Tensor, broken: Tensor, batch: VerifiedBatch) -> Verdict:
    """The verdict. Token 0 is emitted if the request samples, and token j+1 if draft j is accepted
    and token j is emitted. broken [B, K+1] marks tokens that are given as ~token; no draft is
    accepted there, so that only the last emitted token can be broken.
    """
    emitted = torch.cat([batch.samples.unsqueeze(1), accepted], 1).cummin(1).values
    num_sampled = emitted.sum(1)
    return Verdict(
        tokens=torch.where(emitted, torch.where(broken, ~tokens, tokens), -1),
        num_sampled=num_sampled,
        num_rejected=(batch.num_drafts + 1).mul_(batch.samples).sub_(num_sampled),
        not_finite=(emitted & broken).sum(1),
    )


def commit_tokens_reference(state: SlotTokens, batch: CommittedBatch, verdict: Verdict) -> None:
    """See `verification.commit_tokens`."""
    first = batch.seq_lens - batch.num_drafts  # position of the first predicted token
    _write_tokens(state.token_ids, batch, first, verdict.tokens)
    state.num_computed.index_copy_(0, batch.slots, batch.seq_lens - verdict.num_rejected)


def store_drafts_reference(state: SlotTokens, batch: CommittedBatch, tokens: Tensor) -> None:
    """See `verification.store_drafts`."""
    newest = state.num_computed.index_select(0, batch.slots)
    _write_tokens(state.token_ids, batch, newest + 1, tokens)


def _write_tokens(token_ids: Tensor, batch: CommittedBatch, first: Tensor, tokens: Tensor) -> None:
    """Sets token_ids[slot, first + j] = tokens[:, j] for requests that sample; other requests write
    to the last column.
    """
    columns = token_ids.shape[1]
    offsets = torch.arange(tokens.shape[1], device=tokens.device)
    places = first.unsqueeze(1) + offsets
    places = torch.where(batch.samples.unsqueeze(1), places, columns - 1)
    places = places + (batch.slots * columns).unsqueeze(1)
    token_ids.view(-1).index_copy_(0, places.view(-1), tokens.reshape(-1))
