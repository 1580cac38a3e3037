"""How the fused kernel's work is cut. Knows nothing of Triton."""

from __future__ import annotations

import torch

from hydraspec_kernels.paged_attention.plan import DevicePlan, GroupShape
from hydraspec_kernels.paged_attention.tiling import Tiling, next_power_of_2

MOST_ROWS = 16  # of a request
# Numbers of a tile of queries at most: its norm and rotation are held in registers at once.
MOST_QUERY_NUMBERS = 32 * 512
MAX_SPLITS = 16
LEAST_SHARE = 128 * 256  # numbers of keys that are worth a split
# Programs that fill the device; a constant, so that sums have the same order on all devices.
FULL_DEVICE = 132


def fits(plan: DevicePlan) -> bool:
    """Whether the fused kernel is the faster one for a plan.

    Of few programs each would have many splits, which one program adds up. Many programs keep the
    memory busy anyhow, and would all do their norms before they read a key.
    """
    shape = plan.shape
    if not supports(shape, plan.max_rows):
        return False
    tiles = -(-queries_of(shape, plan.max_rows) // block_queries(shape, plan.max_rows))
    programs = plan.num_requests * shape.num_kv_heads * tiles
    return programs * MAX_SPLITS >= FULL_DEVICE and programs <= 2 * FULL_DEVICE


def supports(shape: GroupShape, max_rows: int) -> bool:
    """Whether there is a fused kernel: few rows a request, keys and values apart."""
    if shape.latent_dim is not None or max_rows > MOST_ROWS or shape.head_dim % 2:
        return False
    numbers = block_queries(shape, max_rows) * next_power_of_2(shape.head_dim)
    return numbers <= MOST_QUERY_NUMBERS


def queries_of(shape: GroupShape, max_rows: int) -> int:
    """Queries of a request and KV head."""
    return max_rows * shape.num_heads // shape.num_kv_heads


def block_queries(shape: GroupShape, max_rows: int) -> int:
    """Queries of a program."""
    return max(16, min(64, next_power_of_2(queries_of(shape, max_rows))))


def program_queries(shape: GroupShape, max_rows: int, block_m: int) -> int:
    """Queries that are normed and rotated: fewer than block_m where they are few, and repeated
    then. Of wide heads the repeated ones would take too many registers.
    """
    if shape.head_dim > 256:
        return block_m
    return min(block_m, next_power_of_2(queries_of(shape, max_rows)))


def least_share(shape: GroupShape, cut: Tiling) -> int:
    """Keys of a split at least: with few, adding up takes longer than it saves."""
    return max(cut.block_n, LEAST_SHARE // next_power_of_2(shape.head_dim))


def decode_tiling(
    shape: GroupShape, max_rows: int, num_requests: int, dtype: torch.dtype
) -> Tiling:
    """A function of what the host knows; sequence lengths are not among it."""
    width = next_power_of_2(shape.head_dim)
    block_m = block_queries(shape, max_rows)
    queries = queries_of(shape, max_rows)
    if dtype is torch.float32:  # without tensor cores operands are in registers, too
        block_m = 16
        cut = Tiling(16, 16, 8 if width > 256 else 4, 1)
    else:
        cut = Tiling(block_m, 32, 4, 3) if width > 256 else Tiling(block_m, 64, 8, 3)
        if block_m > 32:
            cut = Tiling(block_m, 32, 8, 3)
    programs = num_requests * shape.num_kv_heads * -(-queries // block_m)
    wanted = max(1, min(FULL_DEVICE // programs, MAX_SPLITS))
    splits = 1 << (wanted.bit_length() - 1)
    return Tiling(cut.block_m, cut.block_n, cut.num_warps, cut.num_stages, splits)
