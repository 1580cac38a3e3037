"""A token per row in two launches: the argmax of every chunk of a row, then the best of those; or
the mass of every chunk, then a race between chunks and one between the winner's tokens.

The order in which chunks are compared is fixed by the shape, so equal rows give equal tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hydraspec_kernels.runtime.launch_kernel import dependent_launch, start_next, wait_for_inputs
from hydraspec_kernels.sampling.random_streams import DrawKey
from hydraspec_kernels.sampling.random_streams.kernel import INDEX_STEP, exponential, stream_key
from hydraspec_kernels.sampling.token_choice.reference import CHUNK, FIRST_CHUNK

BLOCK = 2048  # logits that a program holds at once
CHUNKS_EACH = 2  # chunks that one program of `_masses_of_chunks` sums
LARGEST: tl.constexpr = tl.constexpr(3.4028234663852886e38)
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
NO_TOKEN: tl.constexpr = tl.constexpr(2147483647)


@triton.jit
def first_best(values, ids):
    """The largest of `values` and the lowest of the ids that have it."""
    best = tl.max(values, 0)
    return best, tl.min(tl.where(values == best, ids, NO_TOKEN), 0)


@triton.jit(do_not_specialize=["num_chunks"])
def _best_of_chunks(
    best_ptr,  # [N, C] float32
    ids_ptr,  # [N, C] int32
    logits_ptr,  # [N, V]
    row_stride,
    vocab_size,
    num_chunks,
    first,  # the token of column 0
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
    tl.store(ids_ptr + row * num_chunks + chunk, first + found)


@triton.jit(do_not_specialize=["num_chunks", "part_stride"])
def _best_of_rows(
    tokens_ptr,  # [N]
    best_ptr,  # [N, C], PARTS of them
    ids_ptr,  # [N, C], PARTS of them
    num_chunks,
    part_stride,  # of best and ids
    PARTS: tl.constexpr,
    CHUNKS: tl.constexpr,  # power of two, at least num_chunks
    MARK: tl.constexpr,  # whether to give ~token where the best is infinite or NaN
    PDL: tl.constexpr,
):
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    is_chunk = chunk < num_chunks
    wait_for_inputs(PDL)
    at = row * num_chunks + chunk
    best = tl.load(best_ptr + at, mask=is_chunk, other=-float("inf"))
    ids = tl.load(ids_ptr + at, mask=is_chunk, other=NO_TOKEN)
    value, token = first_best(best, ids)
    for _ in tl.static_range(1, PARTS):
        at += part_stride
        best = tl.load(best_ptr + at, mask=is_chunk, other=-float("inf"))
        ids = tl.load(ids_ptr + at, mask=is_chunk, other=NO_TOKEN)
        other, its = first_best(best, ids)
        is_better = other > value  # and not >=: ids of later parts are higher
        value, token = tl.where(is_better, other, value), tl.where(is_better, its, token)
    token = token.to(tl.int64)
    if MARK:
        token = tl.where(tl.abs(value) == float("inf"), -1 - token, token)
    tl.store(tokens_ptr + row, token)


def best_of_rows(best: Tensor, ids: Tensor, *, marks_not_finite: bool = False) -> Tensor:
    """The id [N] int64 of the best of each row, the lowest of equals: best and ids [N, C], or
    [P, N, C] with ids that rise along P.
    """
    n, chunks = best.shape[-2:]
    parts = best.shape[0] if best.dim() == 3 else 1
    tokens = torch.empty(n, dtype=torch.int64, device=best.device)
    if n == 0:
        return tokens
    _best_of_rows[(n,)](
        tokens, best, ids, chunks, best.stride(0) if best.dim() == 3 else 0,
        PARTS=parts, CHUNKS=triton.next_power_of_2(chunks), MARK=marks_not_finite, num_warps=1,
        **dependent_launch(best),
    )  # fmt: skip
    return tokens


def blocks_per_chunk(num_rows: int, vocab_size: int) -> int:
    """Number of blocks that one program reads: two where rows fill the device."""
    return 2 if num_rows * triton.cdiv(vocab_size, BLOCK) >= 4096 else 1


def greedy_tokens_kernel(logits: Tensor, *, marks_not_finite: bool = False) -> Tensor:
    """See `token_choice.greedy_tokens`."""
    shape = _chunks_of_rows(logits)
    best = torch.empty(shape, dtype=torch.float32, device=logits.device)
    ids = torch.empty(shape, dtype=torch.int32, device=logits.device)
    _find_best_of_chunks(best, ids, logits, 0, logits.shape[1])
    return best_of_rows(best, ids, marks_not_finite=marks_not_finite)


def greedy_candidates_kernel(logits: Tensor, first: int, num_tokens: int) -> Tensor:
    """See `token_choice.greedy_candidates`. A row has C chunks; ids are stored as bits of int32."""
    found = torch.empty(2, *_chunks_of_rows(logits), dtype=torch.float32, device=logits.device)
    _find_best_of_chunks(found[0], found[1].view(torch.int32), logits, first, num_tokens)
    return found


def _chunks_of_rows(logits: Tensor) -> tuple[int, int]:
    """Number of rows, and number of chunks of a row."""
    n, num_columns = logits.shape
    return n, triton.cdiv(num_columns, blocks_per_chunk(n, num_columns) * BLOCK)


def _find_best_of_chunks(
    best: Tensor, ids: Tensor, logits: Tensor, first: int, num_tokens: int
) -> None:
    """Fills best and ids [N, C] of the first num_tokens columns, whose tokens start at `first`."""
    n, chunks = best.shape
    assert logits.stride(1) == 1, logits.stride()
    if n == 0:
        return
    _best_of_chunks[(chunks, n)](
        best, ids, logits, logits.stride(0), num_tokens, chunks, first,
        BLOCKS_EACH=blocks_per_chunk(*logits.shape), BLOCK=BLOCK, num_warps=4,
        **dependent_launch(logits),
    )  # fmt: skip


def best_candidates_kernel(candidates: Tensor, *, marks_not_finite: bool = False) -> Tensor:
    """See `token_choice.best_candidates`."""
    best, ids = candidates.unbind(1)
    return best_of_rows(best, ids.view(torch.int32), marks_not_finite=marks_not_finite)


@triton.jit
def race(weights, key, ids, FIRST: tl.constexpr = 0):
    """The winner of an exponential race: (largest weight / draw in float64, the lowest id)."""
    weights = tl.where(weights > 0, weights, 0.0).to(tl.float64)  # NaN never wins
    return first_best(weights / exponential(key, ids.to(tl.int64) + FIRST), ids)


@triton.jit
def finite(x):
    """x in float32, with NaN and +inf replaced by the largest number; -inf is kept."""
    x = x.to(tl.float32)
    return tl.where(x < LARGEST, x, LARGEST)


@triton.jit
def is_finite_peak(peak):
    """Returns whether `peak`, the largest of some results of `finite`, stands for a finite
    number."""
    return (peak > -float("inf")) & (peak < LARGEST)


@triton.jit
def sharpness_of(temperature):
    """Factor s = log2(e) / temperature, at most LARGEST: exp2(x * s) is exp(x / temperature)."""
    return tl.minimum(LOG2_E / temperature, LARGEST)


@triton.jit
def softmax_weights(x, peak, temperature):
    """Weights exp((x - peak) / temperature) of finite x up to peak; 1 at the peak however small the
    temperature.
    """
    sharpness = sharpness_of(temperature)
    return tl.exp2((x - tl.where(peak == -float("inf"), 0.0, peak)) * sharpness)


@triton.jit
def store_statistics(
    peaks_ptr,  # largest logit
    masses_ptr,  # sum of exp((x - peak) / temperature), if the temperature is positive
    ids_ptr,  # lowest id of the largest logit, if the temperature is 0
    at,  # [n] places of the chunks in these
    x,  # [n, CHUNK]
    token,  # [n, CHUNK]
    temperature,
    is_chunk,  # [n]
):
    """Stores peak, and mass or argmax, of n chunks of a row."""
    peak = tl.max(x, 1)
    tl.store(peaks_ptr + at, peak, mask=is_chunk)
    if temperature > 0:
        mass = tl.sum(softmax_weights(x, peak[:, None], temperature), 1)
        tl.store(masses_ptr + at, mass, mask=is_chunk)
    else:
        best = tl.min(tl.where(x == peak[:, None], token, NO_TOKEN), 1)
        tl.store(ids_ptr + at, best, mask=is_chunk)


@triton.jit(do_not_specialize=["num_chunks"])
def _masses_of_chunks(
    peaks_ptr,  # [N, C] float32; peaks and ids are written for logits only
    masses_ptr,  # [N, C] relative to the peak
    ids_ptr,  # [N, C] int32
    values_ptr,  # [N, V] weights; logits if there is a temperature
    temperature_ptr,  # [N] or None
    row_stride,
    vocab_size,
    num_chunks,
    CHUNKS: tl.constexpr,  # chunks that one program sums
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    row = tl.program_id(1).to(tl.int64)
    chunk = tl.program_id(0) * CHUNKS + tl.arange(0, CHUNKS)
    token = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    is_token, is_chunk = token < vocab_size, chunk < num_chunks
    at = row * num_chunks + chunk
    values_ptr += row * row_stride
    wait_for_inputs(PDL)
    if temperature_ptr is None:
        weights = tl.load(values_ptr + token, mask=is_token, other=0.0)
        weights = tl.where(weights > 0, weights, 0.0).to(masses_ptr.dtype.element_ty)
        tl.store(masses_ptr + at, tl.sum(weights, 1), mask=is_chunk)
    else:
        temperature = tl.load(temperature_ptr + row)
        x = finite(tl.load(values_ptr + token, mask=is_token, other=-float("inf")))
        store_statistics(peaks_ptr, masses_ptr, ids_ptr, at, x, token, temperature, is_chunk)


@triton.jit(do_not_specialize=["code", "num_chunks"])
def _draw_of_rows(
    tokens_ptr,  # [N]
    peak_ptr,  # [N] float32; peak and mass are written for logits only
    mass_ptr,  # [N] float32
    peaks_ptr,  # [N, C]
    masses_ptr,  # [N, C]
    ids_ptr,  # [N, C]
    values_ptr,  # [N, V]
    temperature_ptr,  # [N] or None
    seed_ptr,  # [N]
    position_ptr,  # [N]
    codes_ptr,  # [N] or None
    code,
    row_stride,
    vocab_size,
    num_chunks,
    CHUNKS: tl.constexpr,  # power of two, at least num_chunks
    CHUNK: tl.constexpr,
    FIRST_CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    is_chunk, at = chunk < num_chunks, row * num_chunks + chunk
    values_ptr += row * row_stride
    wait_for_inputs(PDL)
    if codes_ptr is not None:
        code = tl.load(codes_ptr + row)
    key = stream_key(tl.load(seed_ptr + row), tl.load(position_ptr + row), code)
    if temperature_ptr is None:
        masses = tl.load(masses_ptr + at, mask=is_chunk, other=0.0)
        _, found = race(masses, key, chunk, FIRST_CHUNK)
        token = found * CHUNK + tl.arange(0, CHUNK)
        weights = tl.load(values_ptr + token, mask=token < vocab_size, other=0.0)
        _, drawn = race(weights, key, token)
    else:
        temperature = tl.load(temperature_ptr + row)
        peaks = tl.load(peaks_ptr + at, mask=is_chunk, other=-float("inf"))
        peak = tl.max(peaks, 0)
        if temperature > 0:
            masses = tl.load(masses_ptr + at, mask=is_chunk, other=0.0)
            masses *= softmax_weights(peaks, peak, temperature)
            mass = tl.sum(masses, 0)
            tl.store(peak_ptr + row, peak)
            tl.store(mass_ptr + row, tl.where(mass > 0, mass, 1.0))  # 0 if all tokens are cut off
            _, found = race(masses, key, chunk, FIRST_CHUNK)
            token = found * CHUNK + tl.arange(0, CHUNK)
            x = tl.load(values_ptr + token, mask=token < vocab_size, other=-float("inf"))
            x = finite(x)
            _, drawn = race(softmax_weights(x, tl.max(x, 0), temperature), key, token)
        else:
            ids = tl.load(ids_ptr + at, mask=is_chunk, other=NO_TOKEN)
            drawn = first_best(peaks, ids)[1]
    tl.store(tokens_ptr + row, drawn.to(tl.int64))


@triton.jit
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
    """Distribution softmax(logits / temperature), one-hot at the token of a greedy row."""
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


def draw_tokens_kernel(weights: Tensor, key: DrawKey) -> Tensor:
    """See `token_choice.draw_tokens`."""
    shape, rows = weights.shape[:-1], weights.reshape(-1, weights.shape[-1])
    return _draw(rows, None, key, shape)[0].view(shape)


def sample_with_probs_kernel(
    logits: Tensor, temperature: Tensor, key: DrawKey
) -> tuple[Tensor, Tensor]:
    """See `token_choice.sample_with_probs`."""
    (n, vocab_size), temperature = logits.shape, temperature.contiguous()
    tokens, peak, mass = _draw(logits, temperature, key, logits.shape[:1])
    probs = torch.empty(n, vocab_size, dtype=torch.float32, device=logits.device)
    if n == 0:
        return tokens, probs
    block = min(BLOCK, triton.next_power_of_2(vocab_size))
    _probabilities[(triton.cdiv(vocab_size, block), n)](
        probs, tokens, peak, mass, logits, temperature, logits.stride(0), vocab_size,
        BLOCK=block, num_warps=4, **dependent_launch(logits),
    )  # fmt: skip
    return tokens, probs


def _draw(
    values: Tensor, temperature: Tensor | None, key: DrawKey, shape: torch.Size
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [N], and for logits (temperature given) each row's peak and mass [N]; the parts of the
    key are expanded to `shape`, which has N entries."""
    n, vocab_size = values.shape
    assert values.stride(1) == 1, values.stride()
    chunks, dtype = triton.cdiv(vocab_size, CHUNK), torch.float32
    if temperature is None:
        dtype = torch.promote_types(values.dtype, dtype)
    tokens = torch.empty(n, dtype=torch.int64, device=values.device)
    peak, mass = (values.new_empty(n, dtype=torch.float32) for _ in range(2))
    peaks = values.new_empty(n, chunks, dtype=torch.float32)
    masses = values.new_empty(n, chunks, dtype=dtype)
    ids = values.new_empty(n, chunks, dtype=torch.int32)
    if n == 0:
        return tokens, peak, mass
    seed, position = (x.expand(shape).contiguous().view(-1) for x in (key.seed, key.position))
    code, codes = key.index * INDEX_STEP.value + key.purpose, None
    if isinstance(code, Tensor):
        code, codes = 0, code.expand(shape).contiguous().view(-1)
    launch = dependent_launch(values)
    _masses_of_chunks[(triton.cdiv(chunks, CHUNKS_EACH), n)](
        peaks, masses, ids, values, temperature, values.stride(0), vocab_size, chunks,
        CHUNKS=CHUNKS_EACH, CHUNK=CHUNK, num_warps=4 if temperature is None else 2, **launch,
    )  # fmt: skip
    _draw_of_rows[(n,)](
        tokens, peak, mass, peaks, masses, ids, values, temperature, seed, position, codes,
        int(code), values.stride(0), vocab_size, chunks,
        CHUNKS=triton.next_power_of_2(chunks), CHUNK=CHUNK, FIRST_CHUNK=FIRST_CHUNK, num_warps=8,
        **launch,
    )  # fmt: skip
    return tokens, peak, mass
