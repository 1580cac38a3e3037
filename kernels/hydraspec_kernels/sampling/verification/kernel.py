"""Verification by choices and writing into the state, one launch each; a lane is a request."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hydraspec_kernels.runtime.launch import check_contiguous
from hydraspec_kernels.runtime.launch_kernel import (
    dependent_launch,
    start_next,
    wait_for_inputs,
)
from hydraspec_kernels.sampling.random_streams.kernel import (
    ACCEPT,
    INDEX_STEP,
    stream_key,
    unit_interval,
)
from hydraspec_kernels.sampling.records import CommittedBatch, SlotTokens, Verdict, VerifiedBatch

BLOCK = 32  # requests of a program; few, so that more multiprocessors share the work


@triton.jit(do_not_specialize=["columns", "num_requests"])
def _verify_choices(
    tokens_ptr,  # [B, K+1]
    num_sampled_ptr,  # [B]
    num_rejected_ptr,  # [B]
    not_finite_ptr,  # [B]
    choices_ptr,  # [N], ~token where its logits are not finite
    verify_rows_ptr,  # [B, K+1]
    drafts_ptr,  # [B, K]
    num_drafts_ptr,  # [B]
    samples_ptr,  # [B]
    seq_lens_ptr,  # [B]; this and the next two are read to draw only
    request_slots_ptr,  # [B]
    seed_ptr,  # [S]
    accepts_ptr,  # [S, L+1] int8, or None
    columns,
    num_requests,
    MEAN_ACCEPTED: tl.constexpr,  # of the synthetic rule; None: a draft that is the choice passes
    K: tl.constexpr,
    WIDTH: tl.constexpr,  # power of two, at least K + 1
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    request = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    is_request = request < num_requests
    wait_for_inputs(PDL)
    samples = tl.load(samples_ptr + request, mask=is_request, other=0) != 0
    num_drafts = tl.load(num_drafts_ptr + request, mask=is_request, other=0)
    if MEAN_ACCEPTED is not None:
        slot = tl.load(request_slots_ptr + request, mask=is_request, other=0)
        seed = tl.load(seed_ptr + slot, mask=is_request, other=0)
        first = tl.load(seq_lens_ptr + request, mask=is_request, other=0) - num_drafts
        mean_accepted = MEAN_ACCEPTED
        if accepts_ptr is not None:
            place = accepts_ptr + slot * columns + first
            mean_accepted = tl.load(place, mask=is_request, other=0)[:, None].to(tl.float64)
    j = tl.arange(0, WIDTH)[None, :]
    at, is_draft = request[:, None], samples[:, None] & (j < K)
    is_row = samples[:, None] & (j <= K)
    row = tl.load(verify_rows_ptr + at * (K + 1) + j, mask=is_row, other=0)
    draft = tl.load(drafts_ptr + at * K + j, mask=is_draft, other=-1)
    token = tl.load(choices_ptr + row, mask=is_row, other=0)
    is_broken = token < 0
    token = tl.where(is_broken, -1 - token, token)
    is_draft = is_draft & (is_broken == 0)  # a broken choice accepts no draft
    if MEAN_ACCEPTED is not None:
        code = j * INDEX_STEP + ACCEPT
        draw = unit_interval(stream_key(seed[:, None], first[:, None] + j, code))
        is_accepted = is_draft & (draft >= 0) & (draw < mean_accepted - j.to(tl.float64))
        token = tl.where(is_accepted, draft, token)
    else:
        is_accepted = is_draft & (draft == token)
    is_rejected = 1 - is_accepted.to(tl.int32)
    is_emitted = is_row & (tl.cumsum(is_rejected, 1) == is_rejected)  # none rejected before
    num_sampled = tl.sum(is_emitted.to(tl.int64), 1)
    places = tokens_ptr + at * (K + 1) + j
    tl.store(places, tl.where(is_emitted, token, -1), mask=is_request[:, None] & (j <= K))
    tl.store(num_sampled_ptr + request, num_sampled, mask=is_request)
    num_rejected = tl.where(samples, num_drafts + 1 - num_sampled, 0)
    tl.store(num_rejected_ptr + request, num_rejected, mask=is_request)
    not_finite = tl.sum((is_emitted & is_broken).to(tl.int64), 1)  # the last emitted one, if any
    tl.store(not_finite_ptr + request, not_finite, mask=is_request)


def verify_prefix_kernel(choices: Tensor, batch: VerifiedBatch) -> Verdict:
    """See `verification.verify_prefix`."""
    return _verify(choices, batch, None, None, None)


def verify_synthetic_kernel(
    choices: Tensor,
    batch: VerifiedBatch,
    seed: Tensor,
    acceptance_length: float,
    accepts: Tensor | None = None,
) -> Verdict:
    """See `verification.verify_synthetic`."""
    return _verify(choices, batch, seed, acceptance_length - 1, accepts)


def _verify(
    choices: Tensor,
    batch: VerifiedBatch,
    seed: Tensor | None,
    mean_accepted: float | None,
    accepts: Tensor | None,
) -> Verdict:
    num_drafts = batch.num_drafts
    draws = (num_drafts,) * 3  # any tensors of int64: they are read to draw only
    if seed is not None:
        draws = (batch.seq_lens, batch.slots, seed)
    check_contiguous(
        choices, batch.verify_rows, batch.draft_tokens, num_drafts, batch.samples, *draws
    )
    b, k = batch.draft_tokens.shape
    out = Verdict.empty_like(batch)
    _verify_choices[(triton.cdiv(b, BLOCK),)](
        out.tokens, out.num_sampled, out.num_rejected, out.not_finite,
        choices, batch.verify_rows, batch.draft_tokens, num_drafts, batch.samples.view(torch.int8),
        *draws, accepts, 0 if accepts is None else accepts.shape[1], b,
        MEAN_ACCEPTED=mean_accepted, K=k, WIDTH=triton.next_power_of_2(k + 1), BLOCK=BLOCK,
        num_warps=1, **dependent_launch(choices),
    )  # fmt: skip
    return out


@triton.jit
def _write_tokens(
    token_ids_ptr, columns, slot, first, tokens_ptr, request, writes, COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Sets token_ids[slot, first + j] = tokens[request, j], j < COUNT, of requests that write."""
    j = tl.arange(0, WIDTH)[None, :]
    writes = writes[:, None] & (j < COUNT)
    token = tl.load(tokens_ptr + request[:, None] * COUNT + j, mask=writes, other=-1)
    tl.store(token_ids_ptr + (slot * columns + first)[:, None] + j, token, mask=writes)


