"""Head norms, rotary positions and the cache write of a layer's projection, in one kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from hydraspec_kernels.attention.qkv_write.reference import QkvShape, write_qkv_reference
from hydraspec_kernels.runtime.launch import runs_kernels

__all__ = ["QkvShape", "write_qkv"]


def write_qkv(
    qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, cache: Tensor | None, shape: QkvShape
) -> Tensor:
    """qkv [T, heads * H] -> rotated queries [T, Hq, H]; keys and values go to the cache.

    cos and sin [T, 1, H] are a table of `rope_table` in qkv's dtype. cache [rows, 2, Hkv, H]
    takes the row of token t at slots[t]; slot -1 (a padding row) writes nothing. cache None: a
    layer that shares KV, whose qkv holds query heads only and whose slots are not read.
    """
    if runs_kernels(qkv) and qkv.dtype is not torch.float64:
        from hydraspec_kernels.attention.qkv_write.kernel import write_qkv_cuda  # Triton

        return write_qkv_cuda(qkv, cos, sin, slots, cache, shape)
    return write_qkv_reference(qkv, cos, sin, slots, cache, shape)
