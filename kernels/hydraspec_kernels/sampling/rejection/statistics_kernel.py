"""The first two launches of speculative sampling: peaks and masses of chunks of the rows, then of
whole rows, with p and q of each draft. `kernel.py` has the others, and says which rows are skipped.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hydraspec_kernels.runtime.launch_kernel import start_next, wait_for_inputs
from hydraspec_kernels.sampling.token_choice.kernel import (
    NO_TOKEN,
    finite,
    first_best,
    softmax_weights,
    store_statistics,
)


@triton.jit
def _row_of(verify_rows_ptr, num_drafts_ptr, samples_ptr, request, j, K: tl.constexpr):
    """Row j of a request among the rows of logits, and whether the request needs it."""
    is_needed = (j <= tl.load(num_drafts_ptr + request)) & (tl.load(samples_ptr + request) != 0)
    return tl.load(verify_rows_ptr + request * (K + 1) + j), is_needed


@triton.jit(do_not_specialize=["num_chunks"])
def chunk_statistics(
    peaks_ptr,  # [B, K+1, C] float32 largest logit
    masses_ptr,  # [B, K+1, C] float32 sum of exp((x - peak) / temperature); not of greedy rows
    ids_ptr,  # [B, K+1, C] int32 lowest id of the largest; of greedy rows only
    logits_ptr,  # [N, V]
    verify_rows_ptr,  # [B, K+1]
    num_drafts_ptr,  # [B]
    samples_ptr,  # [B]
    slots_ptr,  # [B]
    temperature_ptr,  # [S]
    row_stride,
    vocab_size,
    num_chunks,
    K: tl.constexpr,
    CHUNKS: tl.constexpr,  # chunks of one program
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Peak and mass of each chunk of a row of logits; of greedy rows the lowest id of the peak."""
    start_next(PDL)
    place = tl.program_id(1).to(tl.int64)
    request, j = place // (K + 1), place % (K + 1)
    chunk = tl.program_id(0) * CHUNKS + tl.arange(0, CHUNKS)
    token = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    at, is_chunk = place * num_chunks + chunk, chunk < num_chunks
    wait_for_inputs(PDL)
    row, is_needed = _row_of(verify_rows_ptr, num_drafts_ptr, samples_ptr, request, j, K)
    if is_needed:
        temperature = tl.load(temperature_ptr + tl.load(slots_ptr + request))
        x_ptrs = logits_ptr + row * row_stride + token
        x = finite(tl.load(x_ptrs, mask=token < vocab_size, other=-float("inf")))
        store_statistics(peaks_ptr, masses_ptr, ids_ptr, at, x, token, temperature, is_chunk)


@triton.jit
def q_of(token, is_token, draft_probs_ptr, draft_index_ptr, place, draft_width):
    """Draft probability q of target tokens; 0 outside the drafter's vocabulary."""
    if draft_index_ptr is not None:
        token = tl.load(draft_index_ptr + token, mask=is_token, other=-1)
        is_token = token >= 0
    return tl.load(draft_probs_ptr + place * draft_width + token, mask=is_token, other=0.0)


@triton.jit(do_not_specialize=["num_chunks"])
def row_statistics(
    peak_ptr,  # [B, K+1] float32
    mass_ptr,  # [B, K+1] float32, of rows that are not greedy
    best_ptr,  # [B, K+1] int32, of greedy rows
    p_of_draft_ptr,  # [B, K] float32 p of the draft
    q_of_draft_ptr,  # [B, K] float32 q of the draft
    peaks_ptr,  # [B, K+1, C]
    masses_ptr,  # [B, K+1, C]
    ids_ptr,  # [B, K+1, C]
    logits_ptr,  # [N, V]
    draft_probs_ptr,  # [S, K, V'] or None
    draft_index_ptr,  # [V] places in V', -1 outside the drafter's vocabulary; None: V' is V
    drafts_ptr,  # [B, K]
    verify_rows_ptr,  # [B, K+1]
    num_drafts_ptr,  # [B]
    samples_ptr,  # [B]
    slots_ptr,  # [B]
    temperature_ptr,  # [S]
    row_stride,
    vocab_size,
    draft_width,  # V'
    num_chunks,
    K: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Peak and mass of whole rows from their chunks, and p and q of each draft."""
    start_next(PDL)
    place = tl.program_id(0).to(tl.int64)
    request, j = place // (K + 1), place % (K + 1)
    chunk = tl.arange(0, CHUNKS)
    is_chunk = chunk < num_chunks
    wait_for_inputs(PDL)
    row, is_needed = _row_of(verify_rows_ptr, num_drafts_ptr, samples_ptr, request, j, K)
    if is_needed:
        slot = tl.load(slots_ptr + request)
        temperature = tl.load(temperature_ptr + slot)
        at = place * num_chunks + chunk
        peaks = tl.load(peaks_ptr + at, mask=is_chunk, other=-float("inf"))
        draft = place * 0
        if j < K:
            draft = tl.maximum(tl.load(drafts_ptr + request * K + j), 0)
        p, q = 0.0, 1.0
        peak = tl.max(peaks, 0)
        tl.store(peak_ptr + place, peak)
        if temperature > 0:
            masses = tl.load(masses_ptr + at, mask=is_chunk, other=0.0)
            mass = tl.sum(masses * softmax_weights(peaks, peak, temperature), 0)
            mass = tl.where(mass > 0, mass, 1.0)  # 0 if all tokens are cut off
            tl.store(mass_ptr + place, mass)
            x = finite(tl.load(logits_ptr + row * row_stride + draft))
            p = softmax_weights(x, peak, temperature) / mass
            if draft_probs_ptr is not None:
                drawn_at = slot * K + j
                q = q_of(draft, j < K, draft_probs_ptr, draft_index_ptr, drawn_at, draft_width)
        else:
            ids = tl.load(ids_ptr + at, mask=is_chunk, other=NO_TOKEN)
            best = first_best(peaks, ids)[1]
            tl.store(best_ptr + place, best)
            p = (draft == best).to(tl.float32)
        if j < K:
            tl.store(p_of_draft_ptr + request * K + j, p)
            if draft_probs_ptr is not None:
                tl.store(q_of_draft_ptr + request * K + j, q)
