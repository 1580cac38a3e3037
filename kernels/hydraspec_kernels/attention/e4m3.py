"""Keys and values in e4m3 (FP8) caches: a number in the cache times its head's scale is a key or a
value. Nothing is rounded in a cache of the rows' own type.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hydraspec_kernels.quantised.reference import E4M3, E4M3_MAX


def round_kv(kv: Tensor, scales: Tensor) -> Tensor:
    """Keys and values kv [T, 2, Hkv, H] as e4m3 numbers: kv / scale, clamped to +-448, to the
    nearest number. scales is [2, Hkv], of keys, then of values, in float32."""
    wide = kv.to(torch.promote_types(kv.dtype, torch.float32))
    return (wide / scales[:, :, None]).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)


def read_kv(numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys and values [..., 2, Hkv, H] in `dtype` of e4m3 numbers; a product with a scale is
    rounded once."""
    wide = numbers.to(torch.promote_types(dtype, torch.float32))
    return (wide * scales[:, :, None]).to(dtype)


def store_rows(cache: Tensor, rows: Tensor, values: Tensor) -> None:
    """Copies values [T, ...] into the given rows [T] of a cache of the same type."""
    if cache.dtype is E4M3:  # torch has no index_copy_ of e4m3
        cache, values = cache.view(torch.uint8), values.view(torch.uint8)
    cache.index_copy_(0, rows, values)


def take_rows(cache: Tensor, rows: Tensor) -> Tensor:
    """Copies of the given rows of a cache, of any shape."""
    if cache.dtype is E4M3:
        return cache.view(torch.uint8)[rows].view(E4M3)
    return cache[rows]
