"""Speculative sampling in four launches: statistics of chunks and of rows (`statistics_kernel.py`),
acceptance, and the draw of each request's next token, with the verdict. Sampled drafts take a
fifth, the residual's mass in chunks: of all offered rows before acceptance under block
verification, else of one row after it.

Rows that no request needs (after its last draft, or of a request that does not sample) are skipped,
and their entries are never read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hydraspec_kernels.runtime.launch_kernel import start_next, wait_for_inputs
from hydraspec_kernels.sampling.random_streams.kernel import (
    ACCEPT,
    BONUS,
    INDEX_STEP,
    RESIDUAL,
    stream_key,
    unit_interval,
)
from hydraspec_kernels.sampling.rejection.reference import Rule
from hydraspec_kernels.sampling.rejection.statistics_kernel import q_of
from hydraspec_kernels.sampling.token_choice.kernel import (
    finite,
    is_finite_peak,
    race,
    softmax_weights,
)

BLOCK_RULE: tl.constexpr = tl.constexpr(int(Rule.BLOCK))
SYNTHETIC_RULE: tl.constexpr = tl.constexpr(int(Rule.SYNTHETIC))


@triton.jit
def _num_offered(drafts_ptr, samples_ptr, request, K: tl.constexpr):
    """Number of drafts before the first missing one; 0 for a request that does not sample."""
    is_offered = tl.load(samples_ptr + request) != 0
    count = is_offered.to(tl.int32) * 0
    for j in tl.static_range(K):
        is_offered = is_offered & (tl.load(drafts_ptr + request * K + j) >= 0)
        count += is_offered.to(tl.int32)
    return count


@triton.jit
def _running_ratio(running, p_of_draft_ptr, q_of_draft_ptr, at):
    """Running ratio r_i = min(r_{i-1} * p(x_i) / q(x_i), 1), and 0 where q(x_i) is 0."""
    p, q = tl.load(p_of_draft_ptr + at), 1.0
    if q_of_draft_ptr is not None:
        q = tl.load(q_of_draft_ptr + at)
    ratio = tl.where(q > 0, p / tl.where(q > 0, q, 1.0), 0.0)
    return tl.minimum(running * ratio, 1.0)


@triton.jit(do_not_specialize=["num_chunks"])
def residual_of_chunks(
    residuals_ptr,  # [B, K, C] float32 sum of max(r_j p - q, 0) at row j, where it is needed
    num_accepted_ptr,  # [B] row j of requests that recover, with r_j = 1; None: all rows
    is_recovery_ptr,  # [B]
    p_of_draft_ptr,  # [B, K]
    q_of_draft_ptr,  # [B, K]
    peak_ptr,  # [B, K+1]
    mass_ptr,  # [B, K+1]
    logits_ptr,  # [N, V]
    draft_probs_ptr,  # [S, K, V']
    draft_index_ptr,  # [V] or None
    drafts_ptr,  # [B, K]
    verify_rows_ptr,  # [B, K+1]
    samples_ptr,  # [B]
    slots_ptr,  # [B]
    temperature_ptr,  # [S]
    row_stride,
    vocab_size,
    draft_width,  # V'
    num_chunks,
    K: tl.constexpr,
    CHUNKS: tl.constexpr,  # chunks of one program
    CHUNK: tl.constexpr,
    TRUNCATED: tl.constexpr,  # whether to look for chunks without mass: most may be
    PDL: tl.constexpr,
):
    """Residual mass of each chunk, for block verification and for recovered tokens."""
    start_next(PDL)
    request = tl.program_id(1).to(tl.int64)
    chunk = tl.program_id(0) * CHUNKS + tl.arange(0, CHUNKS)
    token = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    is_token, scale = token < vocab_size, 1.0
    wait_for_inputs(PDL)
    if num_accepted_ptr is None:
        j, request = request % K, request // K
        is_needed = j < _num_offered(drafts_ptr, samples_ptr, request, K)
    else:
        j = tl.load(num_accepted_ptr + request)
        is_needed = tl.load(is_recovery_ptr + request) != 0
    slot = tl.load(slots_ptr + request)
    temperature = tl.load(temperature_ptr + slot)
    residuals = tl.zeros([CHUNKS], tl.float32)
    if is_needed & (temperature > 0):  # a greedy prefix passes by its ratio, without a residual
        if num_accepted_ptr is None:
            for i in tl.static_range(K - 1):
                if i < j:
                    scale = _running_ratio(scale, p_of_draft_ptr, q_of_draft_ptr, request * K + i)
        at = request * (K + 1) + j
        peak, mass = tl.load(peak_ptr + at), tl.load(mass_ptr + at)
        row_ptr = logits_ptr + tl.load(verify_rows_ptr + at) * row_stride
        x = finite(tl.load(row_ptr + token, mask=is_token, other=-float("inf")))
        p = softmax_weights(x, peak, temperature) / mass
        if not TRUNCATED or tl.max(tl.max(p, 1), 0) > 0:
            at = slot * K + j
            q = q_of(token, is_token, draft_probs_ptr, draft_index_ptr, at, draft_width)
            residual = p * scale - q
            residuals = tl.sum(tl.where(residual > 0, residual, 0.0), 1)
    out = (request * K + tl.minimum(j, K - 1)) * num_chunks + chunk
    tl.store(residuals_ptr + out, residuals, mask=chunk < num_chunks)


@triton.jit(do_not_specialize=["columns", "num_chunks"])
def accept(
    num_accepted_ptr,  # [B] int32
    is_recovery_ptr,  # [B] int32
    scale_ptr,  # [B] float32 factor of p in the residual
    p_of_draft_ptr,  # [B, K]
    q_of_draft_ptr,  # [B, K] or None
    peak_ptr,  # [B, K+1]
    residuals_ptr,  # [B, K, C]; block verification of sampled drafts only
    drafts_ptr,  # [B, K]
    num_drafts_ptr,  # [B]
    samples_ptr,  # [B]
    seq_lens_ptr,  # [B]
    slots_ptr,  # [B]
    seed_ptr,  # [S]
    accepts_ptr,  # [S, L+1] int8, of the synthetic rule; None: MEAN_ACCEPTED decides
    columns,
    num_chunks,
    RULE: tl.constexpr,
    MEAN_ACCEPTED: tl.constexpr,
    K: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Finds the number of accepted drafts of a request, and the next token's distribution."""
    start_next(PDL)
    request = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    wait_for_inputs(PDL)
    slot = tl.load(slots_ptr + request)
    seed = tl.load(seed_ptr + slot)
    first = tl.load(seq_lens_ptr + request) - tl.load(num_drafts_ptr + request)
    mean_accepted = MEAN_ACCEPTED
    if accepts_ptr is not None:
        mean_accepted = tl.load(accepts_ptr + slot * columns + first).to(tl.float64)
    offered = _num_offered(drafts_ptr, samples_ptr, request, K)
    accepted, running, scale, is_alive = offered * 0, 1.0, 1.0, offered >= 0
    for j in tl.static_range(K):
        if j < offered:
            at, row = request * K + j, request * (K + 1) + j
            is_alive = is_alive & is_finite_peak(tl.load(peak_ptr + row))  # else p is undefined
            draw = unit_interval(stream_key(seed, first + j, j * INDEX_STEP + ACCEPT))
            if RULE == BLOCK_RULE:
                running = _running_ratio(running, p_of_draft_ptr, q_of_draft_ptr, at)
                passes = running.to(tl.float64)
                if j + 1 < offered:  # one more draft follows this prefix
                    if q_of_draft_ptr is None:
                        surplus = running * (1 - tl.load(p_of_draft_ptr + at + 1))
                    else:
                        parts = residuals_ptr + (at + 1) * num_chunks + chunk
                        surplus = tl.sum(tl.load(parts, mask=chunk < num_chunks, other=0.0), 0)
                    total = surplus + (1 - running)
                    # 0 / 0: a longer prefix is then certain to pass, so this one may.
                    inside = tl.where(total > 0, surplus / tl.where(total > 0, total, 1.0), 1.0)
                    is_known = is_finite_peak(tl.load(peak_ptr + row + 1))
                    passes = tl.where(is_known, inside, 1.0).to(tl.float64)
                if (draw < passes) & is_alive:
                    accepted, scale = offered * 0 + (j + 1), running
            else:
                if RULE == SYNTHETIC_RULE:
                    is_accepted = draw < mean_accepted - j
                else:
                    p, q = tl.load(p_of_draft_ptr + at), 1.0
                    if q_of_draft_ptr is not None:
                        q = tl.load(q_of_draft_ptr + at)
                    is_accepted = (draw * q < p) & (q > 0)
                is_alive = is_alive & is_accepted
                accepted += is_alive.to(tl.int32)
    is_recovery = (accepted < offered) & (RULE != SYNTHETIC_RULE)
    tl.store(num_accepted_ptr + request, accepted)
    tl.store(is_recovery_ptr + request, is_recovery.to(tl.int32))
    tl.store(scale_ptr + request, scale)


