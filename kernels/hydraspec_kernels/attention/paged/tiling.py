"""How the kernels' work is cut: sizes of tiles, and programs a request. Knows nothing of Triton."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from hydraspec_kernels.attention.paged.plan import GroupShape

# Programs that fill the device: one for each of the 132 multiprocessors of an H100 or H200; with
# two each, adding up the splits costs more than they save. A constant, so that sums have the same
# order on all devices.
FULL_DEVICE = 132
MAX_SPLITS = 16  # reading more partial sums back takes longer than it saves
MOST_SPLIT_ROWS = 16  # of a request; with more of them there are enough programs without splits


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a launch is cut."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    splits: int = 1  # 1 where requests are looked up


def tiling(shape: GroupShape, max_rows: int, num_requests: int, dtype: torch.dtype) -> Tiling:
    """A function of what the host knows; sequence lengths are not among it.

    Sizes are the largest that leave registers for the sums [block_m, width] in float32 and shared
    memory for two tiles of keys and values under way.
    """
    width = next_power_of_2(shape.latent_dim or shape.head_dim)
    queries = max_rows * shape.num_heads // shape.num_kv_heads
    # Without tensor cores operands are in registers, too.
    exact = Tiling(16, 16, 8 if width > 256 else 4, 1)
    if max_rows > MOST_SPLIT_ROWS:
        if dtype is torch.float32:
            return exact
        return Tiling(64, 32, 8, 3) if width > 256 else Tiling(128, 64, 8, 3)
    block_m = max(16, min(64, next_power_of_2(queries)))
    if dtype is torch.float32:
        cut = exact
    else:
        cut = Tiling(block_m, 32, 8, 5 if block_m < 64 or shape.latent_dim else 3)
    programs = num_requests * shape.num_kv_heads * -(-queries // cut.block_m)
    wanted = max(1, min(FULL_DEVICE // programs, MAX_SPLITS))
    return replace(cut, splits=1 << (wanted.bit_length() - 1))