@triton.jit(do_not_specialize=["columns", "num_requests"])
def _commit_tokens(
    token_ids_ptr,  # [S, L+1]
    num_computed_ptr,  # [S]
    request_slots_ptr,  # [B]
    seq_lens_ptr,  # [B]
    num_drafts_ptr,  # [B]
    samples_ptr,  # [B]
    tokens_ptr,  # [B, K+1]
    num_rejected_ptr,  # [B]
    columns,
    num_requests,
    COUNT: tl.constexpr,  # K + 1
    WIDTH: tl.constexpr,  # power of two, at least COUNT
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    request = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    is_request = request < num_requests
    wait_for_inputs(PDL)
    slot = tl.load(request_slots_ptr + request, mask=is_request, other=0)
    length = tl.load(seq_lens_ptr + request, mask=is_request, other=0)
    samples = tl.load(samples_ptr + request, mask=is_request, other=0) != 0
    rejected = tl.load(num_rejected_ptr + request, mask=is_request, other=0)
    first = length - tl.load(num_drafts_ptr + request, mask=is_request, other=0)
    _write_tokens(token_ids_ptr, columns, slot, first, tokens_ptr, request, samples, COUNT, WIDTH)
    tl.store(num_computed_ptr + slot, length - rejected, mask=is_request)


def commit_tokens_kernel(state: SlotTokens, batch: CommittedBatch, verdict: Verdict) -> None:
    """See `verification.commit_tokens`; the last column is not written."""
    token_ids, tokens = state.token_ids, verdict.tokens
    step = (batch.slots, batch.seq_lens, batch.num_drafts, batch.samples.view(torch.int8))
    b, count = tokens.shape
    _commit_tokens[(triton.cdiv(b, BLOCK),)](
        token_ids, state.num_computed, *step, tokens, verdict.num_rejected, token_ids.shape[1], b,
        COUNT=count, WIDTH=triton.next_power_of_2(count), BLOCK=BLOCK,
        num_warps=1, **dependent_launch(tokens),
    )  # fmt: skip


@triton.jit(do_not_specialize=["columns", "num_requests"])
def _store_drafts(
    token_ids_ptr,  # [S, L+1]
    num_computed_ptr,  # [S]
    request_slots_ptr,  # [B]
    samples_ptr,  # [B]
    tokens_ptr,  # [B, K]
    columns,
    num_requests,
    COUNT: tl.constexpr,  # K
    WIDTH: tl.constexpr,  # power of two, at least COUNT
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    request = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    is_request = request < num_requests
    wait_for_inputs(PDL)
    slot = tl.load(request_slots_ptr + request, mask=is_request, other=0)
    samples = tl.load(samples_ptr + request, mask=is_request, other=0) != 0
    first = tl.load(num_computed_ptr + slot, mask=is_request, other=0) + 1
    _write_tokens(token_ids_ptr, columns, slot, first, tokens_ptr, request, samples, COUNT, WIDTH)


def store_drafts_kernel(state: SlotTokens, batch: CommittedBatch, tokens: Tensor) -> None:
    """See `verification.store_drafts`; the last column is not written."""
    token_ids, samples = state.token_ids, batch.samples.view(torch.int8)
    b, count = tokens.shape
    if count == 0:
        return
    _store_drafts[(triton.cdiv(b, BLOCK),)](
        token_ids, state.num_computed, batch.slots, samples, tokens, token_ids.shape[1], b,
        COUNT=count, WIDTH=triton.next_power_of_2(count), BLOCK=BLOCK,
        num_warps=1, **dependent_launch(tokens),
    )  # fmt: skip
