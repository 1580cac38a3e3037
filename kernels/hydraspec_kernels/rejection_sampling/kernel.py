"""Verification by distributions in five launches, six for block verification of sampled drafts:
peaks and masses of chunks of the rows, the same of rows with p and q of each draft, (how much of
a scaled target stands above the draft's distribution,) acceptance, a race over the one row of each
request that its next token comes from, and the verdict.

Rows that no request needs (behind its drafts, or of a request that does not sample) are skipped,
and what would have been stored for them is never read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hydraspec_kernels.launch.kernel import start_next, wait_for_inputs
from hydraspec_kernels.random_streams.kernel import (
    ACCEPT,
    BONUS,
    INDEX_STEP,
    RESIDUAL,
    exponential,
    stream_key,
    unit_interval,
)
from hydraspec_kernels.rejection_sampling import Rule
from hydraspec_kernels.token_choice.kernel import NO_TOKEN, finite, first_best, softmax_weights

BLOCK_RULE: tl.constexpr = tl.constexpr(int(Rule.BLOCK))
RATE_RULE: tl.constexpr = tl.constexpr(int(Rule.AT_RATE))


@triton.jit
def _row_of(verify_rows_ptr, num_drafts_ptr, samples_ptr, request, j, K: tl.constexpr):
    """The logits row that verifies draft j or follows the last one, and whether it is needed."""
    is_needed = (j <= tl.load(num_drafts_ptr + request)) & (tl.load(samples_ptr + request) != 0)
    return tl.load(verify_rows_ptr + request * (K + 1) + j), is_needed


@triton.jit(do_not_specialize=["num_chunks"])
def chunk_statistics(
    peaks_ptr,  # [B, K+1, C] float32 largest logit
    masses_ptr,  # [B, K+1, C] float32 sum of exp((x - peak) / temperature)
    ids_ptr,  # [B, K+1, C] int32 lowest id of the largest
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
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    place, chunk = tl.program_id(1).to(tl.int64), tl.program_id(0)
    request, j = place // (K + 1), place % (K + 1)
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    wait_for_inputs(PDL)
    row, is_needed = _row_of(verify_rows_ptr, num_drafts_ptr, samples_ptr, request, j, K)
    if is_needed:
        temperature = tl.load(temperature_ptr + tl.load(slots_ptr + request))
        temperature = tl.where(temperature > 0, temperature, 1.0)
        x_ptrs = logits_ptr + row * row_stride + token
        x = finite(tl.load(x_ptrs, mask=token < vocab_size, other=-float("inf")))
        peak, best = first_best(x, token)
        out = place * num_chunks + chunk
        tl.store(peaks_ptr + out, peak)
        tl.store(masses_ptr + out, tl.sum(softmax_weights(x, peak, temperature), 0))
        tl.store(ids_ptr + out, best)


@triton.jit
def _q_of(token, is_token, draft_probs_ptr, draft_index_ptr, place, draft_width):
    """q of target tokens; the drafter proposes what its vocabulary lacks with probability 0."""
    if draft_index_ptr is not None:
        token = tl.load(draft_index_ptr + token, mask=is_token, other=-1)
        is_token = token >= 0
    return tl.load(draft_probs_ptr + place * draft_width + token, mask=is_token, other=0.0)


@triton.jit(do_not_specialize=["num_chunks"])
def row_statistics(
    peak_ptr,  # [B, K+1] float32
    mass_ptr,  # [B, K+1] float32
    best_ptr,  # [B, K+1] int32
    target_ptr,  # [B, K] float32 p of the draft
    draft_ptr,  # [B, K] float32 q of the draft
    peaks_ptr,  # [B, K+1, C]
    masses_ptr,  # [B, K+1, C]
    ids_ptr,  # [B, K+1, C]
    logits_ptr,  # [N, V]
    draft_probs_ptr,  # [S, K, V'] or None
    draft_index_ptr,  # [V] places in V', -1 where there is none; None: V' is V
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
        is_greedy = temperature <= 0
        temperature = tl.where(is_greedy, 1.0, temperature)
        at = place * num_chunks + chunk
        peaks = tl.load(peaks_ptr + at, mask=is_chunk, other=-float("inf"))
        ids = tl.load(ids_ptr + at, mask=is_chunk, other=NO_TOKEN)
        masses = tl.load(masses_ptr + at, mask=is_chunk, other=0.0)
        peak, best = first_best(peaks, ids)
        mass = tl.sum(masses * softmax_weights(peaks, peak, temperature), 0)
        tl.store(peak_ptr + place, peak)
        mass = tl.where(mass > 0, mass, 1.0)  # 0 where nothing is allowed
        tl.store(mass_ptr + place, mass)
        tl.store(best_ptr + place, best)
        if j < K:
            draft = tl.maximum(tl.load(drafts_ptr + request * K + j), 0)
            x = finite(tl.load(logits_ptr + row * row_stride + draft))
            p = softmax_weights(x, peak, temperature) / mass
            p = tl.where(is_greedy, (draft == best).to(tl.float32), p)
            tl.store(target_ptr + request * K + j, p)
            if draft_probs_ptr is not None:
                drawn_at = slot * K + j
                q = _q_of(
                    draft, draft >= 0, draft_probs_ptr, draft_index_ptr, drawn_at, draft_width
                )
                tl.store(draft_ptr + request * K + j, tl.where(is_greedy, 1.0, q))


@triton.jit
def _num_offered(drafts_ptr, samples_ptr, request, K: tl.constexpr):
    """Drafts before the first missing one; none of a request that does not sample."""
    is_offered = tl.load(samples_ptr + request) != 0
    count = is_offered.to(tl.int32) * 0
    for j in tl.static_range(K):
        is_offered = is_offered & (tl.load(drafts_ptr + request * K + j) >= 0)
        count += is_offered.to(tl.int32)
    return count


@triton.jit
def _advance(running, target_ptr, draft_ptr, at):
    """min(p_{i-1} * p(x_i) / q(x_i), 1), and 0 where q(x_i) is."""
    p, q = tl.load(target_ptr + at), 1.0
    if draft_ptr is not None:
        q = tl.load(draft_ptr + at)
    ratio = tl.where(q > 0, p / tl.where(q > 0, q, 1.0), 0.0)
    return tl.minimum(running * ratio, 1.0)


@triton.jit(do_not_specialize=["num_chunks"])
def chunk_surplus(
    surplus_ptr,  # [B, K, C] float32 sum of max(p_j p - q, 0) at row j; j = 0 is not written
    target_ptr,  # [B, K]
    draft_ptr,  # [B, K]
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
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    place, chunk = tl.program_id(1).to(tl.int64), tl.program_id(0)
    request, j = place // (K - 1), place % (K - 1) + 1
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    is_token = token < vocab_size
    wait_for_inputs(PDL)
    slot = tl.load(slots_ptr + request)
    temperature = tl.load(temperature_ptr + slot)
    # A greedy request's prefix passes if its ratio is 1, whatever the surplus.
    is_needed = (j < _num_offered(drafts_ptr, samples_ptr, request, K)) & (temperature > 0)
    surplus = 0.0
    if is_needed:
        running = 1.0
        for i in tl.static_range(K - 1):
            if i < j:
                running = _advance(running, target_ptr, draft_ptr, request * K + i)
        row = tl.load(verify_rows_ptr + request * (K + 1) + j)
        x_ptrs = logits_ptr + row * row_stride + token
        x = finite(tl.load(x_ptrs, mask=is_token, other=-float("inf")))
        at = request * (K + 1) + j
        peak, mass = tl.load(peak_ptr + at), tl.load(mass_ptr + at)
        q = _q_of(token, is_token, draft_probs_ptr, draft_index_ptr, slot * K + j, draft_width)
        p = softmax_weights(x, peak, temperature) / mass
        surplus = tl.sum(tl.maximum(p * running - q, 0.0), 0)
    tl.store(surplus_ptr + (request * K + j) * num_chunks + chunk, surplus)


@triton.jit(do_not_specialize=["num_chunks"])
def accept(
    num_accepted_ptr,  # [B] int32
    is_recovery_ptr,  # [B] int32
    scale_ptr,  # [B] float32 factor of the target in the residual
    target_ptr,  # [B, K]
    draft_ptr,  # [B, K] or None
    surplus_ptr,  # [B, K, C]; block verification of sampled drafts only
    drafts_ptr,  # [B, K]
    num_drafts_ptr,  # [B]
    samples_ptr,  # [B]
    seq_lens_ptr,  # [B]
    slots_ptr,  # [B]
    seed_ptr,  # [S]
    num_chunks,
    RULE: tl.constexpr,
    MEAN_ACCEPTED: tl.constexpr,
    K: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    request = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    wait_for_inputs(PDL)
    seed = tl.load(seed_ptr + tl.load(slots_ptr + request))
    first = tl.load(seq_lens_ptr + request) - tl.load(num_drafts_ptr + request)
    offered = _num_offered(drafts_ptr, samples_ptr, request, K)
    accepted, running, scale, is_alive = offered * 0, 1.0, 1.0, offered >= 0
    for j in tl.static_range(K):
        if j < offered:
            at = request * K + j
            draw = unit_interval(stream_key(seed, first + j, j * INDEX_STEP + ACCEPT))
            if RULE == BLOCK_RULE:
                running = _advance(running, target_ptr, draft_ptr, at)
                passes = running.to(tl.float64)
                if j + 1 < offered:  # behind this prefix stands one more draft
                    if draft_ptr is None:
                        surplus = running * (1 - tl.load(target_ptr + at + 1))
                    else:
                        parts = surplus_ptr + (at + 1) * num_chunks + chunk
                        surplus = tl.sum(tl.load(parts, mask=chunk < num_chunks, other=0.0), 0)
                    total = surplus + (1 - running)
                    # 0 / 0: a longer prefix is then certain to pass, so this one may.
                    inside = tl.where(total > 0, surplus / tl.where(total > 0, total, 1.0), 1.0)
                    passes = inside.to(tl.float64)
                if draw < passes:
                    accepted, scale = offered * 0 + (j + 1), running
            else:
                if RULE == RATE_RULE:
                    is_accepted = draw < MEAN_ACCEPTED - j
                else:
                    p, q = tl.load(target_ptr + at), 1.0
                    if draft_ptr is not None:
                        q = tl.load(draft_ptr + at)
                    is_accepted = (draw * q < p) & (q > 0)
                is_alive = is_alive & is_accepted
                accepted += is_alive.to(tl.int32)
    is_recovery = (accepted < offered).to(tl.int32)
    if RULE == RATE_RULE:
        is_recovery *= 0
    tl.store(num_accepted_ptr + request, accepted)
    tl.store(is_recovery_ptr + request, is_recovery)
    tl.store(scale_ptr + request, scale)


@triton.jit(do_not_specialize=["num_chunks"])
def race_of_chunks(
    ratios_ptr,  # [2, B, C] float64: of the residual, of the target
    ids_ptr,  # [2, B, C] int32
    num_accepted_ptr,  # [B]
    is_recovery_ptr,  # [B]
    scale_ptr,  # [B]
    peak_ptr,  # [B, K+1]
    mass_ptr,  # [B, K+1]
    logits_ptr,  # [N, V]
    draft_probs_ptr,  # [S, K, V'] or None
    draft_index_ptr,  # [V] places in V', -1 where there is none; None: V' is V
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
    BLOCK: tl.constexpr,
    TRUNCATED: tl.constexpr,  # most chunks may be without mass
    PDL: tl.constexpr,
):
    start_next(PDL)
    request, chunk = tl.program_id(1).to(tl.int64), tl.program_id(0)
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    is_token = token < vocab_size
    wait_for_inputs(PDL)
    slot, j = tl.load(slots_ptr + request), tl.load(num_accepted_ptr + request)
    temperature = tl.load(temperature_ptr + slot)
    if (temperature > 0) & (tl.load(samples_ptr + request) != 0):
        at = request * (K + 1) + j
        peak, mass = tl.load(peak_ptr + at), tl.load(mass_ptr + at)
        row_ptr = logits_ptr + tl.load(verify_rows_ptr + at) * row_stride
        x = finite(tl.load(row_ptr + token, mask=is_token, other=-float("inf")))
        p = softmax_weights(x, peak, temperature) / mass
        p = tl.where(p > 0, p, 0.0)  # NaN never wins
        is_recovery = tl.load(is_recovery_ptr + request) != 0
        ratio, found = tl.zeros([], tl.float64), chunk * BLOCK
        of_residual, id_there = ratio, found
        if not TRUNCATED or tl.max(p, 0) > 0:
            position = tl.load(seq_lens_ptr + request) - tl.load(num_drafts_ptr + request) + j
            code = j * INDEX_STEP + tl.where(is_recovery, RESIDUAL, BONUS)
            race = exponential(stream_key(tl.load(seed_ptr + slot), position, code), token)
            ratio, found = first_best(p.to(tl.float64) / race, token)
            of_residual, id_there = ratio, found
            if is_recovery:
                if draft_probs_ptr is None:
                    p = tl.where(token == tl.load(drafts_ptr + request * K + j), 0.0, p)
                else:
                    at = slot * K + j
                    q = _q_of(token, is_token, draft_probs_ptr, draft_index_ptr, at, draft_width)
                    p = p * tl.load(scale_ptr + request) - q
                p = tl.where(p > 0, p, 0.0)
                of_residual, id_there = first_best(p.to(tl.float64) / race, token)
        out = request * num_chunks + chunk
        tl.store(ratios_ptr + out, of_residual)
        tl.store(ids_ptr + out, id_there)
        out += tl.num_programs(1).to(tl.int64) * num_chunks
        tl.store(ratios_ptr + out, ratio)
        tl.store(ids_ptr + out, found)


@triton.jit(do_not_specialize=["num_chunks"])
def emit(
    tokens_ptr,  # [B, K+1]
    num_sampled_ptr,  # [B]
    num_rejected_ptr,  # [B]
    ratios_ptr,  # [2, B, C]
    ids_ptr,  # [2, B, C]
    num_accepted_ptr,  # [B]
    best_ptr,  # [B, K+1]
    drafts_ptr,  # [B, K]
    num_drafts_ptr,  # [B]
    samples_ptr,  # [B]
    slots_ptr,  # [B]
    temperature_ptr,  # [S]
    num_chunks,
    K: tl.constexpr,
    WIDTH: tl.constexpr,  # power of two from K + 1 on
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    request = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    is_chunk = chunk < num_chunks
    wait_for_inputs(PDL)
    samples, accepted = tl.load(samples_ptr + request) != 0, tl.load(num_accepted_ptr + request)
    token = accepted * 0 - 1
    if samples:
        if tl.load(temperature_ptr + tl.load(slots_ptr + request)) > 0:
            at = request * num_chunks + chunk
            behind = tl.num_programs(0).to(tl.int64) * num_chunks + at
            ratios = tl.load(ratios_ptr + at, mask=is_chunk, other=-1.0)
            ids = tl.load(ids_ptr + at, mask=is_chunk, other=NO_TOKEN)
            ratio, token = first_best(ratios, ids)
            if ratio <= 0:  # p = q up to rounding, where exact numbers would never reject
                ratios = tl.load(ratios_ptr + behind, mask=is_chunk, other=-1.0)
                ids = tl.load(ids_ptr + behind, mask=is_chunk, other=NO_TOKEN)
                ratio, token = first_best(ratios, ids)
        else:
            token = tl.load(best_ptr + request * (K + 1) + accepted)
    j = tl.arange(0, WIDTH)
    drafts = tl.load(drafts_ptr + request * K + j, mask=samples & (j < accepted), other=-1)
    emitted = tl.where(j == accepted, token.to(tl.int64), drafts)
    tl.store(tokens_ptr + request * (K + 1) + j, emitted, mask=j <= K)
    num_drafts = tl.load(num_drafts_ptr + request)
    tl.store(num_sampled_ptr + request, tl.where(samples, accepted.to(tl.int64) + 1, 0))
    tl.store(num_rejected_ptr + request, tl.where(samples, num_drafts - accepted, 0))
