"""Verification by choices and writing into the state, one launch each; a lane is a request."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hydraspec_kernels.runtime.launch_kernel import (
    check_contiguous,
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
from hydraspec_kernels.sampling.verification.reference import Verified

BLOCK = 32  # few lanes: what little there is to do runs on more processors


@triton.jit(do_not_specialize=["num_requests"])
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
    seq_lens_ptr,  # [B]; this and the next two only to draw
    request_slots_ptr,  # [B]
    seed_ptr,  # [S]
    num_requests,
    MEAN_ACCEPTED: tl.constexpr,  # drafts accepted by drawing; None: where draft is choice
    K: tl.constexpr,
    WIDTH: tl.constexpr,  # power of two from K + 1 on
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
    j = tl.arange(0, WIDTH)[None, :]
    at, is_draft = request[:, None], samples[:, None] & (j < K)
    is_row = samples[:, None] & (j <= K)
    row = tl.load(verify_rows_ptr + at * (K + 1) + j, mask=is_row, other=0)
    draft = tl.load(drafts_ptr + at * K + j, mask=is_draft, other=-1)
    token = tl.load(choices_ptr + row, mask=is_row, other=0)
    is_broken = token < 0
    token = tl.where(is_broken, -1 - token, token)
    is_draft = is_draft & (is_broken == 0)  # such a choice accepts none
    if MEAN_ACCEPTED is not None:
        code = j * INDEX_STEP + ACCEPT
        draw = unit_interval(stream_key(seed[:, None], first[:, None] + j, code))
        is_accepted = is_draft & (draft >= 0) & (draw < MEAN_ACCEPTED - j.to(tl.float64))
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


def verify_prefix_kernel(
    choices: Tensor,
    verify_rows: Tensor,
    draft_tokens: Tensor,
    num_drafts: Tensor,
    samples: Tensor,
) -> Verified:
    """See `verification.verify_prefix`."""
    return _verify(
        choices, verify_rows, draft_tokens, num_drafts, samples, num_drafts, num_drafts,
        num_drafts, None,
    )  # fmt: skip


def verify_at_rate_kernel(
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
    return _verify(
        choices, verify_rows, draft_tokens, num_drafts, samples, seq_lens, slots, seed,
        acceptance_length - 1,
    )  # fmt: skip


def _verify(
    choices: Tensor,
    verify_rows: Tensor,
    draft_tokens: Tensor,
    num_drafts: Tensor,
    samples: Tensor,
    seq_lens: Tensor,
    slots: Tensor,
    seed: Tensor,
    mean_accepted: float | None,
) -> Verified:
    check_contiguous(choices, verify_rows, draft_tokens, num_drafts, samples, seq_lens, slots, seed)
    b, k = draft_tokens.shape
    out = Verified(
        tokens=num_drafts.new_empty(b, k + 1),
        num_sampled=torch.empty_like(num_drafts),
        num_rejected=torch.empty_like(num_drafts),
        not_finite=torch.empty_like(num_drafts),
    )
    _verify_choices[(triton.cdiv(b, BLOCK),)](
        out.tokens, out.num_sampled, out.num_rejected, out.not_finite,
        choices, verify_rows, draft_tokens, num_drafts, samples.view(torch.int8),
        seq_lens, slots, seed, b,
        MEAN_ACCEPTED=mean_accepted, K=k, WIDTH=triton.next_power_of_2(k + 1), BLOCK=BLOCK,
        num_warps=1, **dependent_launch(choices),
    )  # fmt: skip
    return out


@triton.jit
def _write_behind(
    token_ids_ptr, columns, slot, first, tokens_ptr, request, writes, COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """token_ids[slot, first + j] = tokens[request, j], j < COUNT, of the lanes that write."""
    j = tl.arange(0, WIDTH)[None, :]
    writes = writes[:, None] & (j < COUNT)
    token = tl.load(tokens_ptr + request[:, None] * COUNT + j, mask=writes, other=-1)
    tl.store(token_ids_ptr + (slot * columns + first)[:, None] + j, token, mask=writes)


@triton.jit(do_not_specialize=["columns", "num_requests"])
def _commit_tokens(
    token_ids_ptr,  # [S, L]
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
    WIDTH: tl.constexpr,  # power of two from there on
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
    _write_behind(token_ids_ptr, columns, slot, first, tokens_ptr, request, samples, COUNT, WIDTH)
    tl.store(num_computed_ptr + slot, length - rejected, mask=is_request)


def commit_tokens_kernel(
    token_ids: Tensor,
    num_computed: Tensor,
    slots: Tensor,
    seq_lens: Tensor,
    num_drafts: Tensor,
    samples: Tensor,
    tokens: Tensor,
    num_rejected: Tensor,
) -> None:
    """See `verification.commit_tokens`; the last column is left alone."""
    check_contiguous(
        token_ids, num_computed, slots, seq_lens, num_drafts, samples, tokens, num_rejected
    )
    b, count = tokens.shape
    _commit_tokens[(triton.cdiv(b, BLOCK),)](
        token_ids, num_computed, slots, seq_lens, num_drafts, samples.view(torch.int8), tokens,
        num_rejected, token_ids.shape[1], b,
        COUNT=count, WIDTH=triton.next_power_of_2(count), BLOCK=BLOCK,
        num_warps=1, **dependent_launch(tokens),
    )  # fmt: skip


@triton.jit(do_not_specialize=["columns", "num_requests"])
def _store_drafts(
    token_ids_ptr,  # [S, L]
    num_computed_ptr,  # [S]
    request_slots_ptr,  # [B]
    samples_ptr,  # [B]
    tokens_ptr,  # [B, K]
    columns,
    num_requests,
    COUNT: tl.constexpr,  # K
    WIDTH: tl.constexpr,  # power of two from there on
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
    _write_behind(token_ids_ptr, columns, slot, first, tokens_ptr, request, samples, COUNT, WIDTH)


def store_drafts_kernel(
    token_ids: Tensor, num_computed: Tensor, slots: Tensor, samples: Tensor, tokens: Tensor
) -> None:
    """See `verification.store_drafts`; the last column is left alone."""
    check_contiguous(token_ids, num_computed, slots, samples, tokens)
    b, count = tokens.shape
    if count == 0:
        return
    _store_drafts[(triton.cdiv(b, BLOCK),)](
        token_ids, num_computed, slots, samples.view(torch.int8), tokens, token_ids.shape[1], b,
        COUNT=count, WIDTH=triton.next_power_of_2(count), BLOCK=BLOCK,
        num_warps=1, **dependent_launch(tokens),
    )  # fmt: skip
