"""Random keys and values for requests that begin with KV that was never computed."""

from __future__ import annotations

import torch
from torch import Tensor

from hydraspec.engine.cache.kv_cache import KVCache

SEED, NUM_ROWS = 0x6B76, 4096


def fill(kv: KVCache) -> None:
    """Write random numbers to every block of a cache but the null blocks (see Request.num_filled),
    once for a cache and its views."""
    for spec in kv.specs:
        if kv.lease.filled.isdisjoint(spec.layers):
            for layer in spec.layers:
                cache = kv.caches[layer]
                assert cache is not None
                write_noise(cache[spec.block_size :])
            kv.lease.filled.update(spec.layers)


def write_noise(rows: Tensor) -> None:
    """Fill cache rows [N, ...] with numbers from -1 to 1: NUM_ROWS random rows again and
    again. Equal seeds give equal numbers."""
    shape = (min(NUM_ROWS, len(rows)), *rows.shape[1:])
    noise = torch.rand(shape, generator=torch.Generator().manual_seed(SEED)) * 2 - 1
    tile = noise.to(rows.device, rows.dtype)
    for part in rows.split(NUM_ROWS):
        part.copy_(tile[: len(part)])
