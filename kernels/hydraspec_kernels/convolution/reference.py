"""The convolutions of DFlash2's layers by their definition."""

from __future__ import annotations

import torch
from torch import Tensor


def block_convolution_reference(
    x: Tensor, delta: Tensor, base: Tensor, rows_per_block: int
) -> Tensor:
    """See `hydraspec_kernels.convolution.block_convolution`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    groups = delta.shape[2]
    blocks = x.to(wide).view(-1, rows_per_block, groups, x.shape[1] // groups)
    taps = base.to(wide).view(1, -1, groups, blocks.shape[3]) + delta.to(wide).unsqueeze(3)
    taps = taps.unflatten(0, blocks.shape[:2])
    out = taps[:, :, 0] * blocks
    for tap in range(1, min(base.shape[0], rows_per_block)):
        out[:, tap:] += taps[:, tap:, tap] * blocks[:, :-tap]
    return out.reshape(x.shape).to(x.dtype)
