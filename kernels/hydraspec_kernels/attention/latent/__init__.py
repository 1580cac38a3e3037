"""Decode and verify rows over a latent cache on Hopper's tensor cores: a part of `paged_attention`,
which specifies it. Knows nothing of Triton.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from hydraspec_kernels.attention.paged.plan import DevicePlan

WIDTHS = (576, 512)  # of a key, and of its part that is the value: DeepSeek's
TILE = 64  # queries of a program, and keys of a step
MOST_ROWS = 16  # of a request
FULL_DEVICE = 132  # programs, one for each multiprocessor of an H100 or H200
MAX_SPLITS = 32


def has_warpgroup_products(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def fits(query: Tensor, plan: DevicePlan) -> bool:
    """Whether the kernel takes this."""
    shape = plan.shape
    return (
        (shape.head_dim, shape.latent_dim) == WIDTHS
        and shape.window is None
        and shape.scale > 0
        and plan.max_rows <= MOST_ROWS
        and query.dtype in (torch.bfloat16, torch.float16)
        and has_warpgroup_products(query.device)
    )


def num_splits(heads: int, max_rows: int, num_requests: int) -> int:
    """Programs among which a tile's keys are divided. Sequence lengths are not among what it knows:
    a graph's shape has one order of sums.
    """
    programs = num_requests * -(-max_rows * heads // TILE)
    wanted = max(1, min(FULL_DEVICE // programs, MAX_SPLITS))
    return 1 << (wanted.bit_length() - 1)
