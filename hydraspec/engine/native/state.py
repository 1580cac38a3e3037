"""The persistent per-slot state on the device: created once, written at admission, commit and
propose."""

from __future__ import annotations

import torch

from hydraspec.types import Batch, Draft, RequestState, SamplingParams, Verdict


def new_request_state(
    *,
    num_slots: int,
    max_model_len: int,
    num_speculative_tokens: int,
    draft_vocab_size: int | None,
    device: torch.device,
    draft_vocab_map: torch.Tensor | None = None,
) -> RequestState:
    """Zeroed state. `draft_vocab_size` None: drafts are greedy and no probabilities are kept.

    `draft_vocab_map` [V_draft]: the target's ids of a narrower draft vocabulary.
    """
    # Drafts of the last token stand past max_model_len; one more column takes masked writes.
    columns = max_model_len + num_speculative_tokens + 2
    probs = None
    if draft_vocab_size is not None:
        probs = torch.zeros(num_slots, num_speculative_tokens, draft_vocab_size, device=device)
    return RequestState(
        token_ids=torch.zeros(num_slots, columns, dtype=torch.int64, device=device),
        num_computed=torch.zeros(num_slots, dtype=torch.int64, device=device),
        temperature=torch.zeros(num_slots, device=device),
        top_k=torch.zeros(num_slots, dtype=torch.int64, device=device),
        top_p=torch.ones(num_slots, device=device),
        min_p=torch.zeros(num_slots, device=device),
        seed=torch.zeros(num_slots, dtype=torch.int64, device=device),
        draft_probs=probs,
        draft_vocab_map=draft_vocab_map,
    )


def write_request(
    state: RequestState, slot: int, token_ids: list[int], sampling: SamplingParams
) -> None:
    """Give `slot` to a request: its tokens, nothing computed, no drafts left from the slot's last
    owner."""
    state.token_ids[slot].zero_()
    state.token_ids[slot, : len(token_ids)] = torch.tensor(token_ids, device=state.token_ids.device)
    state.num_computed[slot] = 0
    state.temperature[slot] = sampling.temperature
    state.top_k[slot] = sampling.top_k
    state.top_p[slot] = sampling.top_p
    state.min_p[slot] = sampling.min_p
    state.seed[slot] = sampling.seed


def commit(state: RequestState, batch: Batch, verdict: Verdict) -> None:
    """Write the verdict into the state: emitted tokens behind the computed ones, then the new
    computed count."""
    ends = batch.seq_lens - batch.num_drafts  # position of the first predicted token
    num_computed = batch.seq_lens - verdict.num_rejected
    _write_behind(state, batch, ends, verdict.tokens)
    state.num_computed.index_copy_(0, batch.slots, num_computed)


def store_draft(state: RequestState, batch: Batch, draft: Draft) -> None:
    """Put the drafts behind each request's newest sampled token, where the next step's rows read
    them."""
    newest = state.num_computed.index_select(0, batch.slots)
    _write_behind(state, batch, newest + 1, draft.tokens)
    if draft.probs is not None and state.draft_probs is not None:
        state.draft_probs.index_copy_(0, batch.slots, draft.probs)


def _write_behind(
    state: RequestState, batch: Batch, first: torch.Tensor, tokens: torch.Tensor
) -> None:
    """token_ids[slot, first + j] = tokens[:, j] for requests that sample; the others write the dump
    column.

    Entries of -1 behind the emitted tokens are written too: the drafts, or the next step, overwrite
    them.
    """
    columns = state.token_ids.shape[1]
    offsets = torch.arange(tokens.shape[1], device=tokens.device)
    places = torch.where(batch.samples.unsqueeze(1), first.unsqueeze(1) + offsets, columns - 1)
    places = places + (batch.slots * columns).unsqueeze(1)
    state.token_ids.view(-1).index_copy_(0, places.view(-1), tokens.reshape(-1))
