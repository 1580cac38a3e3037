"""The fused decode kernel's loop over the keys of a paged cache.

The tensor cores take at least sixteen rows or eight columns. With eight queries as columns a
program needs so few registers that four share a multiprocessor.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hydraspec_kernels.attention.tiles_kernel import NO_KEY, load_rows, times_scale


@triton.jit
def key_blocks(table, j, limit, BLOCK_SIZE: tl.constexpr):
    """Cache blocks of keys j >= 0. Unsigned division is cheaper: the compiler knows no sign."""
    return tl.load(table + (j.to(tl.uint32) // BLOCK_SIZE).to(tl.int32), mask=j < limit, other=0)


@triton.jit
def _load_values(
    base, at, exists, FIRST: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Values [N, BLOCK] as from `load_rows`, or transposed."""
    if not TRANSPOSED:
        return load_rows(base, at, exists, FIRST, WIDTH, BLOCK)
    else:
        d = tl.arange(0, BLOCK)
        mask = exists[None, :]
        if BLOCK != WIDTH:
            mask = mask & (d < WIDTH)[:, None]
        return tl.load(base + at[None, :] + (FIRST + d)[:, None], mask=mask, other=0.0)


@triton.jit
def _dot(queries, keys, acc, TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr):
    """Sum acc + queries @ keys, or, where all three are transposed, acc + keys @ queries."""
    if TRANSPOSED:
        return tl.dot(keys, queries, acc, input_precision=PRECISION)
    else:
        return tl.dot(queries, keys, acc, input_precision=PRECISION)


@triton.jit
def attend_keys(
    q_a, q_b, keys, kv_scales, kv_head, table, block, begin, limit, position, scale,
    NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr, WINDOW: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr, TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Halves of the mean values [BLOCK_M, BLOCK_H] over keys begin..limit, and log2 of the
    weights' sum.

    block [BLOCK_N] holds the blocks of the first keys: the block table is read a step ahead, so
    that loads of keys do not wait for it. Keys and values are loaded in halves, all in one layout,
    so that a thread computes few addresses; e4m3 numbers then become the queries' type. TRANSPOSED:
    queries are columns of scores and sums.
    """
    VALUES: tl.constexpr = 2 * NUM_KV_HEADS * HALF  # stored after the keys
    BY_KEY: tl.constexpr = 0 if TRANSPOSED else 1  # the axis of the scores that runs over keys
    BY_QUERY: tl.constexpr = 1 - BY_KEY
    newest = tl.minimum(position, limit - 1)
    scale = times_scale(scale, kv_scales, kv_head)
    top = tl.full([BLOCK_M], NO_KEY, tl.float32)
    if TRANSPOSED:
        q_a, q_b = tl.trans(q_a), tl.trans(q_b)
        total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        acc_a = tl.zeros([BLOCK_H, BLOCK_M], tl.float32)
        acc_b = tl.zeros([BLOCK_H, BLOCK_M], tl.float32)
    else:
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        acc_a = tl.zeros([BLOCK_M, BLOCK_H], tl.float32)
        acc_b = tl.zeros([BLOCK_M, BLOCK_H], tl.float32)
    for at in tl.range(begin, limit, BLOCK_N):
        j = at + tl.arange(0, BLOCK_N)
        seen = j < limit
        at_key = (block.to(tl.int32) * BLOCK_SIZE + (j & (BLOCK_SIZE - 1))).to(tl.int64)
        at_key *= 2 * VALUES
        block = key_blocks(table, j + BLOCK_N, limit, BLOCK_SIZE)
        k_a = load_rows(keys, at_key, seen, 0, HALF, BLOCK_H)
        k_b = load_rows(keys, at_key, seen, HALF, HALF, BLOCK_H)
        k_a, k_b = k_a.to(q_a.dtype), k_b.to(q_a.dtype)
        v_a = _load_values(keys, at_key, seen, VALUES, HALF, BLOCK_H, TRANSPOSED)
        v_b = _load_values(keys, at_key, seen, VALUES + HALF, HALF, BLOCK_H, TRANSPOSED)
        v_a, v_b = v_a.to(q_a.dtype), v_b.to(q_a.dtype)
        if not TRANSPOSED:
            k_a, k_b = tl.trans(k_a), tl.trans(k_b)
        scores = _dot(q_a, k_a, None, TRANSPOSED, PRECISION)
        scores = _dot(q_b, k_b, scores, TRANSPOSED, PRECISION)
        key = tl.expand_dims(j, BY_QUERY)
        visible = key <= tl.expand_dims(newest, BY_KEY)
        if WINDOW > 0:
            visible = visible & (key > tl.expand_dims(position, BY_KEY) - WINDOW)
        scores = tl.where(visible, scores * scale, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, BY_KEY))
        weights = tl.exp2(scores - tl.expand_dims(new_top, BY_KEY))
        fade = tl.expand_dims(tl.exp2(top - new_top), BY_KEY)
        total = total * fade + weights
        weights = weights.to(v_a.dtype)
        acc_a = _dot(weights, v_a, acc_a * fade, TRANSPOSED, PRECISION)
        acc_b = _dot(weights, v_b, acc_b * fade, TRANSPOSED, PRECISION)
        top = new_top
    whole = tl.sum(total, BY_KEY)
    some = tl.where(whole > 0, whole, 1.0)
    size = tl.where(whole > 0, top + tl.log2(some), NO_KEY)
    inverse = tl.expand_dims(1.0 / some, BY_KEY)
    inverse = times_scale(inverse, kv_scales, NUM_KV_HEADS + kv_head)
    mean_a, mean_b = acc_a * inverse, acc_b * inverse
    if TRANSPOSED:
        mean_a, mean_b = tl.trans(mean_a), tl.trans(mean_b)
    return mean_a, mean_b, size
