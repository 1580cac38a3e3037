"""Rules on logits in plain torch.

Definitions are those of transformers' logits processors (repetition, bias, bad words, least length)
and of vLLM (frequency, presence). Letters: B requests, K drafts, N rows of logits, V vocabulary, L
tokens that a slot can hold; E and C as in SlotRules.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hydraspec_kernels.sampling.records import (
    SamplingFlags,
    SlotRules,
    SlotTokens,
    VerifiedBatch,
)

BAN = -1e9  # added to draft logits: finite, so that a row of banned tokens is a distribution too


@dataclass(slots=True, frozen=True)
class RowPlaces:
    """Places of N rows of logits. Rows that no request verifies have the last slot."""

    request: Tensor  # [N] batch index
    slot: Tensor  # [N]
    num_drafts: Tensor  # [N] drafts of the step before the predicted token
    num_known: Tensor  # [N] tokens before the predicted one, those drafts among them


def constrained_reference(
    logits: Tensor,
    batch: VerifiedBatch,
    state: SlotTokens,
    rules: SlotRules,
    flags: SamplingFlags,
) -> Tensor:
    """See `rules.constrained`."""
    places = row_places(batch, logits.shape[0], state.num_computed.shape[0])
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    if flags.any_biases:
        _add_biases(logits, places, rules)
        _ban_ends(logits, places, rules)
        _ban_words(logits, places, state, rules)
    if flags.any_penalties:
        logits = _penalised(logits, batch, places, state, rules)
    if flags.any_masks:
        _ban_unmasked(logits, places, rules)
    return logits


def without_bans_reference(
    logits: Tensor, slots: Tensor, num_known: Tensor, rules: SlotRules, token_ids: Tensor | None
) -> Tensor:
    """See `rules.without_bans`."""
    ids = rules.ban_ids.index_select(0, slots)
    is_banned = num_known.unsqueeze(1) < rules.ban_until.index_select(0, slots)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    bans = is_banned.to(logits.dtype) * BAN
    if token_ids is None:
        return logits.scatter_add_(1, ids, bans)
    whole = logits.new_zeros(len(logits), 32 * rules.masks.shape[-1])  # at least V
    whole.scatter_add_(1, ids, bans)
    return logits.add_(whole.index_select(1, token_ids))


def row_places(batch: VerifiedBatch, num_rows: int, num_slots: int) -> RowPlaces:
    """The request and the drafts before each of `num_rows` rows of logits. A row that stands at
    several places of `verify_rows` is that of the first one."""
    num_requests, width = batch.verify_rows.shape
    none = num_requests * width
    first = torch.full((num_rows,), none, dtype=torch.int64, device=batch.verify_rows.device)
    place = torch.arange(none, device=first.device)
    first.scatter_reduce_(0, batch.verify_rows.flatten(), place, "amin")
    is_read = first < none
    request = torch.where(is_read, first.div(width, rounding_mode="floor"), 0)
    num_drafts = torch.where(is_read, first.remainder(width), 0)
    num_known = (batch.seq_lens - batch.num_drafts).index_select(0, request) + num_drafts
    slot = torch.where(is_read, batch.slots.index_select(0, request), num_slots - 1)
    return RowPlaces(request, slot, num_drafts, num_known)


def _add_biases(logits: Tensor, places: RowPlaces, rules: SlotRules) -> None:
    biases = rules.biases.index_select(0, places.slot).to(logits.dtype)
    logits.scatter_add_(1, rules.bias_ids.index_select(0, places.slot), biases)


def _ban_ends(logits: Tensor, places: RowPlaces, rules: SlotRules) -> None:
    """Bans ending tokens while there are fewer tokens than the request must have."""
    ids = rules.end_ids.index_select(0, places.slot)
    is_early = places.num_known < rules.num_least.index_select(0, places.slot)
    _ban(logits, ids, (ids >= 0) & is_early.unsqueeze(1))


def _ban_words(logits: Tensor, places: RowPlaces, state: SlotTokens, rules: SlotRules) -> None:
    """Bans the last token of each bad word whose other tokens are the newest ones."""
    words = rules.bad_words.index_select(0, places.slot)  # [N, W, C]
    before, last = words[..., :-1], words[..., -1]
    ago = torch.arange(before.shape[-1], 0, -1, device=logits.device)
    position = places.num_known.unsqueeze(1) - ago
    newest = _tokens_at(state, places.slot, position.clamp(min=0))
    newest = torch.where(position < 0, -2, newest).unsqueeze(1)  # equals no part of a word
    _ban(logits, last, ((before == newest) | (before < 0)).all(-1) & (last >= 0))


def _ban_unmasked(logits: Tensor, places: RowPlaces, rules: SlotRules) -> None:
    """Bans the tokens whose bits are 0."""
    num_places, num_words = rules.masks.shape[1:]
    row = places.slot * num_places + places.num_drafts
    words = rules.masks.view(-1, num_words).index_select(0, row)
    bit = torch.arange(32, dtype=torch.int32, device=logits.device)
    is_allowed = ((words.unsqueeze(2) >> bit) & 1).flatten(1)[:, : logits.shape[1]]
    logits.masked_fill_(is_allowed == 0, -torch.inf)


def _ban(logits: Tensor, ids: Tensor, is_banned: Tensor) -> None:
    """Sets logits[n, ids[n, i]] to minus infinity where is_banned[n, i]; other ids are any."""
    bans = torch.zeros_like(ids, dtype=logits.dtype).masked_fill_(is_banned, -torch.inf)
    logits.scatter_add_(1, ids.clamp(min=0), bans)


def _tokens_at(state: SlotTokens, slot: Tensor, position: Tensor) -> Tensor:
    """Tokens [N, any] of each row's slot at these positions."""
    columns = state.token_ids.shape[1]
    return state.token_ids.take(slot.unsqueeze(1) * columns + position)


