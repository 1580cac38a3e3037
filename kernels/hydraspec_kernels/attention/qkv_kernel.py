"""Norm, rotation, and the store to queries or to the cache: a few heads of one row per program.

A head is held as its two halves, which the rotation swaps, so that only the norm's sum crosses
threads. The padding of a half is zero and adds nothing to the sum. `load_heads`, `rotate_heads` and
`write_new` do the same inside the fused decode kernel, with bitwise equal results.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hydraspec_kernels.attention.plan import Projection, QkvShape
from hydraspec_kernels.quantised.e4m3_kernel import e4m3_of
from hydraspec_kernels.quantised.reference import E4M3_MAX
from hydraspec_kernels.rope.kernel import rotate_halves
from hydraspec_kernels.runtime.launch_kernel import dependent_launch, start_next, wait_for_inputs

MOST = tl.constexpr(E4M3_MAX)
TILE = 1024  # numbers of a program: two warps whose threads have 16 bytes of each half


@triton.jit
def as_cached(x, scale):
    """Keys or values x as the cache holds them: e4m3 numbers of x / scale; scale None: x."""
    if scale is None:
        return x
    else:
        return e4m3_of(x.to(tl.float32), scale, MOST, False, True).to(tl.float8e4nv)


@triton.jit
def inverse_norm(a, b, eps, HALF: tl.constexpr):
    """Inverse root mean square [N, 1] of heads with halves a and b [N, ...].

    The sum is in float64, so that its order, which depends on the layout, does not show.
    """
    squares = tl.sum((a * a + b * b).to(tl.float64), axis=1, keep_dims=True).to(tl.float32)
    return tl.rsqrt(squares / (2 * HALF) + eps)


@triton.jit
def _column_indices(N: tl.constexpr, BLOCK: tl.constexpr):
    """Column indices [N, BLOCK]: broadcasting [1, BLOCK] would move data between threads."""
    return tl.zeros((N, BLOCK), tl.int32) + tl.arange(0, BLOCK)[None, :]


@triton.jit
def norm_weights(weight, HAS: tl.constexpr, N: tl.constexpr, HALF: tl.constexpr, B: tl.constexpr):
    """Both halves [N, B] of a head norm's weight; ones without a weight."""
    first, second = tl.full((N, B), 1.0, tl.float32), tl.full((N, B), 1.0, tl.float32)
    if HAS:
        i = _column_indices(N, B)
        first = tl.load(weight + i, mask=i < HALF, other=0.0).to(tl.float32)
        second = tl.load(weight + HALF + i, mask=i < HALF, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def load_heads(
    qkv, cos, sin, at, row, exists, N: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr
):
    """Halves of the heads at `at` [N], cosines, and sines of the second half. Sines of the first
    half are the negatives.
    """
    i = _column_indices(N, BLOCK)
    mask = exists[:, None] & (i < HALF)
    at_head, at_table = at[:, None] + i, row.to(tl.int64)[:, None] * (2 * HALF) + i
    a = tl.load(qkv + at_head, mask=mask, other=0.0)
    b = tl.load(qkv + at_head + HALF, mask=mask, other=0.0)
    c = tl.load(cos + at_table, mask=mask, other=0.0)
    s = tl.load(sin + at_table + HALF, mask=mask, other=0.0)
    return a, b, c, s


@triton.jit
def rotate_heads(a, b, c, s, weight_a, weight_b, eps, NORM: tl.constexpr, HALF: tl.constexpr):
    """Rotated halves of loaded heads, and the inverse norm; rounded as in `write_qkv`."""
    dtype = a.dtype
    a, b = a.to(tl.float32), b.to(tl.float32)
    inverse = inverse_norm(a, b, eps, HALF)
    if NORM:
        a = (a * inverse * weight_a).to(dtype).to(tl.float32)
        b = (b * inverse * weight_b).to(dtype).to(tl.float32)
    c, s = c.to(tl.float32), s.to(tl.float32)
    rotated_a, rotated_b = rotate_halves(a, b, c, c, -s, s, dtype)
    return rotated_a, rotated_b, inverse


@triton.jit
def write_new(
    cache, qkv, cos, sin, cache_rows, kv_scales, weight_a, weight_b, eps, qkv_stride, kv_head,
    start, rows, length, begin, limit,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr,
    K_NORM: tl.constexpr, VALUE_NORM: tl.constexpr, K_EQ_V: tl.constexpr,
    BLOCK_NEW: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Writes a request's new keys and values of one KV head at positions begin..limit."""
    r = tl.arange(0, 2 * BLOCK_NEW)  # a row's key, then its value
    position = length - rows + r // 2
    is_value = r % 2
    mine = (r // 2 < rows) & (position >= begin) & (position < limit)
    row = start + r // 2
    cache_row = tl.load(cache_rows + row, mask=mine, other=-1).to(tl.int64)
    head = NUM_HEADS + kv_head + (0 if K_EQ_V else is_value * NUM_KV_HEADS)
    at = row.to(tl.int64) * qkv_stride + head * (2 * HALF)
    a, b, c, s = load_heads(qkv, cos, sin, at, row, mine, 2 * BLOCK_NEW, HALF, BLOCK_H)
    rotated_a, rotated_b, inverse = rotate_heads(a, b, c, s, weight_a, weight_b, eps, K_NORM, HALF)
    if VALUE_NORM:
        a = (a.to(tl.float32) * inverse).to(a.dtype)
        b = (b.to(tl.float32) * inverse).to(b.dtype)
    i = _column_indices(2 * BLOCK_NEW, BLOCK_H)
    kept = (mine & (cache_row >= 0))[:, None] & (i < HALF)
    to = cache + (((cache_row * 2 + is_value) * NUM_KV_HEADS + kv_head) * (2 * HALF))[:, None] + i
    scale = None
    if kv_scales is not None:
        scale = tl.load(kv_scales + is_value * NUM_KV_HEADS + kv_head)[:, None]
    first = as_cached(tl.where(is_value[:, None] != 0, a, rotated_a), scale)
    second = as_cached(tl.where(is_value[:, None] != 0, b, rotated_b), scale)
    tl.store(to, first, mask=kept)
    tl.store(to + HALF, second, mask=kept)


@triton.jit
def write_qkv_kernel(
    # [T, num_heads, 2 * HALF]
    q_ptr,
    # [rows, 2, num_kv_heads, 2 * HALF]
    cache_ptr,
    # [T, heads * 2 * HALF] in rows of qkv_stride
    qkv_ptr,
    # [T, 2 * HALF]
    cos_ptr,
    # [T, 2 * HALF]
    sin_ptr,
    # [T]
    cache_rows_ptr,
    # [2, num_kv_heads] float32, of an e4m3 cache
    kv_scales_ptr,
    # [2 * HALF]
    q_weight_ptr,
    # [2 * HALF]
    k_weight_ptr,
    num_heads,
    num_kv_heads,
    heads,
    qkv_stride,
    eps,
    HAS_Q_NORM: tl.constexpr,
    HAS_K_NORM: tl.constexpr,
    HAS_CACHE: tl.constexpr,
    VALUE_NORM: tl.constexpr,
    K_EQ_V: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    """Writes normed and rotated queries to q, and keys and values to their cache rows."""
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    # Full tiles even of what all heads share: broadcasting it later would move it between threads.
    i = tl.zeros((HEADS, PADDED_HALF), tl.int32) + tl.arange(0, PADDED_HALF)[None, :]
    within = i < HALF
    is_query, is_value = head < num_heads, head >= num_heads + num_kv_heads
    is_key = (head >= num_heads) & (head < num_heads + num_kv_heads)
    weight_a = tl.full((HEADS, PADDED_HALF), 1.0, tl.float32)
    weight_b = tl.full((HEADS, PADDED_HALF), 1.0, tl.float32)
    if HAS_Q_NORM:
        q_a = tl.load(q_weight_ptr + i, mask=within, other=0.0).to(tl.float32)
        q_b = tl.load(q_weight_ptr + HALF + i, mask=within, other=0.0).to(tl.float32)
        weight_a = tl.where(is_query, q_a, weight_a)
        weight_b = tl.where(is_query, q_b, weight_b)
    if HAS_K_NORM:
        k_a = tl.load(k_weight_ptr + i, mask=within, other=0.0).to(tl.float32)
        k_b = tl.load(k_weight_ptr + HALF + i, mask=within, other=0.0).to(tl.float32)
        weight_a = tl.where(is_key, k_a, weight_a)
        weight_b = tl.where(is_key, k_b, weight_b)
    wait_for_inputs(PDL)
    dtype = q_ptr.dtype.element_ty
    inside = within & (head < heads)
    at = row * qkv_stride + head * (2 * HALF) + i
    a = tl.load(qkv_ptr + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(qkv_ptr + at + HALF, mask=inside, other=0.0).to(tl.float32)
    table = row * (2 * HALF) + i
    cos_a = tl.load(cos_ptr + table, mask=within, other=0.0).to(tl.float32)
    cos_b = tl.load(cos_ptr + table + HALF, mask=within, other=0.0).to(tl.float32)
    sin_a = tl.load(sin_ptr + table, mask=within, other=0.0).to(tl.float32)
    sin_b = tl.load(sin_ptr + table + HALF, mask=within, other=0.0).to(tl.float32)
    if HAS_CACHE:
        cache_row = tl.load(cache_rows_ptr + row).to(tl.int64)
    tl.debug_barrier()  # else ptxas moves loads after the sum, which exposes their latency
    inverse = inverse_norm(a, b, eps, HALF)
    normed = (is_query & HAS_Q_NORM) | (is_key & HAS_K_NORM)
    head_a = tl.where(normed, (a * inverse * weight_a).to(dtype).to(tl.float32), a)
    head_b = tl.where(normed, (b * inverse * weight_b).to(dtype).to(tl.float32), b)
    rotated_a, rotated_b = rotate_halves(head_a, head_b, cos_a, cos_b, sin_a, sin_b, dtype)
    q_at = q_ptr + (row * num_heads + head) * (2 * HALF) + i
    tl.store(q_at, rotated_a, mask=within & is_query)
    tl.store(q_at + HALF, rotated_b, mask=within & is_query)
    if HAS_CACHE:
        if VALUE_NORM:
            a, b = a * inverse, b * inverse
        value_a, value_b = a.to(dtype), b.to(dtype)
        kept = cache_row >= 0
        # A cache row is keys, then values: the order of the heads that follow the queries.
        kv_at = cache_ptr + (cache_row * 2 * num_kv_heads + head - num_heads) * (2 * HALF) + i
        scale, value_scale = None, None
        if kv_scales_ptr is not None:
            is_cached = (head >= num_heads) & (head < heads)
            scale_at = kv_scales_ptr + head - num_heads
            scale = tl.load(scale_at, mask=is_cached, other=1.0)
            if K_EQ_V:
                value_scale = tl.load(scale_at + num_kv_heads, mask=is_cached, other=1.0)
        if K_EQ_V:
            own = within & is_key & kept
            tl.store(kv_at, as_cached(rotated_a, scale), mask=own)
            tl.store(kv_at + HALF, as_cached(rotated_b, scale), mask=own)
            kv_at += num_kv_heads * (2 * HALF)
            tl.store(kv_at, as_cached(value_a, value_scale), mask=own)
            tl.store(kv_at + HALF, as_cached(value_b, value_scale), mask=own)
        else:
            cached = inside & (head >= num_heads) & kept
            first = as_cached(tl.where(is_value, value_a, rotated_a), scale)
            second = as_cached(tl.where(is_value, value_b, rotated_b), scale)
            tl.store(kv_at, first, mask=cached)
            tl.store(kv_at + HALF, second, mask=cached)


def write_qkv_cuda(projection: Projection, cache: Tensor | None, shape: QkvShape) -> Tensor:
    """See `attention.write_qkv`."""
    projection.check(shape, cache, writes=cache is not None)
    qkv = projection.qkv
    rows, n, kv, size = qkv.shape[0], shape.num_heads, shape.num_kv_heads, shape.head_dim
    heads = shape.projected_heads(writes=cache is not None)
    q = torch.empty(rows, n, size, dtype=qkv.dtype, device=qkv.device)
    if not rows:
        return q
    half = triton.next_power_of_2(size // 2)
    tile = max(1, TILE // (2 * half))
    write_qkv_kernel[(rows, triton.cdiv(heads, tile))](
        q,
        cache,
        qkv,
        projection.cos,
        projection.sin,
        projection.cache_rows if cache is None else projection.cache_rows.contiguous(),
        None if cache is None else shape.kv_scales,
        shape.q_weight,
        shape.k_weight,
        n,
        kv if cache is not None else 0,
        heads,
        qkv.stride(0),
        shape.eps,
        HAS_Q_NORM=shape.q_weight is not None,
        HAS_K_NORM=shape.k_weight is not None,
        HAS_CACHE=cache is not None,
        VALUE_NORM=shape.value_norm,
        K_EQ_V=shape.k_eq_v,
        HEADS=tile,
        HALF=size // 2,
        PADDED_HALF=half,
        num_warps=2,
        **dependent_launch(qkv),
    )
    return q
