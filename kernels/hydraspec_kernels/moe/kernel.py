"""Experts as grouped matrix products, with groups that are known on the device only.

A pair is a token with one of its k experts. Pairs are sorted by expert into blocks of BLOCK_M
pairs of one expert; the host launches programs for an upper bound on the number of blocks. A block
streams its expert's weights once, and experts without pairs are never read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from hydraspec_kernels.activation.kernel import gelu_tanh, silu
from hydraspec_kernels.runtime.launch_kernel import dependent_launch, start_next, wait_for_inputs

FILL = 128  # entries that group_pairs_kernel writes at once
MIN_BINS = 128  # bins of the histogram, at least one for each thread
COMBINE_BLOCK = 1024  # columns of a program of combine_kernel


@triton.jit(do_not_specialize=["num_pairs", "max_blocks"])
def group_pairs_kernel(
    # [max_blocks, BLOCK_M] pairs of a block, num_pairs after its last pair
    pairs_ptr,
    # [max_blocks] the block's expert, -1 for a block without pairs
    block_experts_ptr,
    # [num_pairs]
    chosen_ptr,
    num_pairs,
    max_blocks,
    experts,
    BLOCK_M: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    FILL: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sorts (row, expert) pairs by expert into blocks of BLOCK_M; one expert a program."""
    start_next(PDL)
    wait_for_inputs(PDL)
    mine = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.zeros((BINS,), tl.int32)
    for start in range(0, num_pairs, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        expert = tl.load(chosen_ptr + pair, mask=pair < num_pairs, other=experts).to(tl.int32)
        counts += tl.histogram(expert, BINS)
    counts = tl.where(bins < experts, counts, 0)
    blocks = (counts + BLOCK_M - 1) // BLOCK_M
    first = tl.sum(tl.where(bins < mine, blocks, 0))
    own_blocks = tl.sum(tl.where(bins == mine, blocks, 0))
    count = tl.sum(tl.where(bins == mine, counts, 0))
    for start in range(0, own_blocks, FILL):
        block = start + tl.arange(0, FILL)
        tl.store(block_experts_ptr + first + block, mine, mask=block < own_blocks)
    own_pairs = pairs_ptr + first * BLOCK_M
    seen = 0
    for start in range(0, num_pairs, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        expert = tl.load(chosen_ptr + pair, mask=pair < num_pairs, other=experts).to(tl.int32)
        hit = (expert == mine).to(tl.int32)
        tl.store(own_pairs + seen + tl.cumsum(hit, 0) - hit, pair, mask=hit > 0)
        seen += tl.sum(hit)
    rest = count + tl.arange(0, BLOCK_M)
    tl.store(own_pairs + rest, num_pairs, mask=rest < own_blocks * BLOCK_M)
    if mine == experts - 1:
        for start in range(first + own_blocks, max_blocks, FILL):
            block = start + tl.arange(0, FILL)
            tl.store(block_experts_ptr + block, -1, mask=block < max_blocks)


@triton.jit(do_not_specialize=["num_pairs"])
def experts_kernel(
    # [num_pairs, columns]
    out_ptr,
    # [num_pairs // pairs_per_row, depth] in rows of x_stride
    x_ptr,
    # [blocks, BLOCK_M]; unused without GROUPED: then block b is pair b alone
    pairs_ptr,
    # [blocks]
    block_experts_ptr,
    # [experts, depth, columns], or 2 * columns if GATED: gate half first
    weight_ptr,
    num_pairs,
    pairs_per_row,
    depth,
    columns,
    x_stride,
    weight_expert_stride,
    weight_depth_stride,
    weight_column_stride,
    GATED: tl.constexpr,
    USES_SILU: tl.constexpr,
    GROUPED: tl.constexpr,
    EVEN_DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """A block of pairs times one block of columns of their expert's weight, gated where GATED."""
    start_next(PDL)
    wait_for_inputs(PDL)
    block = tl.program_id(1)
    expert = tl.load(block_experts_ptr + block).to(tl.int64)
    if expert < 0:
        return
    m, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    if GROUPED:
        pair = tl.load(pairs_ptr + block * BLOCK_M + m)
    else:
        pair = tl.where(m == 0, block, num_pairs)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    has_pair, has_column = (pair < num_pairs)[:, None], (column < columns)[None, :]
    row = (pair // pairs_per_row).to(tl.int64)
    x_at = x_ptr + row[:, None] * x_stride + k[None, :]
    weight_at = weight_ptr + expert * weight_expert_stride
    weight_at += k[:, None] * weight_depth_stride + column[None, :] * weight_column_stride
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    total_up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, depth, BLOCK_K):
        x_mask, weight_mask = has_pair, has_column
        if not EVEN_DEPTH:
            x_mask = x_mask & (k < depth - start)[None, :]
            weight_mask = weight_mask & (k < depth - start)[:, None]
        x = tl.load(x_at, mask=x_mask, other=0.0)
        weight = tl.load(weight_at, mask=weight_mask, other=0.0)
        total = tl.dot(x, weight, total, input_precision=PRECISION)
        if GATED:
            up_at = weight_at + columns * weight_column_stride
            up = tl.load(up_at, mask=weight_mask, other=0.0)
            total_up = tl.dot(x, up, total_up, input_precision=PRECISION)
        x_at += BLOCK_K
        weight_at += BLOCK_K * weight_depth_stride
    dtype = out_ptr.dtype.element_ty
    if GATED:  # rounded where the separate operators round
        gate, up = total.to(dtype).to(tl.float32), total_up.to(dtype).to(tl.float32)
        activated = silu(gate) if USES_SILU else gelu_tanh(gate)
        total = activated.to(dtype).to(tl.float32) * up
    out_at = out_ptr + pair.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(out_at, total.to(dtype), mask=has_pair & has_column)


@triton.jit
def combine_kernel(
    # [T, width]
    out_ptr,
    # [T, top_k, width]
    parts_ptr,
    # [T, top_k] float32
    weights_ptr,
    width,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The outputs of a row's experts, summed with the router's weights."""
    start_next(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dtype = out_ptr.dtype.element_ty
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(TOP_K):
        weight = tl.load(weights_ptr + row * TOP_K + j).to(dtype).to(tl.float32)
        part_at = parts_ptr + (row * TOP_K + j) * width + column
        total += weight * tl.load(part_at, mask=column < width, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + column, total.to(dtype), mask=column < width)


@dataclass(slots=True, frozen=True)
class Tiles:
    """Block sizes of one `experts_kernel` launch; columns counts gate and up together."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def tiles_for(num_pairs: int, experts: int, dtype: torch.dtype) -> Tiles:
    """Block sizes by the mean number of pairs per expert: up to 16, reading weights dominates."""
    each = num_pairs / experts
    if dtype == torch.float32:  # exact products, without tensor cores
        return Tiles(16, 32, 64, 4, 2) if each <= 16 else Tiles(64, 64, 32, 8, 2)
    if num_pairs <= 32:  # few programs: small ones, to occupy all multiprocessors
        return Tiles(16, 64, 128, 4, 4)
    if each <= 16:
        return Tiles(16, 128, 128, 4, 3)
    # Three stages, so that two programs share an SM.
    return Tiles(64, 128, 64, 4, 3) if each <= 64 else Tiles(128, 128, 64, 8, 3)


@dataclass(slots=True)
class Grouping:
    """Pairs in blocks of one expert each."""

    pairs: Tensor | None  # [blocks, BLOCK_M]; None: block b is pair b alone
    block_experts: Tensor  # [blocks]
    blocks: int  # upper bound
    num_pairs: int


def group_pairs(chosen: Tensor, experts: int, block_rows: int) -> Grouping:
    """The grouping of chosen [T, k]. The experts of one token differ, so T = 1 needs no sorting."""
    num_pairs = chosen.numel()
    if chosen.shape[0] == 1:
        return Grouping(None, chosen, num_pairs, num_pairs)
    blocks = min(num_pairs, experts) + num_pairs // block_rows
    pairs = torch.empty(blocks, block_rows, dtype=torch.int32, device=chosen.device)
    block_experts = torch.empty(blocks, dtype=torch.int32, device=chosen.device)
    group_pairs_kernel[(experts,)](
        pairs,
        block_experts,
        chosen,
        num_pairs,
        blocks,
        experts,
        BLOCK_M=block_rows,
        BINS=max(MIN_BINS, triton.next_power_of_2(experts + 1)),
        CHUNK=256 if num_pairs <= 256 else 1024 if num_pairs <= 1024 else 4096,
        FILL=FILL,
        num_warps=4 if num_pairs <= 1024 else 8,
        **dependent_launch(chosen),
    )
    return Grouping(pairs, block_experts, blocks, num_pairs)


def run_experts(
    x: Tensor, weight: Tensor, grouping: Grouping, chosen: Tensor, tiles: Tiles, activation: str
) -> Tensor:
    """Products [T * k, columns] of x [T, depth] (or [T * k, depth]) and each pair's expert.

    activation is "none" for weight [E, depth, columns], or "silu" or "gelu_tanh" for weight
    [E, depth, 2 * columns].
    """
    _experts, depth, columns = weight.shape
    gated = activation != "none"
    columns, block_n = (columns // 2, tiles.columns // 2) if gated else (columns, tiles.columns)
    num_pairs = chosen.numel()
    assert x.stride(1) == 1
    out = torch.empty(num_pairs, columns, dtype=x.dtype, device=x.device)
    experts_kernel[(triton.cdiv(columns, block_n), grouping.blocks)](
        out,
        x,
        grouping.pairs,
        grouping.block_experts,
        weight,
        num_pairs,
        num_pairs // x.shape[0],
        depth,
        columns,
        x.stride(0),
        *weight.stride(),
        GATED=gated,
        USES_SILU=activation == "silu",
        GROUPED=grouping.pairs is not None,
        EVEN_DEPTH=depth % tiles.depth == 0,
        PRECISION="ieee" if x.dtype == torch.float32 else None,
        BLOCK_M=tiles.rows,
        BLOCK_N=block_n,
        BLOCK_K=tiles.depth,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **dependent_launch(x),
    )
    return out


def combine(parts: Tensor, weights: Tensor) -> Tensor:
    """Sums [T, N] of products [T * k, N] of each row's experts with weights [T, k]."""
    rows, top_k = weights.shape
    width = parts.shape[1]
    out = torch.empty(rows, width, dtype=parts.dtype, device=parts.device)
    combine_kernel[(rows, triton.cdiv(width, COMBINE_BLOCK))](
        out,
        parts,
        weights,
        width,
        TOP_K=top_k,
        BLOCK=COMBINE_BLOCK,
        num_warps=4,
        **dependent_launch(parts),
    )
    return out


def moe_cuda(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: str,
) -> Tensor:
    """See `moe.moe`. Weights may have any strides; storage [E, 2I, D] and [E, D, I] is fast."""
    (rows, width), top_k = x.shape, experts.shape[1]
    assert weights.shape == experts.shape == (rows, top_k)
    assert gate_up.shape == (down.shape[0], width, 2 * down.shape[1])
    assert down.shape[2] == width
    if not rows:
        return torch.empty_like(x)
    experts, weights = experts.contiguous(), weights.contiguous()
    tiles = tiles_for(experts.numel(), gate_up.shape[0], x.dtype)
    grouping = group_pairs(experts, gate_up.shape[0], tiles.rows)
    x = x if x.stride(1) == 1 else x.contiguous()
    inner = run_experts(x, gate_up, grouping, experts, tiles, activation)
    parts = run_experts(inner, down, grouping, experts, tiles, "none")
    return combine(parts, weights)
