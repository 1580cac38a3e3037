"""The persistent per-slot state on the device: created once, written at admission, commit and
propose."""

from __future__ import annotations

import numpy as np
import torch
from hydraspec_kernels.sampling.records import CommittedBatch
from hydraspec_kernels.sampling.verification import store_drafts

from hydraspec.sampling.logprobs import WIDTH
from hydraspec.sampling.rules import new_slot_rules
from hydraspec.types import Batch, Draft, RequestState, SamplingParams


def new_request_state(
    *,
    num_slots: int,
    max_model_len: int,
    vocab_size: int,
    num_speculative_tokens: int,
    draft_vocab_size: int | None,
    device: torch.device,
    draft_vocab_map: torch.Tensor | None = None,
    estimates_survival: bool = False,
    follows_record: bool = False,
) -> RequestState:
    """Zeroed state of `num_slots` requests and one more slot that padding requests share.

    `draft_vocab_size` None: drafts are greedy and no probabilities are kept. `draft_vocab_map`
    [V_draft]: the target's ids of a narrower draft vocabulary. estimates_survival: drafts come with
    estimates, which are kept. follows_record: acceptance is that of an earlier run.
    """
    # Drafts after the last token lie past max_model_len; one more column takes masked writes.
    columns = max_model_len + num_speculative_tokens + 2
    num_slots += 1
    probs = None
    if draft_vocab_size is not None:
        probs = torch.zeros(num_slots, num_speculative_tokens, draft_vocab_size, device=device)
    survivals = None
    if estimates_survival:
        survivals = torch.zeros(num_slots, num_speculative_tokens, device=device)
    accepts = None
    if follows_record:
        accepts = torch.zeros(num_slots, columns, dtype=torch.int8, device=device)
    return RequestState(
        accepts=accepts,
        token_ids=torch.zeros(num_slots, columns, dtype=torch.int64, device=device),
        num_computed=torch.zeros(num_slots, dtype=torch.int64, device=device),
        temperature=torch.zeros(num_slots, device=device),
        top_k=torch.zeros(num_slots, dtype=torch.int64, device=device),
        top_p=torch.ones(num_slots, device=device),
        min_p=torch.zeros(num_slots, device=device),
        seed=torch.zeros(num_slots, dtype=torch.int64, device=device),
        draft_probs=probs,
        draft_vocab_map=draft_vocab_map,
        draft_survivals=survivals,
        rules=new_slot_rules(num_slots, num_speculative_tokens, vocab_size, device),
        logprobs=torch.zeros(num_slots, num_speculative_tokens + 1, WIDTH, device=device),
    )


def write_request(
    state: RequestState,
    slot: int,
    token_ids: list[int],
    sampling: SamplingParams,
    num_computed: int = 0,
) -> None:
    """Give `slot` to a request: its tokens, of which the first `num_computed` have KV already, and
    no drafts left from the slot's last owner.

    On CUDA the host does not wait: tokens go through pinned memory, numbers as launch arguments.
    """
    row = state.token_ids[slot]
    row.zero_()
    staged = torch.from_numpy(np.array(token_ids, dtype=np.int64))
    if row.is_cuda:
        staged = staged.pin_memory()  # given back once the copy is done
    row[: len(token_ids)].copy_(staged, non_blocking=True)
    state.num_computed[slot].fill_(num_computed)
    state.temperature[slot].fill_(sampling.temperature)
    state.top_k[slot].fill_(sampling.top_k)
    state.top_p[slot].fill_(sampling.top_p)
    state.min_p[slot].fill_(sampling.min_p)
    state.seed[slot].fill_(sampling.seed)


def store_draft(state: RequestState, batch: CommittedBatch, draft: Draft) -> None:
    """Write the drafts after each request's newest sampled token, where the next step's rows read
    them."""
    store_drafts(state, batch, draft.tokens)
    if draft.probs is not None and state.draft_probs is not None:
        # With fewer than K drafts there are fewer columns; the others are read for no draft.
        state.draft_probs[:, : draft.probs.shape[1]].index_copy_(0, batch.slots, draft.probs)
    if draft.survivals is not None and state.draft_survivals is not None:
        width = draft.survivals.shape[1]
        state.draft_survivals[:, :width].index_copy_(0, batch.slots, draft.survivals)


def of_full_width(draft: Draft | None, batch: Batch, num_speculative_tokens: int) -> Draft:
    """The draft with tokens [B, K], -1 after the step's `draft_length`; without a draft all are -1.

    A slot always gets K columns: drafts of an earlier step must not pass for those of this one.
    """
    assert batch.draft_length is not None
    if draft is not None and batch.draft_length == num_speculative_tokens:
        return draft
    k, shape = batch.draft_length, (batch.num_requests, num_speculative_tokens)
    tokens = torch.full(shape, -1, dtype=torch.int64, device=batch.slots.device)
    if draft is None:
        return Draft(tokens=tokens)
    tokens[:, :k] = draft.tokens[:, :k]
    probs, survivals = (
        None if each is None else each[:, :k] for each in (draft.probs, draft.survivals)
    )
    return Draft(tokens=tokens, probs=probs, survivals=survivals)