@triton.jit(do_not_specialize=["num_chunks"])
def emit(
    tokens_ptr,  # [B, K+1]
    num_sampled_ptr,  # [B]
    num_rejected_ptr,  # [B]
    not_finite_ptr,  # [B]
    residuals_ptr,  # [B, K, C]; of sampled drafts only
    peaks_ptr,  # [B, K+1, C]
    masses_ptr,  # [B, K+1, C]
    num_accepted_ptr,  # [B]
    is_recovery_ptr,  # [B]
    scale_ptr,  # [B]
    peak_ptr,  # [B, K+1]
    mass_ptr,  # [B, K+1]
    best_ptr,  # [B, K+1]
    logits_ptr,  # [N, V]
    draft_probs_ptr,  # [S, K, V'] or None
    draft_index_ptr,  # [V] or None
    drafts_ptr,  # [B, K]
    verify_rows_ptr,  # [B, K+1]
    num_drafts_ptr,  # [B]
    samples_ptr,  # [B]
    seq_lens_ptr,  # [B]
    slots_ptr,  # [B]
    temperature_ptr,  # [S]
    seed_ptr,  # [S]
    row_stride,
    vocab_size,
    draft_width,  # V'
    num_chunks,
    K: tl.constexpr,
    WIDTH: tl.constexpr,  # power of two, at least K + 1
    CHUNKS: tl.constexpr,  # power of two, at least num_chunks
    CHUNK: tl.constexpr,
    FIRST_CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Writes the accepted drafts and the recovered or bonus token of a request, and its counts."""
    start_next(PDL)
    request = tl.program_id(0).to(tl.int64)
    chunk, in_chunk = tl.arange(0, CHUNKS), tl.arange(0, CHUNK)
    is_chunk = chunk < num_chunks
    wait_for_inputs(PDL)
    samples, accepted = tl.load(samples_ptr + request) != 0, tl.load(num_accepted_ptr + request)
    num_drafts = tl.load(num_drafts_ptr + request)
    drawn, is_finite = accepted * 0 - 1, accepted >= 0
    if samples:
        slot, at = tl.load(slots_ptr + request), request * (K + 1) + accepted
        is_finite = is_finite_peak(tl.load(peak_ptr + at))
        temperature = tl.load(temperature_ptr + slot)
        if temperature > 0:
            is_recovery = tl.load(is_recovery_ptr + request) != 0
            code = accepted * INDEX_STEP + tl.where(is_recovery, RESIDUAL, BONUS)
            position = tl.load(seq_lens_ptr + request) - num_drafts + accepted
            key = stream_key(tl.load(seed_ptr + slot), position, code)
            row_ptr = logits_ptr + tl.load(verify_rows_ptr + at) * row_stride
            peak, mass = tl.load(peak_ptr + at), tl.load(mass_ptr + at)
            peaks = tl.load(peaks_ptr + at * num_chunks + chunk, mask=is_chunk, other=-float("inf"))
            masses = tl.load(masses_ptr + at * num_chunks + chunk, mask=is_chunk, other=0.0)
            masses *= softmax_weights(peaks, peak, temperature)
            rejected = accepted * 0 - 1
            if is_recovery:
                if draft_probs_ptr is None:
                    rejected = tl.load(drafts_ptr + request * K + accepted).to(tl.int32)
                    token = rejected // CHUNK * CHUNK + in_chunk
                    x = tl.load(row_ptr + token, mask=token < vocab_size, other=-float("inf"))
                    rest = softmax_weights(finite(x), peak, temperature)
                    rest = tl.sum(tl.where(token == rejected, 0.0, rest), 0)
                    residuals = tl.where(chunk == rejected // CHUNK, rest, masses)
                else:
                    residuals_ptr += (request * K + accepted) * num_chunks
                    residuals = tl.load(residuals_ptr + chunk, mask=is_chunk, other=0.0)
                # Empty: p = q up to rounding, where exact numbers would never reject.
                is_recovery = tl.max(residuals, 0) > 0
                masses = tl.where(is_recovery, residuals, masses)
            _, found = race(masses, key, chunk, FIRST_CHUNK)
            token = found * CHUNK + in_chunk
            is_token = token < vocab_size
            x = finite(tl.load(row_ptr + token, mask=is_token, other=-float("inf")))
            p = softmax_weights(x, peak, temperature) / mass
            if is_recovery:
                if draft_probs_ptr is None:
                    p = tl.where(token == rejected, 0.0, p)
                else:
                    at = slot * K + accepted
                    q = q_of(token, is_token, draft_probs_ptr, draft_index_ptr, at, draft_width)
                    p = p * tl.load(scale_ptr + request) - q
            _, drawn = race(p, key, token)
        else:
            drawn = tl.load(best_ptr + at)
    j = tl.arange(0, WIDTH)
    drafts = tl.load(drafts_ptr + request * K + j, mask=samples & (j < accepted), other=-1)
    emitted = tl.where(j == accepted, drawn.to(tl.int64), drafts)
    tl.store(tokens_ptr + request * (K + 1) + j, emitted, mask=j <= K)
    tl.store(num_sampled_ptr + request, tl.where(samples, accepted.to(tl.int64) + 1, 0))
    tl.store(num_rejected_ptr + request, tl.where(samples, num_drafts - accepted, 0))
    tl.store(not_finite_ptr + request, 1 - is_finite.to(tl.int64))
