"""Equal requests over a paged cache, as the attention benchmarks measure them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from hydraspec_kernels.attention import DevicePlan, GroupShape, tiling
from torch import Tensor

BLOCK_SIZE = 16
SPARE = 8  # unused blocks at the end of a row of the block table
DEVICE = "cuda"
DTYPE = torch.bfloat16


def group(heads: int, kv_heads: int, dim: int, window: int | None = None) -> GroupShape:
    return GroupShape(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        block_size=BLOCK_SIZE,
        window=window,
    )


GEMMA = {
    "E4B sliding": group(8, 2, 256, 512),
    "E4B full": group(8, 2, 512),
    "31B sliding": group(32, 16, 256, 1024),
    "31B full": group(32, 4, 512),
}


@dataclass(frozen=True, slots=True)
class Requests:
    """Equal requests: how many, rows of each, keys of each."""

    name: str
    shape: GroupShape
    requests: int
    rows: int
    keys: int

    @property
    def label(self) -> str:
        return f"{self.requests}x{self.rows}x{self.keys}"

    @property
    def num_rows(self) -> int:
        return self.requests * self.rows

    @property
    def cached_bytes(self) -> float:
        """Bytes of the keys and values that some row sees."""
        shape = self.shape
        keys = min(self.keys, (shape.window or self.keys) + self.rows - 1)
        return 2.0 * self.requests * keys * shape.head_rows * shape.head_dim

    def randn(self, *size: int) -> Tensor:
        return torch.randn(*size, dtype=DTYPE, device=DEVICE)

    def cache_and_plan(self) -> tuple[Tensor, DevicePlan]:
        """Blocks in random order, as in a cache that has been in use."""
        shape, blocks = self.shape, -(-self.keys // BLOCK_SIZE)
        entry = (1,) if shape.latent_dim else (2, shape.num_kv_heads)
        cache_rows = (self.requests * blocks + 1) * BLOCK_SIZE
        cache = self.randn(cache_rows, *entry, shape.head_dim)
        order = torch.randperm(self.requests * blocks, device=DEVICE) + 1
        table = torch.zeros(self.requests, blocks + SPARE, dtype=torch.int64, device=DEVICE)
        table[:, :blocks] = order.view(self.requests, blocks)
        starts = torch.arange(self.requests + 1, device=DEVICE) * self.rows
        lens = torch.full((self.requests,), self.keys, device=DEVICE)
        return cache, DevicePlan(
            *(shape, starts, lens, table, self.num_rows, self.requests, self.rows),
            min_rows=self.rows,
        )


@contextmanager
def tiled_by(function: str, cut: object) -> Iterator[None]:
    """`tiling.<function>` returns `cut`."""
    original = getattr(tiling, function)
    setattr(tiling, function, lambda *_, **__: cut)
    try:
        yield
    finally:
        setattr(tiling, function, original)
