"""How the fused kernel's work is cut. Knows nothing of Triton."""

from __future__ import annotations

import torch

from hydraspec_kernels.paged_attention.plan import DevicePlan, GroupShape
from hydraspec_kernels.paged_attention.tiling import Tiling, next_power_of_2

MOST_ROWS = 16  # of a request
# Numbers of a tile of queries at most: its norm and rotation are held in registers at once.
MOST_QUERY_NUMBERS = 32 * 512
MAX_SPLITS = 16
# Programs that fill the device; a constant, so that sums have the same order on all devices.
FULL_DEVICE = 132


def fits(plan: DevicePlan) -> bool:
    """Whether the fused kernel takes a plan: few rows a request, keys and values apart."""
    shape = plan.shape
    if shape.latent_dim is not None or plan.max_rows > MOST_ROWS or shape.head_dim % 2:
        return False
    rows = block_queries(shape, plan.max_rows)
    return rows * next_power_of_2(shape.head_dim) <= MOST_QUERY_NUMBERS


def block_queries(shape: GroupShape, max_rows: int) -> int:
    """Queries of a program."""
    queries = max_rows * shape.num_heads // shape.num_kv_heads
    return max(16, min(64, next_power_of_2(queries)))


def decode_tiling(
    shape: GroupShape, max_rows: int, num_requests: int, dtype: torch.dtype
) -> Tiling:
    """A function of what the host knows; sequence lengths are not among it."""
    width = next_power_of_2(shape.head_dim)
    block_m = block_queries(shape, max_rows)
    queries = max_rows * shape.num_heads // shape.num_kv_heads
    if dtype is torch.float32:  # without tensor cores operands are in registers, too
        block_m = 16
        cut = Tiling(16, 16, 8 if width > 256 else 4, 1)
    else:
        cut = Tiling(block_m, 32 if width > 256 else 64, 8, 3)
    programs = num_requests * shape.num_kv_heads * -(-queries // block_m)
    wanted = max(1, min(FULL_DEVICE // programs, MAX_SPLITS))
    splits = 1 << (wanted.bit_length() - 1)
    return Tiling(cut.block_m, cut.block_n, cut.num_warps, cut.num_stages, splits)
