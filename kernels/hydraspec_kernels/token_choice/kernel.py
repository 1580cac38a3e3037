"""One token per row in two launches: the best of every chunk of a row, then the best of those.

The order in which chunks are compared is fixed by the shape, so equal rows give equal tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hydraspec_kernels.launch.kernel import dependent_launch, start_next, wait_for_inputs
from hydraspec_kernels.random_streams import Purpose
from hydraspec_kernels.random_streams.kernel import exponential, stream_key

BLOCK = 4096  # numbers a program of the greedy search holds at once
RACE_BLOCK = 2048  # a race's program draws in float64 and holds fewer
LARGEST: tl.constexpr = tl.constexpr(3.4028234663852886e38)
NO_TOKEN: tl.constexpr = tl.constexpr(2147483647)


@triton.jit
def first_best(values, ids):
    """The largest of `values` and the lowest of the ids that have it."""
    best = tl.max(values, 0)
    return best, tl.min(tl.where(values == best, ids, NO_TOKEN), 0)


@triton.jit(do_not_specialize=["vocab_size", "num_chunks"])
def _best_of_chunks(
    best_ptr,  # [N, C] float32
    ids_ptr,  # [N, C] int32
    logits_ptr,  # [N, V]
    row_stride,
    vocab_size,
    num_chunks,
    BLOCKS_EACH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    row, chunk = tl.program_id(1).to(tl.int64), tl.program_id(0)
    token = chunk * (BLOCKS_EACH * BLOCK) + tl.arange(0, BLOCK)
    logits_ptr += row * row_stride
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    ids = token
    wait_for_inputs(PDL)
    for _ in range(BLOCKS_EACH):
        x = tl.load(logits_ptr + token, mask=token < vocab_size, other=-float("inf"))
        x = x.to(tl.float32)
        x = tl.where(x != x, float("inf"), x)
        is_better = x > best  # and not >=: the lower id stays
        best = tl.where(is_better, x, best)
        ids = tl.where(is_better, token, ids)
        token += BLOCK
    value, found = first_best(best, ids)
    tl.store(best_ptr + row * num_chunks + chunk, value)
    tl.store(ids_ptr + row * num_chunks + chunk, found)


@triton.jit(do_not_specialize=["num_chunks"])
def _best_of_rows(
    tokens_ptr,  # [N]
    best_ptr,  # [N, C]
    ids_ptr,  # [N, C]
    num_chunks,
    CHUNKS: tl.constexpr,  # power of two from num_chunks on
    PDL: tl.constexpr,
):
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    is_chunk = chunk < num_chunks
    wait_for_inputs(PDL)
    best = tl.load(best_ptr + row * num_chunks + chunk, mask=is_chunk, other=-float("inf"))
    ids = tl.load(ids_ptr + row * num_chunks + chunk, mask=is_chunk, other=NO_TOKEN)
    _, token = first_best(best, ids)
    tl.store(tokens_ptr + row, token.to(tl.int64))


def best_of_rows(best: Tensor, ids: Tensor) -> Tensor:
    """The id [N] int64 of the best of each row, the lowest of equals: best and ids [N, C]."""
    n, chunks = best.shape
    tokens = torch.empty(n, dtype=torch.int64, device=best.device)
    _best_of_rows[(n,)](
        tokens, best, ids, chunks,
        CHUNKS=triton.next_power_of_2(chunks), num_warps=1, **dependent_launch(best),
    )  # fmt: skip
    return tokens


def blocks_per_chunk(num_rows: int, vocab_size: int) -> int:
    """Blocks that one program reads, a power of two: one each for few rows, more where rows fill
    the device.
    """
    chunks = max(4, min(64, 2048 // num_rows))
    return triton.next_power_of_2(triton.cdiv(vocab_size, chunks * BLOCK))


def greedy_tokens_kernel(logits: Tensor) -> Tensor:
    """See `token_choice.greedy_tokens`."""
    n, vocab_size = logits.shape
    assert logits.stride(1) == 1, logits.stride()
    if n == 0:
        return torch.empty(n, dtype=torch.int64, device=logits.device)
    each = blocks_per_chunk(n, vocab_size)
    chunks = triton.cdiv(vocab_size, each * BLOCK)
    best = torch.empty(n, chunks, dtype=torch.float32, device=logits.device)
    ids = torch.empty(n, chunks, dtype=torch.int32, device=logits.device)
    _best_of_chunks[(chunks, n)](
        best, ids, logits, logits.stride(0), vocab_size, chunks,
        BLOCKS_EACH=each, BLOCK=BLOCK, num_warps=8, **dependent_launch(logits),
    )  # fmt: skip
    return best_of_rows(best, ids)


@triton.jit
def race(weights, key, tokens):
    """argmax over tokens of weight / exponential draw, in float64: (the ratio, the lowest id)."""
    weights = tl.where(weights > 0, weights, 0.0).to(tl.float64)  # NaN never wins
    return first_best(weights / exponential(key, tokens), tokens)


@triton.jit
def finite(x):
    """float32 without NaN and infinity, which count as the largest number; -inf stays."""
    x = x.to(tl.float32)
    return tl.where(x != x, LARGEST, tl.minimum(x, LARGEST))


@triton.jit
def softmax_weights(x, peak, temperature):
    """exp((x - peak) / temperature) of finite x up to peak; 1 at the peak however small the
    temperature.
    """
    return tl.exp((x - tl.where(peak == -float("inf"), 0.0, peak)) / temperature)


@triton.jit(do_not_specialize=["code", "vocab_size", "num_chunks"])
def _race_of_chunks(
    peaks_ptr,  # [N, C] float32; this and the next for logits only
    masses_ptr,  # [N, C] float32 sum of the weights relative to the peak
    ratios_ptr,  # [N, C] float64
    ids_ptr,  # [N, C] int32
    values_ptr,  # [N, V] weights, or logits with a temperature
    temperature_ptr,  # [N] or None
    seed_ptr,  # [N]
    position_ptr,  # [N]
    codes_ptr,  # [N] or None
    code,
    row_stride,
    vocab_size,
    num_chunks,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    row, chunk = tl.program_id(1).to(tl.int64), tl.program_id(0)
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    is_token = token < vocab_size
    wait_for_inputs(PDL)
    if codes_ptr is not None:
        code = tl.load(codes_ptr + row)
    key = stream_key(tl.load(seed_ptr + row), tl.load(position_ptr + row), code)
    place = row * num_chunks + chunk
    values_ptr += row * row_stride
    if temperature_ptr is None:
        weights = tl.load(values_ptr + token, mask=is_token, other=0.0)
        ratio, found = race(weights, key, token)
    else:
        temperature = tl.load(temperature_ptr + row)
        x = finite(tl.load(values_ptr + token, mask=is_token, other=-float("inf")))
        peak, best = first_best(x, token)
        tl.store(peaks_ptr + place, peak)
        if temperature > 0:
            weights = softmax_weights(x, peak, temperature)
            tl.store(masses_ptr + place, tl.sum(weights, 0))
            ratio, found = race(weights, key, token)
        else:
            ratio, found = tl.full([], 1.0, tl.float64), best
    tl.store(ratios_ptr + place, ratio)
    tl.store(ids_ptr + place, found)


@triton.jit(do_not_specialize=["num_chunks"])
def _race_of_rows(
    tokens_ptr,  # [N]
    peak_ptr,  # [N] float32; this and the next for logits only
    mass_ptr,  # [N] float32
    peaks_ptr,  # [N, C]
    masses_ptr,  # [N, C]
    ratios_ptr,  # [N, C]
    ids_ptr,  # [N, C]
    temperature_ptr,  # [N] or None
    num_chunks,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    is_chunk = chunk < num_chunks
    place = row * num_chunks + chunk
    wait_for_inputs(PDL)
    ratios = tl.load(ratios_ptr + place, mask=is_chunk, other=-1.0)
    ids = tl.load(ids_ptr + place, mask=is_chunk, other=NO_TOKEN)
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + row)
        peaks = tl.load(peaks_ptr + place, mask=is_chunk, other=-float("inf"))
        peak = tl.max(peaks, 0)
        tl.store(peak_ptr + row, peak)
        if temperature > 0:
            masses = tl.load(masses_ptr + place, mask=is_chunk, other=0.0)
            mass = tl.sum(masses * softmax_weights(peaks, peak, temperature), 0)
            tl.store(mass_ptr + row, tl.where(mass > 0, mass, 1.0))  # 0: nothing is allowed
        ratios = ratios * peak_factor(peaks, peak, temperature)
    _, token = first_best(ratios, ids)
    tl.store(tokens_ptr + row, token.to(tl.int64))


@triton.jit
def peak_factor(peaks, peak, temperature):
    """What turns weights relative to `peaks` into weights relative to the row's `peak`: float64.

    For a greedy row 1 where the peak is the row's, else 0.
    """
    peak = tl.where(peak == -float("inf"), 0.0, peak)
    below = (peaks - peak).to(tl.float64)
    hot = tl.exp(below / tl.where(temperature > 0, temperature, 1.0).to(tl.float64))
    return tl.where(temperature > 0, hot, tl.where(below == 0, 1.0, 0.0).to(tl.float64))


@triton.jit(do_not_specialize=["vocab_size"])
def _probabilities(
    probs_ptr,  # [N, V] float32
    tokens_ptr,  # [N]
    peak_ptr,  # [N]
    mass_ptr,  # [N]
    logits_ptr,  # [N, V]
    temperature_ptr,  # [N]
    row_stride,
    vocab_size,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """softmax(logits / temperature), one-hot at the token of a greedy row."""
    start_next(PDL)
    row = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_token = token < vocab_size
    wait_for_inputs(PDL)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0:
        x_ptrs = logits_ptr + row * row_stride + token
        x = finite(tl.load(x_ptrs, mask=is_token, other=-float("inf")))
        weights = softmax_weights(x, tl.load(peak_ptr + row), temperature)
        p = weights / tl.load(mass_ptr + row)
    else:
        p = (token == tl.load(tokens_ptr + row)).to(tl.float32)
    tl.store(probs_ptr + row * vocab_size + token, p, mask=is_token)


def draw_tokens_kernel(
    weights: Tensor,
    seed: Tensor,
    position: Tensor,
    purpose: Purpose | Tensor,
    index: int | Tensor,
) -> Tensor:
    """See `token_choice.draw_tokens`."""
    rows = weights.reshape(-1, weights.shape[-1])
    keys = _spread(weights.shape[:-1], seed, position, purpose, index)
    return _race(rows, None, *keys)[0].view(weights.shape[:-1])


def sample_with_probs_kernel(
    logits: Tensor,
    temperature: Tensor,
    seed: Tensor,
    position: Tensor,
    purpose: Purpose | Tensor,
    index: int | Tensor,
) -> tuple[Tensor, Tensor]:
    """See `token_choice.sample_with_probs`."""
    (n, vocab_size), temperature = logits.shape, temperature.contiguous()
    keys = _spread(logits.shape[:1], seed, position, purpose, index)
    tokens, peak, mass = _race(logits, temperature, *keys)
    probs = torch.empty(n, vocab_size, dtype=torch.float32, device=logits.device)
    if n == 0:
        return tokens, probs
    block = min(BLOCK, triton.next_power_of_2(vocab_size))
    _probabilities[(triton.cdiv(vocab_size, block), n)](
        probs, tokens, peak, mass, logits, temperature, logits.stride(0), vocab_size,
        BLOCK=block, num_warps=8, **dependent_launch(logits),
    )  # fmt: skip
    return tokens, probs


def _spread(
    shape: torch.Size,
    seed: Tensor,
    position: Tensor,
    purpose: Purpose | Tensor,
    index: int | Tensor,
) -> tuple[Tensor, Tensor, int | Tensor]:
    """seed and position [N], and purpose and index as one code, [N] or a number."""
    code = index * 4 + purpose
    seed, position = (x.expand(shape).contiguous().view(-1) for x in (seed, position))
    if isinstance(code, Tensor):
        return seed, position, code.expand(shape).contiguous().view(-1)
    return seed, position, int(code)


def _race(
    values: Tensor,
    temperature: Tensor | None,
    seed: Tensor,
    position: Tensor,
    code: int | Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [N], and of rows of logits their peak and mass [N]."""
    n, vocab_size = values.shape
    assert values.stride(1) == 1, values.stride()
    block = min(RACE_BLOCK, triton.next_power_of_2(vocab_size))
    chunks = triton.cdiv(vocab_size, block)
    tokens = torch.empty(n, dtype=torch.int64, device=values.device)
    peak, mass = (values.new_empty(n, dtype=torch.float32) for _ in range(2))
    peaks, masses = (values.new_empty(n, chunks, dtype=torch.float32) for _ in range(2))
    ratios = values.new_empty(n, chunks, dtype=torch.float64)
    ids = values.new_empty(n, chunks, dtype=torch.int32)
    if n == 0:
        return tokens, peak, mass
    launch = dependent_launch(values)
    codes, number = (code, 0) if isinstance(code, Tensor) else (None, code)
    _race_of_chunks[(chunks, n)](
        peaks, masses, ratios, ids, values, temperature, seed, position, codes, number,
        values.stride(0), vocab_size, chunks, BLOCK=block, num_warps=8, **launch,
    )  # fmt: skip
    _race_of_rows[(n,)](
        tokens, peak, mass, peaks, masses, ratios, ids, temperature, chunks,
        CHUNKS=triton.next_power_of_2(chunks), num_warps=2, **launch,
    )  # fmt: skip
    return tokens, peak, mass
