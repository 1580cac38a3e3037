"""Rows of prompts on Hopper's tensor cores: a part of `paged_attention`, which specifies it. Knows
nothing of Triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from hydraspec_kernels.attention.paged.plan import DevicePlan, GroupShape

LEAST_ROWS = 17  # of the request with the most; fewer share the device by splits of their keys
FULL_DEVICE = 132  # programs, one for each multiprocessor of an H100 or H200
QUERIES = 64  # of a group of warps
HEADS = (64, 128, 256, 512)  # sizes


@dataclass(frozen=True, slots=True)
class Tiling:
    """Sizes in shared memory: queries take 64 KiB of it with wide heads, slots the rest."""

    m: int  # queries
    n: int  # keys a slot
    width: int  # columns a slot
    page: int  # rows of the cache that are copied at once
    slots: int = 5


def tiling(shape: GroupShape) -> Tiling:
    """Half as many queries of wide heads: threads hold the sums."""
    m = QUERIES if shape.head_dim > 256 else 2 * QUERIES
    n = 128 if shape.head_dim <= 128 else 64
    return Tiling(m, n, min(shape.head_dim, 256), min(shape.block_size, n))


def fits(query: Tensor, plan: DevicePlan) -> bool:
    """Whether the kernel takes this."""
    shape = plan.shape
    group = shape.num_heads // shape.num_kv_heads
    return (
        plan.max_rows >= LEAST_ROWS
        and query.dtype in (torch.bfloat16, torch.float16)
        and shape.latent_dim is None
        and shape.head_dim in HEADS
        and group <= QUERIES
        and _is_power_of_2(group)
        and shape.block_size >= 8  # rows, for copies swizzle eight
        and _is_power_of_2(shape.block_size)
        and shape.scale > 0
        and query.data_ptr() % 16 == 0
        and query.stride(0) % 8 == 0
        and _has_warpgroup_products(query.device)
    )


def _is_power_of_2(n: int) -> bool:
    return n & (n - 1) == 0


@cache
def _has_warpgroup_products(device: torch.device) -> bool:
    """Hopper's: later devices have others."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
