"""The best token of the best clusters, in four launches: the clusters' scores, the k best of them,
the best token of each of these, the best of all.

The k best clusters are not sorted: one program for each row finds the k-th score bit by bit,
counting the scores that reach a bound, and lists the clusters above it and, lowest first, as many
equal ones as are missing to k. Scores stay in float32; the reference rounds them to its dtype,
which makes ties that its sort breaks arbitrarily.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hydraspec_kernels.runtime.launch_kernel import dependent_launch, start_next, wait_for_inputs
from hydraspec_kernels.sampling.sort_keys_kernel import key_of
from hydraspec_kernels.sampling.token_choice.kernel import NO_TOKEN, best_of_rows, first_best

BLOCK_ROWS = 16  # the minimum of tl.dot
BLOCK_CENTROIDS = 16  # 128 programs for 2048 clusters
TILE_BYTES = 1 << 16  # table rows in registers at once, over eight warps
FEW_ROWS = 4  # up to here four programs share a cluster, to occupy more multiprocessors
SOME_ROWS = 16  # and up to here two
LOWEST: tl.constexpr = tl.constexpr(-3.4028234663852886e38)


@triton.jit(do_not_specialize=["num_rows"])
def _cluster_scores(
    scores_ptr,  # [B, C] float32
    d_ptr,  # [B, H]
    centroids_ptr,  # [H, C]
    d_stride,
    stride_h,
    stride_c,
    num_rows,
    H: tl.constexpr,
    C: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    c, h = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_H)
    is_h, is_c, is_row = h < H, c < C, row < num_rows
    w_ptrs = centroids_ptr + h[:, None] * stride_h + c[None, :] * stride_c
    w = tl.load(w_ptrs, mask=is_h[:, None] & is_c[None, :], other=0.0)
    wait_for_inputs(PDL)
    d_ptrs = d_ptr + row[:, None] * d_stride + h[None, :]
    d = tl.load(d_ptrs, mask=is_row[:, None] & is_h[None, :], other=0.0)
    scores = tl.dot(d, w, input_precision="ieee")
    places = scores_ptr + row[:, None] * C + c[None, :]
    tl.store(places, scores, mask=is_row[:, None] & is_c[None, :])


@triton.jit
def _best_of_cluster(
    d, table_ptr, clusters_ptr, banned_ptr, cluster, first, last, h,
    H: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The best score, and its lowest id, among the members first..last of a cluster."""
    best, token = -float("inf"), NO_TOKEN
    for start in range(first, last, TILE):
        member = start + tl.arange(0, TILE)
        is_member = member < last
        ids = tl.load(clusters_ptr + cluster * SIZE + member, mask=is_member, other=0)
        rows = table_ptr + ids[:, None] * H + h[None, :]
        e = tl.load(rows, mask=is_member[:, None] & (h < H)[None, :], other=0.0)
        x = tl.sum(e.to(tl.float32) * d[None, :], 1)
        x = tl.where(x != x, float("inf"), x)  # NaN counts as the largest, as in an argmax
        if banned_ptr is not None:
            is_banned = tl.load(banned_ptr + ids, mask=is_member, other=0) != 0
            x = tl.where(is_banned, LOWEST, x)
        x = tl.where(is_member, x, -float("inf"))
        value, found = first_best(x, tl.where(is_member, ids.to(tl.int32), NO_TOKEN))
        is_better = (value > best) | ((value == best) & (found < token))
        best, token = tl.where(is_better, value, best), tl.where(is_better, found, token)
    return best, token


@triton.jit
def _ordered(scores):
    """Scores as uint32 in the order of float32. NaN counts as the largest, as in an argmax."""
    scores = tl.where(scores != scores, float("inf"), scores)
    return key_of(scores, 0).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit(do_not_specialize=["k"])
