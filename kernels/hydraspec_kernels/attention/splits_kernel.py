"""Adds up the results of splits: programs that each attended a share of a tile's keys.

The paged, the prefill and the latent kernel leave sums, maxima and weights' sums, and
`combine_splits` adds them up. The fused decode kernel leaves mean values and log2 of the weights'
sums; the split that ends last for a tile adds them up (`arrive`), or, where that is much work for
one program, a second kernel does (`add_splits`). How many splits a tile has then depends on its
length.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hydraspec_kernels.attention.plan import DevicePlan
from hydraspec_kernels.attention.tiles_kernel import NO_KEY, find_keys, find_rows
from hydraspec_kernels.attention.tiling import MAX_SPLITS, SHARES_OF_LONG
from hydraspec_kernels.quantised.e4m3_kernel import NEXT_GROUP, rounded_groups
from hydraspec_kernels.runtime.launch_kernel import dependent_launch, start_next, wait_for_inputs

TRITON_TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}
LONG_SHARES = tl.constexpr(SHARES_OF_LONG)
# Splits, and groups of four results, that a program of the second kernel adds up at once.
ADDED_SPLITS = tl.constexpr(4)
ADDED_MANY = tl.constexpr(16)  # of more than 16 splits
ADDED = tl.constexpr(128)
LEAST_SPARSE = 8  # one kernel for up to so many splits, where some have no sums
NUMBERS_OF_WARP = 2048  # that a program of one warp adds up: it ends sooner than one of four


@triton.jit(do_not_specialize=["num_rows", "num_requests", "splits"])
def _combine_kernel(
    out,  # [T, Hq, Hv]
    partial,  # [N, Hq, S, Hv] float32 sums, then maxima and weights' sums [2, N, Hq, S]
    starts,  # [B+1]; not read with ONE_ROW
    num_rows,  # N: T, or B * FEW_ROWS
    num_requests,
    splits,
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ONE_ROW: tl.constexpr,
    FEW_ROWS: tl.constexpr,  # of requests that have sums, the others' are left alone; 0: all have
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPARSE: tl.constexpr,  # splits without keys have no sums
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait_for_inputs(PDL)
    at = tl.program_id(0).to(tl.int64)  # row * Hq + head
    at_out, used = at, num_rows
    if FEW_ROWS > 0:
        request, row = at // NUM_HEADS // FEW_ROWS, at // NUM_HEADS % FEW_ROWS
        start = tl.load(starts + request).to(tl.int64)
        rows = tl.load(starts + request + 1) - start
        if (row >= rows) | (rows > FEW_ROWS):
            return
        at_out = (start + row) * NUM_HEADS + at % NUM_HEADS
    elif not ONE_ROW:  # rows after the last request have no splits
        used = tl.load(starts + num_requests)
    s = tl.arange(0, BLOCK_S)
    split, exists = at * splits + s, s < splits
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    size = num_rows.to(tl.int64) * NUM_HEADS * splits
    top = tl.load(partial + size * VALUE_DIM + split, mask=exists, other=NO_KEY)
    total = tl.load(partial + size * (VALUE_DIM + 1) + split, mask=exists, other=0.0)
    part = split[:, None] * VALUE_DIM + d[None, :]
    if SPARSE:
        exists = total != 0  # NaN stays
    mask = exists[:, None] & (d < VALUE_DIM)[None, :]
    acc = tl.load(partial + part, mask=mask, other=0.0)
    weight = tl.exp2(top - tl.max(top, 0))
    whole = tl.sum(total * weight, 0)
    result = tl.sum(acc * weight[:, None], 0) / tl.where(whole > 0, whole, 1.0)
    result = tl.where(at // NUM_HEADS < used, result, 0.0)
    tl.store(out + at_out * VALUE_DIM + d, result.to(out.dtype.element_ty), mask=d < VALUE_DIM)


def combine_splits(
    out: Tensor,
    partial: Tensor,
    plan: DevicePlan,
    *,
    splits: int,
    block_d: int,
    sparse: bool = False,
    few_rows: int = 0,
) -> None:
    """Computes out [T, Hq * Hv] from sums that the paged, prefill or latent kernel left in
    `partial`, a power of two of them; sparse: splits without keys left none. few_rows: only
    requests with at most so many rows have sums, those of row r of request b at b * few_rows + r;
    other results are left alone. One kernel then adds up any number of splits, which follows from
    the number of requests, so that loading can compile it.

    A program adds up all splits of block_d columns: as many loads as registers hold.
    """
    shape, num_rows = plan.shape, plan.num_requests * few_rows or out.shape[0]
    block_s = MAX_SPLITS if few_rows else max(splits, LEAST_SPARSE) if sparse else splits
    value_dim = shape.latent_dim or shape.head_dim
    _combine_kernel[(num_rows * shape.num_heads, triton.cdiv(value_dim, block_d))](
        out,
        partial,
        plan.starts,
        num_rows,
        plan.num_requests,
        splits,
        NUM_HEADS=shape.num_heads,
        VALUE_DIM=value_dim,
        ONE_ROW=plan.query_start_loc is None,
        FEW_ROWS=few_rows,
        BLOCK_S=block_s,
        BLOCK_D=block_d,
        SPARSE=sparse,
        num_warps=1 if block_s * block_d <= NUMBERS_OF_WARP else 4,
        **dependent_launch(out),
    )


@triton.jit
def split_keys(
    length, rows, tile, split_shift, least_share,
    GROUP: tl.constexpr, WINDOW: tl.constexpr, QUERIES: tl.constexpr, BLOCK_N: tl.constexpr,
    MASK: tl.constexpr,
):  # fmt: skip
    """First key of a tile, the end of its keys, and the number of keys of a split.

    Up to 16 splits have least_share keys or more; a tile has more splits only if each of them has
    SHARES_OF_LONG times as many keys.
    """
    begin, limit = find_keys(length, rows, tile, 0, 1, GROUP, WINDOW, False, QUERIES, BLOCK_N, MASK)
    all_keys = tl.maximum(limit - begin, 0)
    share = (all_keys + (1 << split_shift) - 1) >> split_shift
    share = tl.maximum(share, tl.minimum((all_keys + 15) >> 4, LONG_SHARES * least_share))
    return begin, limit, tl.maximum(share, least_share)


@triton.jit
def arrive(counter, share, all_keys):
    """The number of splits of a tile for the split that ends last, and 0 for the others. The last
    split resets the counter, and can read what all splits stored.
    """
    tl.debug_barrier()  # all threads have stored
    used = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") + 1
    last = used * share >= all_keys
    tl.debug_barrier()
    tl.store(counter, 0, mask=last)
    return tl.where(last, tl.cdiv(all_keys, share), 0)  # bounds a loop, so not read from memory


@triton.jit
def _add_some(
    out, scales, partial, sums, at, start, rows, tile, kv_head, size_of_split, used,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    QUERIES: tl.constexpr, BLOCK_V: tl.constexpr, ROUNDED: tl.constexpr, dtype: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """Merges the partial results of a tile's `used` splits, weighted by their sums of weights, for
    ADDED groups of four outputs from group `at` on. Loads of SPLITS splits are in flight at once.
    ROUNDED: so many of the results, in dtype, share a scale and become e4m3 numbers.
    """
    four = tl.arange(0, 4)
    flat = at + tl.arange(0, ADDED)
    query, d = flat // (BLOCK_V // 4), flat % (BLOCK_V // 4) * 4
    f = tile * QUERIES + query
    row, head = f // GROUP, kv_head * GROUP + f % GROUP
    exists = (query < QUERIES) & (row < rows)  # others are the next tile's
    at_out = (start + row).to(tl.int64) * NUM_HEADS + head
    inside = d[:, None] + four[None, :] < HEAD_DIM
    top = tl.full([ADDED], NO_KEY, tl.float32)
    whole = tl.zeros([ADDED], tl.float32)
    acc = tl.zeros([ADDED, 4], tl.float32)
    for first in range(0, used, SPLITS):
        s = first + tl.arange(0, SPLITS)[:, None]
        at_split = at_out[None, :] + s * size_of_split
        mask = exists[None, :] & (s < used)
        size = tl.load(sums + at_split, mask=mask, other=NO_KEY, cache_modifier=".cg")
        at_part = (at_split * HEAD_DIM + d[None, :])[:, :, None] + four[None, None, :]
        part = tl.load(
            partial + at_part, mask=mask[:, :, None] & inside[None], other=0.0, cache_modifier=".cg"
        )
        new_top = tl.maximum(top, tl.max(size, 0))
        weight = tl.exp2(size - new_top[None, :])
        fade = tl.exp2(top - new_top)
        whole = whole * fade + tl.sum(weight, 0)
        acc = acc * fade[:, None] + tl.sum(part * weight[:, :, None], 0)
        top = new_top
    result = (acc * (1.0 / whole)[:, None]).to(dtype)
    if ROUNDED:
        FOURS: tl.constexpr = ROUNDED // 4
        v = tl.where(exists[:, None], result, 0.0)
        v = tl.reshape(v, (ADDED // FOURS, ROUNDED))
        v, scale = rounded_groups(v, ADDED // FOURS, ROUNDED, ROUNDED)
        result = tl.reshape(v, (ADDED, 4)).to(out.dtype.element_ty)
        # Every scale is stored by the first of its fours.
        at_scale = (head * HEAD_DIM + d) // ROUNDED * NEXT_GROUP + start + row
        first = exists & (d % ROUNDED == 0)
        of_four = tl.broadcast_to(scale, (ADDED // FOURS, FOURS))
        tl.store(scales + at_scale, tl.reshape(of_four, (ADDED,)), mask=first)
    to = out + (at_out * HEAD_DIM + d)[:, None] + four[None, :]
    tl.store(to, result, mask=exists[:, None] & inside)


@triton.jit(do_not_specialize=["num_rows", "num_requests", "split_shift", "least_share"])
def _sum_kernel(
    out,  # [T, Hq, H]
    scales,  # [Hq * H / ROUNDED, NEXT_GROUP] float32, of results in e4m3
    partial,  # [S, T, Hq, H] float32, then log2 of the sums [S, T, Hq]
    seq_lens,  # [B]
    starts,  # [B+1]; not read with ONE_ROW
    num_rows,
    num_requests,
    split_shift,  # log2 of S
    least_share,  # keys of a split
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    MASK: tl.constexpr,
    ONE_ROW: tl.constexpr,
    ROW_TILES: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SPLITS: tl.constexpr,  # added up at once
    ROUNDED: tl.constexpr,  # see `_add_some`
    DTYPE: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    at, kv_head = tl.program_id(0) * ADDED, tl.program_id(2)
    request, tile = tl.program_id(1) // ROW_TILES, tl.program_id(1) % ROW_TILES
    wait_for_inputs(PDL)
    start, rows, length = find_rows(seq_lens, starts, request, num_rows, num_requests, ONE_ROW, "")
    first, limit, share = split_keys(
        length, rows, tile, split_shift, least_share, GROUP, WINDOW, QUERIES, BLOCK_N, MASK
    )
    all_keys = limit - first
    queries = tl.minimum(rows * GROUP - tile * QUERIES, QUERIES)
    if (share >= all_keys) | (at >= queries * (BLOCK_V // 4)):  # one split stored the result
        return
    size_of_split = num_rows.to(tl.int64) * NUM_HEADS
    sums = partial + (size_of_split << split_shift) * HEAD_DIM
    _add_some(
        out, scales, partial, sums, at, start, rows, tile, kv_head, size_of_split,
        tl.cdiv(all_keys, share), NUM_HEADS, GROUP, HEAD_DIM, QUERIES, BLOCK_V, ROUNDED, DTYPE,
        SPLITS,
    )  # fmt: skip


def add_splits(
    out: Tensor,  # [T or more, Hq * H]
    scales: Tensor | None,
    partial: Tensor,
    plan: DevicePlan,
    *,
    num_rows: int,
    dtype: torch.dtype,
    splits: int,
    least_share: int,
    row_tiles: int,
    queries: int,
    block_n: int,
) -> None:
    """Computes results of all tiles with several splits from `partial` of the decode kernel, in
    dtype; with scales [G, MOST_ROWS], e4m3 numbers of them."""
    group = plan.shape
    width = max(32, triton.next_power_of_2(group.head_dim))
    programs = triton.cdiv(queries * width // 4, ADDED.value)
    _sum_kernel[(programs, plan.num_requests * row_tiles, group.num_kv_heads)](
        out,
        scales,
        partial,
        plan.seq_lens,
        plan.starts,
        num_rows,
        plan.num_requests,
        splits.bit_length() - 1,
        least_share,
        NUM_HEADS=group.num_heads,
        NUM_KV_HEADS=group.num_kv_heads,
        HEAD_DIM=group.head_dim,
        WINDOW=group.window or 0,
        MASK=group.mask,
        ONE_ROW=plan.query_start_loc is None,
        ROW_TILES=row_tiles,
        QUERIES=queries,
        BLOCK_N=block_n,
        BLOCK_V=width,
        SPLITS=(ADDED_SPLITS if splits <= MAX_SPLITS else ADDED_MANY).value,
        ROUNDED=0 if scales is None else out.shape[1] // scales.shape[0],
        DTYPE=TRITON_TYPES[dtype],
        num_warps=4,
        **dependent_launch(out),
    )
