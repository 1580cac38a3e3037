"""Attention whose keys are divided among programs: each one's share, and the sum of their results.

A split leaves mean values in float32 [T, Hq, H] and log2 of its weights' sum [T, Hq]. Either the
split that comes last to a tile of queries adds up, or, where that is much work for one program, a
kernel of its own does.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hydraspec_kernels.attention.paged.kernel import NO_KEY, find_keys, find_rows
from hydraspec_kernels.attention.paged.plan import DevicePlan
from hydraspec_kernels.runtime.launch_kernel import dependent_launch, start_next, wait_for_inputs

# Splits, and fours of results, that a program adds up at once: one that has attended, and one of
# the kernel behind.
ADDED_SPLITS = tl.constexpr(4)
ADDED = tl.constexpr(512)
ADDED_APART = tl.constexpr(128)


@triton.jit
def split_keys(
    length, rows, tile, split_shift, least_share,
    GROUP: tl.constexpr, WINDOW: tl.constexpr, QUERIES: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """First key of a tile, behind its last, and keys of a split."""
    begin, limit = find_keys(length, rows, tile, 0, 1, GROUP, WINDOW, False, QUERIES, BLOCK_N)
    share = (tl.maximum(limit - begin, 0) + (1 << split_shift) - 1) >> split_shift
    return begin, limit, tl.maximum(share, least_share)


@triton.jit
def arrive(counter, share, all_keys):
    """How many splits a tile has, for the one that comes last, which sets the counter back; 0 for
    the others. The last one can read what all of them stored.
    """
    tl.debug_barrier()  # all threads have stored
    used = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") + 1
    last = used * share >= all_keys
    tl.debug_barrier()
    tl.store(counter, 0, mask=last)
    return tl.where(last, tl.cdiv(all_keys, share), 0)  # a loop's bound: not what a counter held


@triton.jit
def _add_some(
    out, partial, sums, at, start, rows, tile, kv_head, size_of_split, used,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    QUERIES: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """CHUNK fours of a tile's results, from the `at`-th on: loads of a few splits are all under way
    at once.
    """
    four = tl.arange(0, 4)
    flat = at + tl.arange(0, CHUNK)
    f, d = tile * QUERIES + flat // (BLOCK_V // 4), flat % (BLOCK_V // 4) * 4
    row, head = f // GROUP, kv_head * GROUP + f % GROUP
    at_out = (start + row).to(tl.int64) * NUM_HEADS + head
    inside = d[:, None] + four[None, :] < HEAD_DIM
    top = tl.full([CHUNK], NO_KEY, tl.float32)
    whole = tl.zeros([CHUNK], tl.float32)
    acc = tl.zeros([CHUNK, 4], tl.float32)
    for first in range(0, used, ADDED_SPLITS):
        s = first + tl.arange(0, ADDED_SPLITS)[:, None]
        at_split = at_out[None, :] + s * size_of_split
        mask = (row < rows)[None, :] & (s < used)
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
    result = (acc * (1.0 / whole)[:, None]).to(out.dtype.element_ty)
    to = out + (at_out * HEAD_DIM + d)[:, None] + four[None, :]
    tl.store(to, result, mask=(row < rows)[:, None] & inside)


@triton.jit
def add_up(
    out, partial, sums, start, rows, tile, kv_head, size_of_split, used,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    QUERIES: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The results of a tile from what its first `used` splits left."""
    queries = tl.minimum(rows * GROUP - tile * QUERIES, QUERIES)
    for at in range(0, queries * (BLOCK_V // 4), ADDED):
        _add_some(
            out, partial, sums, at, start, rows, tile, kv_head, size_of_split, used,
            NUM_HEADS, GROUP, HEAD_DIM, QUERIES, BLOCK_V, ADDED,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "num_requests", "split_shift", "least_share"])
def _sum_kernel(
    out,  # [T, Hq, H]
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
    ONE_ROW: tl.constexpr,
    ROW_TILES: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    at, kv_head = tl.program_id(0) * ADDED_APART, tl.program_id(2)
    request, tile = tl.program_id(1) // ROW_TILES, tl.program_id(1) % ROW_TILES
    wait_for_inputs(PDL)
    start, rows, length = find_rows(seq_lens, starts, request, num_rows, num_requests, ONE_ROW, "")
    first, limit, share = split_keys(
        length, rows, tile, split_shift, least_share, GROUP, WINDOW, QUERIES, BLOCK_N
    )
    all_keys = limit - first
    queries = tl.minimum(rows * GROUP - tile * QUERIES, QUERIES)
    if (share >= all_keys) | (at >= queries * (BLOCK_V // 4)):  # one split stored the result
        return
    size_of_split = num_rows.to(tl.int64) * NUM_HEADS
    sums = partial + (size_of_split << split_shift) * HEAD_DIM
    _add_some(
        out, partial, sums, at, start, rows, tile, kv_head, size_of_split,
        tl.cdiv(all_keys, share), NUM_HEADS, GROUP, HEAD_DIM, QUERIES, BLOCK_V, ADDED_APART,
    )  # fmt: skip


def add_splits(
    out: Tensor,  # [T, Hq * H]
    partial: Tensor,
    plan: DevicePlan,
    *,
    splits: int,
    least_share: int,
    row_tiles: int,
    queries: int,
    block_n: int,
) -> None:
    """Results of all tiles of queries that have more than one split."""
    group, num_rows = plan.shape, out.shape[0]
    width = max(32, triton.next_power_of_2(group.head_dim))
    programs = triton.cdiv(queries * width // 4, ADDED_APART.value)
    _sum_kernel[(programs, plan.num_requests * row_tiles, group.num_kv_heads)](
        out,
        partial,
        plan.seq_lens,
        plan.seq_lens if plan.query_start_loc is None else plan.query_start_loc,
        num_rows,
        plan.num_requests,
        splits.bit_length() - 1,
        least_share,
        NUM_HEADS=group.num_heads,
        NUM_KV_HEADS=group.num_kv_heads,
        HEAD_DIM=group.head_dim,
        WINDOW=group.window or 0,
        ONE_ROW=plan.query_start_loc is None,
        ROW_TILES=row_tiles,
        QUERIES=queries,
        BLOCK_N=block_n,
        BLOCK_V=width,
        num_warps=4,
        **dependent_launch(out),
    )
