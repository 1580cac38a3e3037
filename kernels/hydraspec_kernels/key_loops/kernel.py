"""Attention of a tile of queries over the keys of a paged cache, once through.

The tensor cores take rows by sixteens and columns by eights. With eight queries as columns a
program needs so few registers that four share a multiprocessor.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hydraspec_kernels.paged_attention.kernel import NO_KEY, load_rows


@triton.jit
def key_blocks(table, j, limit, BLOCK_SIZE: tl.constexpr):
    """Blocks of keys j >= 0. Divided without a sign, of which the compiler does not know."""
    return tl.load(table + (j.to(tl.uint32) // BLOCK_SIZE).to(tl.int32), mask=j < limit, other=0)


@triton.jit
def _attend_rows(
    q_a, q_b, keys, table, block, begin, limit, position, scale,
    NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr, WINDOW: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Queries are rows."""
    VALUES: tl.constexpr = 2 * NUM_KV_HEADS * HALF  # behind the keys
    newest = tl.minimum(position, limit - 1)
    top = tl.full([BLOCK_M], NO_KEY, tl.float32)
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
        v_a = load_rows(keys, at_key, seen, VALUES, HALF, BLOCK_H)
        v_b = load_rows(keys, at_key, seen, VALUES + HALF, HALF, BLOCK_H)
        scores = tl.dot(q_a, tl.trans(k_a), input_precision=PRECISION)
        scores = tl.dot(q_b, tl.trans(k_b), scores, input_precision=PRECISION)
        visible = j[None, :] <= newest[:, None]
        if WINDOW > 0:
            visible = visible & (j[None, :] > position[:, None] - WINDOW)
        scores = tl.where(visible, scores * scale, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        fade = tl.exp2(top - new_top)[:, None]
        total = total * fade + weights
        weights = weights.to(v_a.dtype)
        acc_a = tl.dot(weights, v_a, acc_a * fade, input_precision=PRECISION)
        acc_b = tl.dot(weights, v_b, acc_b * fade, input_precision=PRECISION)
        top = new_top
    whole = tl.sum(total, 1)
    some = tl.where(whole > 0, whole, 1.0)
    size = tl.where(whole > 0, top + tl.log2(some), NO_KEY)
    inverse = (1.0 / some)[:, None]
    return acc_a * inverse, acc_b * inverse, size


@triton.jit
def _load_columns(base, at, exists, FIRST: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """[BLOCK, N]: what `load_rows` loads, each row a column."""
    d = tl.arange(0, BLOCK)
    mask = exists[None, :]
    if BLOCK != WIDTH:
        mask = mask & (d < WIDTH)[:, None]
    return tl.load(base + at[None, :] + (FIRST + d)[:, None], mask=mask, other=0.0)


@triton.jit
def _attend_columns(
    q_a, q_b, keys, table, block, begin, limit, position, scale,
    NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr, WINDOW: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Queries are columns."""
    VALUES: tl.constexpr = 2 * NUM_KV_HEADS * HALF  # behind the keys
    q_a, q_b = tl.trans(q_a), tl.trans(q_b)
    newest = tl.minimum(position, limit - 1)
    top = tl.full([BLOCK_M], NO_KEY, tl.float32)
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    acc_a = tl.zeros([BLOCK_H, BLOCK_M], tl.float32)
    acc_b = tl.zeros([BLOCK_H, BLOCK_M], tl.float32)
    for at in tl.range(begin, limit, BLOCK_N):
        j = at + tl.arange(0, BLOCK_N)
        seen = j < limit
        at_key = (block.to(tl.int32) * BLOCK_SIZE + (j & (BLOCK_SIZE - 1))).to(tl.int64)
        at_key *= 2 * VALUES
        block = key_blocks(table, j + BLOCK_N, limit, BLOCK_SIZE)
        k_a = load_rows(keys, at_key, seen, 0, HALF, BLOCK_H)
        k_b = load_rows(keys, at_key, seen, HALF, HALF, BLOCK_H)
        v_a = _load_columns(keys, at_key, seen, VALUES, HALF, BLOCK_H)
        v_b = _load_columns(keys, at_key, seen, VALUES + HALF, HALF, BLOCK_H)
        scores = tl.dot(k_a, q_a, input_precision=PRECISION)
        scores = tl.dot(k_b, q_b, scores, input_precision=PRECISION)
        visible = j[:, None] <= newest[None, :]
        if WINDOW > 0:
            visible = visible & (j[:, None] > position[None, :] - WINDOW)
        scores = tl.where(visible, scores * scale, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 0))
        weights = tl.exp2(scores - new_top[None, :])
        fade = tl.exp2(top - new_top)[None, :]
        total = total * fade + weights
        weights = weights.to(v_a.dtype)
        acc_a = tl.dot(v_a, weights, acc_a * fade, input_precision=PRECISION)
        acc_b = tl.dot(v_b, weights, acc_b * fade, input_precision=PRECISION)
        top = new_top
    whole = tl.sum(total, 0)
    some = tl.where(whole > 0, whole, 1.0)
    size = tl.where(whole > 0, top + tl.log2(some), NO_KEY)
    inverse = (1.0 / some)[None, :]
    return tl.trans(acc_a * inverse), tl.trans(acc_b * inverse), size


@triton.jit
def attend_keys(
    q_a, q_b, keys, table, block, begin, limit, position, scale,
    NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr, WINDOW: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr, TURNED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Mean values [BLOCK_M, BLOCK_H] in halves over keys begin..limit, log2 of the weights' sum.

    block [BLOCK_N] is of the first keys: the table is read a step ahead, so that no key waits.

    Keys and values come in halves, all in one layout: a thread computes few addresses.

    TURNED: queries are columns.
    """
    if TURNED:
        mean_a, mean_b, size = _attend_columns(
            q_a, q_b, keys, table, block, begin, limit, position, scale,
            NUM_KV_HEADS, HALF, WINDOW, BLOCK_SIZE, BLOCK_M, BLOCK_N, BLOCK_H, PRECISION,
        )  # fmt: skip
    else:
        mean_a, mean_b, size = _attend_rows(
            q_a, q_b, keys, table, block, begin, limit, position, scale,
            NUM_KV_HEADS, HALF, WINDOW, BLOCK_SIZE, BLOCK_M, BLOCK_N, BLOCK_H, PRECISION,
        )  # fmt: skip
    return mean_a, mean_b, size
