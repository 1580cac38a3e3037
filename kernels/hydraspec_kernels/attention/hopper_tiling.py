"""Which plans the kernels on Hopper's tensor cores take, prefill and latent attention, and the
division of their work, without importing Triton."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hydraspec_kernels.attention.plan import DevicePlan, GroupShape
from hydraspec_kernels.attention.tiling import (
    MOST_SPLIT_ROWS,
    holds_queries,
    next_power_of_2,
    queries_of,
    splits_of_keys,
    splits_that_fill,
)
from hydraspec_kernels.runtime.launch import is_hopper

WGMMA_ROWS = 64  # queries of a group of four warps
PREFILL_HEADS = (64, 128, 256, 512)  # head sizes
LATENT_WIDTHS = (576, 512)  # of a key, and of its leading part that is the value: DeepSeek's
MAX_LATENT_SPLITS = 32


@dataclass(frozen=True, slots=True)
class PrefillTiling:
    """Sizes of the prefill kernel's shared memory: queries take 64 KiB of it with wide heads."""

    m: int  # queries of a program
    n: int  # keys of a slot
    width: int  # columns of a slot
    page: int  # rows of the cache that one copy takes
    slots: int = 5


def prefill_tiling(shape: GroupShape) -> PrefillTiling:
    """The prefill kernel's tiling. A program has half as many queries with wide heads, since
    threads hold the sums.
    """
    m = WGMMA_ROWS if shape.head_dim > 256 else 2 * WGMMA_ROWS
    n = 128 if shape.head_dim <= 128 else 64
    return PrefillTiling(m, n, min(shape.head_dim, 256), min(shape.block_size, n))


def tiles_of_few(shape: GroupShape, max_rows: int) -> int:
    """Tiles of queries of a request in the prefill kernel where all have few rows; 0 with many."""
    if max_rows > MOST_SPLIT_ROWS:
        return 0
    return -(-queries_of(shape, max_rows) // prefill_tiling(shape).m)


def prefill_splits(shape: GroupShape, max_rows: int, num_requests: int, max_keys: int) -> int:
    """Number of splits of a tile's keys in the prefill kernel, for sequences of up to max_keys
    keys; 1 with many rows per request."""
    tiles = tiles_of_few(shape, max_rows)
    if not tiles:
        return 1
    most = splits_of_keys(max_keys, prefill_tiling(shape).n)
    return splits_that_fill(num_requests * shape.num_kv_heads * tiles, most)


def fits_prefill(query: Tensor, plan: DevicePlan) -> bool:
    """Returns whether the prefill kernel supports a plan, which must have many rows per request, or
    more queries of wide heads than the fused kernel holds."""
    shape = plan.shape
    group = shape.num_heads // shape.num_kv_heads
    return (
        (plan.max_rows > MOST_SPLIT_ROWS or not holds_queries(shape, plan.max_rows))
        and plan.query_start_loc is not None
        and plan.sees_until is None
        and query.dtype in (torch.bfloat16, torch.float16)
        and shape.latent_dim is None
        and shape.mask == "causal"
        and shape.head_dim in PREFILL_HEADS
        and group <= WGMMA_ROWS
        and group == next_power_of_2(group)
        and shape.block_size >= 8  # rows: copies swizzle eight at a time
        and shape.block_size == next_power_of_2(shape.block_size)
        and shape.scale > 0
        and query.data_ptr() % 16 == 0
        and query.stride(0) % 8 == 0
        and is_hopper(query.device)
    )


def fits_latent(query: Tensor, plan: DevicePlan) -> bool:
    """Returns whether the latent kernel supports a plan: few rows per request over DeepSeek's
    cache."""
    shape = plan.shape
    return (
        (shape.head_dim, shape.latent_dim) == LATENT_WIDTHS
        and shape.window is None
        and shape.mask == "causal"
        and shape.scale > 0
        and plan.max_rows <= MOST_SPLIT_ROWS
        and query.dtype in (torch.bfloat16, torch.float16)
        and is_hopper(query.device)
    )


def latent_splits(heads: int, max_rows: int, num_requests: int) -> int:
    """Number of programs of the latent kernel that share the keys of a tile."""
    return splits_that_fill(num_requests * -(-max_rows * heads // WGMMA_ROWS), MAX_LATENT_SPLITS)
