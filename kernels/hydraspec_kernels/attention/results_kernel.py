"""How programs of the fused decode kernel store their results, and add up those of splits."""

from __future__ import annotations

import triton
import triton.language as tl

from hydraspec_kernels.attention.splits_kernel import arrive
from hydraspec_kernels.attention.tiles_kernel import NO_KEY, clear_queries
from hydraspec_kernels.quantised.e4m3_kernel import NEXT_GROUP, rounded_groups

# Numbers of splits' results that a program reads at once.
NUMBERS_AT_ONCE = tl.constexpr(8192)


@triton.jit
def _store_halves(
    to, at, a, b, exists, HALF: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr
):
    """Stores both halves of heads to the rows `at` [BLOCK_M] of `to`."""
    i = tl.arange(0, BLOCK_H)[None, :]
    mask = exists[:, None] & (i < HALF)
    to += at.to(tl.int64)[:, None] * (2 * HALF) + i
    tl.store(to, a.to(to.dtype.element_ty), mask=mask)
    tl.store(to + HALF, b.to(to.dtype.element_ty), mask=mask)


@triton.jit
def store_result(
    to, scales, at, a, b, exists, NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    """Stores both halves of heads, or their e4m3 numbers and the scales of ROUNDED of them each."""
    if ROUNDED:
        at, mask = at.to(tl.int64)[:, None], exists[:, None]
        to += at * (2 * HALF) + tl.arange(0, HALF)[None, :]
        group = at % NUM_HEADS * (2 * HALF // ROUNDED) + tl.arange(0, HALF // ROUNDED)[None, :]
        scales += group * NEXT_GROUP + at // NUM_HEADS
        for half in tl.static_range(2):
            numbers, scale = rounded_groups(b if half else a, BLOCK_M, HALF, ROUNDED)
            tl.store(to + half * HALF, numbers.to(to.dtype.element_ty), mask=mask)
            tl.store(scales + half * (HALF // ROUNDED) * NEXT_GROUP, scale, mask=mask)
    else:
        _store_halves(to, at, a, b, exists, HALF, BLOCK_M, BLOCK_H)


@triton.jit
def clear_rest(
    out, scales, first_row, stop_row, kv_head,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, QUERIES: tl.constexpr,
    BLOCK: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    """Stores zeros for the queries of one KV head in rows first_row..stop_row, and for scales."""
    clear_queries(out, first_row, stop_row, kv_head, NUM_HEADS, GROUP, HEAD_DIM, QUERIES, BLOCK)
    if ROUNDED:
        N: tl.constexpr = GROUP * HEAD_DIM // ROUNDED
        row = tl.arange(0, NEXT_GROUP)
        zeros, mask = tl.zeros([NEXT_GROUP], tl.float32), (row >= first_row) & (row < stop_row)
        for group in range(kv_head * N, (kv_head + 1) * N):
            tl.store(scales + group * NEXT_GROUP + row, zeros, mask=mask)


@triton.jit
def _mean_of_splits(
    partial, sums, at_out, size_of_split, inside, used,
    HALF: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Halves of the means over the `used` splits of a tile, added up in their order. The program's
    own are read back too: used from registers, they would need another layout in every step."""
    AT_ONCE: tl.constexpr = max(2, min(4, NUMBERS_AT_ONCE // (2 * BLOCK_M * BLOCK_H)))
    i = tl.arange(0, BLOCK_H)[None, :]
    top = tl.full([BLOCK_M], NO_KEY, tl.float32)
    whole = tl.zeros([BLOCK_M], tl.float32)
    sum_a = tl.zeros([BLOCK_M, BLOCK_H], tl.float32)
    sum_b = tl.zeros([BLOCK_M, BLOCK_H], tl.float32)
    for first in range(0, used, AT_ONCE):
        sizes, halves_a, halves_b = (), (), ()
        for n in tl.static_range(AT_ONCE):
            at, exists = (first + n) * size_of_split + at_out, inside & (first + n < used)
            mask, part = exists[:, None] & (i < HALF), partial + at[:, None] * (2 * HALF) + i
            sizes += (tl.load(sums + at, mask=exists, other=NO_KEY, cache_modifier=".cg"),)
            halves_a += (tl.load(part, mask=mask, other=0.0, cache_modifier=".cg"),)
            halves_b += (tl.load(part + HALF, mask=mask, other=0.0, cache_modifier=".cg"),)
        for n in tl.static_range(AT_ONCE):
            new_top = tl.maximum(top, sizes[n])
            weight, fade = tl.exp2(sizes[n] - new_top), tl.exp2(top - new_top)
            whole = whole * fade + weight
            sum_a = sum_a * fade[:, None] + halves_a[n] * weight[:, None]
            sum_b = sum_b * fade[:, None] + halves_b[n] * weight[:, None]
            top = new_top
    inverse = (1.0 / whole)[:, None]
    return sum_a * inverse, sum_b * inverse


@triton.jit
def store_split(
    out, scales, partial, counter, at_out, mean_a, mean_b, size, inside, split, share, all_keys,
    split_shift, num_rows,
    NUM_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr,
    ADDS: tl.constexpr, ROUNDED: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Stores a split's mean values and log2 of its weights' sum; with ADDS the split of a tile that
    ends last stores the result of all."""
    size_of_split = num_rows.to(tl.int64) * NUM_HEADS
    at_split = split * size_of_split + at_out
    sums = partial + (size_of_split << split_shift) * (2 * HALF)
    _store_halves(partial, at_split, mean_a, mean_b, inside, HALF, BLOCK_M, BLOCK_H)
    tl.store(sums + at_split, size, mask=inside)
    if ADDS:
        used = arrive(counter, share, all_keys)
        if used > 0:
            a, b = _mean_of_splits(
                partial, sums, at_out, size_of_split, inside, used, HALF, BLOCK_M, BLOCK_H
            )
            store_result(
                out, scales, at_out, a.to(dtype), b.to(dtype), inside, NUM_HEADS, HALF, BLOCK_M,
                BLOCK_H, ROUNDED,
            )  # fmt: skip