def _penalised(
    logits: Tensor,
    batch: VerifiedBatch,
    places: RowPlaces,
    state: SlotTokens,
    rules: SlotRules,
) -> Tensor:
    """Logits less the penalties on tokens of prompt and output."""
    in_prompt, counts = _counts(batch, state, rules, logits.shape[1])
    counts = counts.index_select(0, places.request)
    drafts = batch.draft_tokens.index_select(0, places.request)
    index = torch.arange(drafts.shape[1], device=drafts.device)
    is_before = (index < places.num_drafts.unsqueeze(1)) & (drafts >= 0)
    counts.scatter_add_(1, drafts.clamp(min=0), is_before.to(counts.dtype))
    in_output = counts > 0
    seen = in_output | (in_prompt.index_select(0, places.request) > 0)

    def by_row(values: Tensor) -> Tensor:
        return values.index_select(0, places.slot).unsqueeze(1).to(logits.dtype)

    repetition = by_row(rules.repetition)
    repeated = torch.where(logits < 0, logits * repetition, logits / repetition)
    logits = torch.where(seen, repeated, logits)
    logits -= by_row(rules.frequency) * counts
    return logits.sub_(by_row(rules.presence) * in_output)


def _counts(
    batch: VerifiedBatch, state: SlotTokens, rules: SlotRules, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """How often each token is in the prompt, and in the output so far, [B, V] int32 both: counted
    anew from the tokens themselves, so that no count has to follow what was rejected."""
    tokens = state.token_ids.index_select(0, batch.slots)
    position = torch.arange(tokens.shape[1], device=tokens.device)
    num_prompt = rules.num_prompt.index_select(0, batch.slots).unsqueeze(1)
    num_known = (batch.seq_lens - batch.num_drafts).unsqueeze(1)
    is_known = position < num_known
    # What is not counted adds 0, spread over the vocabulary: one place would be a queue of atomics.
    index = torch.where(is_known, tokens, position.remainder(vocab_size))
    is_prompt = is_known & (position < num_prompt)

    def counted(which: Tensor) -> Tensor:
        zeros = torch.zeros(len(tokens), vocab_size, dtype=torch.int32, device=tokens.device)
        return zeros.scatter_add_(1, index, which.to(torch.int32))

    return counted(is_prompt), counted(is_known & ~is_prompt)
