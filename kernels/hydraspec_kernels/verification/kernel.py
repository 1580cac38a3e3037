"""Verification by choices and writing into the state, one launch each; a lane is a request."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hydraspec_kernels.launch.kernel import dependent_launch, start_next, wait_for_inputs
from hydraspec_kernels.random_streams.kernel import ACCEPT, INDEX_STEP, stream_key, unit_interval
from hydraspec_kernels.verification.reference import Verified

BLOCK = 32  # few lanes: what little there is to do runs on more processors


@triton.jit(do_not_specialize=["num_requests"])
def _verify_choices(
    tokens_ptr,  # [B, K+1]
    num_sampled_ptr,  # [B]
    num_rejected_ptr,  # [B]
    choices_ptr,  # [N]
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
    is_emitted, num_sampled = samples, tl.zeros([BLOCK], tl.int64)
    for j in tl.static_range(K + 1):
        row = tl.load(verify_rows_ptr + request * (K + 1) + j, mask=is_emitted, other=0)
        token = tl.load(choices_ptr + row, mask=is_emitted, other=-1)
        is_accepted = is_emitted
        if j < K:
            draft = tl.load(drafts_ptr + request * K + j, mask=is_emitted, other=-1)
            if MEAN_ACCEPTED is not None:
                draw = unit_interval(stream_key(seed, first + j, j * INDEX_STEP + ACCEPT))
                is_accepted = is_emitted & (draft >= 0) & (draw < MEAN_ACCEPTED - j)
                token = tl.where(is_accepted, draft, token)
            else:
                is_accepted = is_emitted & (draft == token)
        token = tl.where(is_emitted, token, -1)
        tl.store(tokens_ptr + request * (K + 1) + j, token, mask=is_request)
        num_sampled += is_emitted.to(tl.int64)
        is_emitted = is_accepted
    tl.store(num_sampled_ptr + request, num_sampled, mask=is_request)
    num_rejected = tl.where(samples, num_drafts + 1 - num_sampled, 0)
    tl.store(num_rejected_ptr + request, num_rejected, mask=is_request)


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
    _check(choices, verify_rows, draft_tokens, num_drafts, samples, seq_lens, slots, seed)
    b, k = draft_tokens.shape
    out = Verified(
        tokens=num_drafts.new_empty(b, k + 1),
        num_sampled=torch.empty_like(num_drafts),
        num_rejected=torch.empty_like(num_drafts),
    )
    _verify_choices[(triton.cdiv(b, BLOCK),)](
        out.tokens, out.num_sampled, out.num_rejected,
        choices, verify_rows, draft_tokens, num_drafts, samples.view(torch.int8),
        seq_lens, slots, seed, b,
        MEAN_ACCEPTED=mean_accepted, K=k, BLOCK=BLOCK, num_warps=1, **dependent_launch(choices),
    )  # fmt: skip
    return out


def _check(*tensors: Tensor) -> None:
    """Kernels of this file index whole tensors by one stride."""
    for tensor in tensors:
        assert tensor.is_contiguous(), tensor.stride()


@triton.jit
def _write_behind(
    token_ids_ptr, columns, slot, first, tokens_ptr, request, writes, WIDTH: tl.constexpr
):
    """token_ids[slot, first + j] = tokens[request, j] of the lanes that write."""
    for j in tl.static_range(WIDTH):
        token = tl.load(tokens_ptr + request * WIDTH + j, mask=writes, other=-1)
        tl.store(token_ids_ptr + slot * columns + first + j, token, mask=writes)


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
    WIDTH: tl.constexpr,  # K + 1
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
    first = length - tl.load(num_drafts_ptr + request, mask=is_request, other=0)
    _write_behind(token_ids_ptr, columns, slot, first, tokens_ptr, request, samples, WIDTH)
    rejected = tl.load(num_rejected_ptr + request, mask=is_request, other=0)
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
    _check(token_ids, num_computed, slots, seq_lens, num_drafts, samples, tokens, num_rejected)
    b, width = tokens.shape
    _commit_tokens[(triton.cdiv(b, BLOCK),)](
        token_ids, num_computed, slots, seq_lens, num_drafts, samples.view(torch.int8), tokens,
        num_rejected, token_ids.shape[1], b,
        WIDTH=width, BLOCK=BLOCK, num_warps=1, **dependent_launch(tokens),
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
    WIDTH: tl.constexpr,  # K
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
    _write_behind(token_ids_ptr, columns, slot, first, tokens_ptr, request, samples, WIDTH)


def store_drafts_kernel(
    token_ids: Tensor, num_computed: Tensor, slots: Tensor, samples: Tensor, tokens: Tensor
) -> None:
    """See `verification.store_drafts`; the last column is left alone."""
    _check(token_ids, num_computed, slots, samples, tokens)
    b, width = tokens.shape
    _store_drafts[(triton.cdiv(b, BLOCK),)](
        token_ids, num_computed, slots, samples.view(torch.int8), tokens, token_ids.shape[1], b,
        WIDTH=width, BLOCK=BLOCK, num_warps=1, **dependent_launch(tokens),
    )  # fmt: skip