def _choose_clusters(
    chosen_ptr,  # [B, k] int32
    scores_ptr,  # [B, C]
    k,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK_C)
    wait_for_inputs(PDL)
    scores = tl.load(scores_ptr + row * C + c, mask=c < C, other=0.0)
    order = tl.where(c < C, _ordered(scores), 0)  # below every number
    kth, bit = tl.zeros([1], tl.uint32), tl.full([1], 0x80000000, tl.uint32)
    for _ in range(32):
        reached = tl.sum((order >= kth + bit).to(tl.int32), 0)
        kth = tl.where(reached >= k, kth + bit, kth)
        bit = bit >> 1
    above, equal = (order > kth).to(tl.int32), (order == kth).to(tl.int32)
    room = k - tl.sum(above, 0)
    is_chosen = (above != 0) | ((equal != 0) & (tl.cumsum(equal, 0) <= room))
    place = tl.cumsum(is_chosen.to(tl.int32), 0) - 1
    tl.store(chosen_ptr + row * k + place, c, mask=is_chosen)


@triton.jit(do_not_specialize=["k"])
def _best_of_chosen(
    best_ptr,  # [B, k * P] float32 best score of each of P parts of each chosen cluster
    ids_ptr,  # [B, k * P] int32
    d_ptr,  # [B, H]
    chosen_ptr,  # [B, k]
    table_ptr,  # [V, H]
    clusters_ptr,  # [C, SIZE]
    banned_ptr,  # [V] or None
    d_stride,
    k,
    H: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,  # members of a cluster in one part
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    rank, part, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    h = tl.arange(0, BLOCK_H)
    wait_for_inputs(PDL)
    cluster = tl.load(chosen_ptr + row * k + rank)
    d = tl.load(d_ptr + row * d_stride + h, mask=h < H, other=0.0).to(tl.float32)
    best, token = _best_of_cluster(
        d, table_ptr, clusters_ptr, banned_ptr, cluster,
        part * PART, tl.minimum(part * PART + PART, SIZE), h, H, SIZE, TILE,
    )  # fmt: skip
    place = (row * k + rank) * PARTS + part
    tl.store(best_ptr + place, best)
    tl.store(ids_ptr + place, token)


def centroid_greedy_kernel(
    d: Tensor, table: Tensor, centroids: Tensor, clusters: Tensor, k: int, banned: Tensor | None
) -> Tensor:
    """See `embedding.centroid_greedy`."""
    (b, width), (num_clusters, size) = d.shape, clusters.shape
    assert d.stride(1) == 1, d.stride()
    assert k <= num_clusters, (k, num_clusters)
    for tensor in (table, clusters):
        assert tensor.is_contiguous(), tensor.stride()
    launch = dependent_launch(d)
    block_h = max(16, triton.next_power_of_2(width))
    scores = torch.empty(b, num_clusters, dtype=torch.float32, device=d.device)
    _cluster_scores[
        (triton.cdiv(num_clusters, BLOCK_CENTROIDS), triton.cdiv(b, BLOCK_ROWS))
    ](
        scores, d, centroids, d.stride(0), centroids.stride(0), centroids.stride(1), b,
        H=width, C=num_clusters, BLOCK_H=block_h, BLOCK_ROWS=BLOCK_ROWS, BLOCK_C=BLOCK_CENTROIDS,
        num_warps=4, **launch,
    )  # fmt: skip
    chosen = torch.empty(b, k, dtype=torch.int32, device=d.device)
    block_c = triton.next_power_of_2(num_clusters)
    _choose_clusters[(b,)](
        chosen, scores, k, C=num_clusters, BLOCK_C=block_c, num_warps=4, **launch
    )
    parts = 4 if b <= FEW_ROWS else 2 if b <= SOME_ROWS else 1
    part = triton.cdiv(size, parts)
    tile = min(triton.next_power_of_2(part), max(1, TILE_BYTES // (block_h * d.element_size())))
    best = torch.empty(b, k * parts, dtype=torch.float32, device=d.device)
    ids = torch.empty(b, k * parts, dtype=torch.int32, device=d.device)
    # With fused multiply-adds, lanes that share a narrow row round its score differently, and not
    # all find it equal to the best one. 16-bit products are exact, fused or not.
    _best_of_chosen[(k, parts, b)](
        best, ids, d, chosen, table, clusters, banned, d.stride(0), k,
        H=width, SIZE=size, BLOCK_H=block_h, PARTS=parts, PART=part, TILE=tile,
        num_warps=8, enable_fp_fusion=d.dtype is not torch.float32, **launch,
    )  # fmt: skip
    return best_of_rows(best, ids)
