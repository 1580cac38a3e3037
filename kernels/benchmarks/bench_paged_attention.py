"""Attention over a paged cache at the sizes of Gemma 4 E4B and 31B, and over a latent cache.

    python kernels/benchmarks/bench_paged_attention.py [--only E4B] [--context 640] [--sweep]

Bytes are the keys and values that some row sees, the queries and the result; prefill's note gives
its arithmetic speed over the visible pairs. The floor is the larger one of bytes and arithmetic.
Calls of a graph follow one another with dependent launch, as they do behind other kernels in a
model. --sweep times other tilings of the plain kernel, too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product

import torch
from harness import READ_TB_S, Measured, describe_device, print_table, rotation, time_us
from hydraspec_kernels.attention import latent as latent_attention
from hydraspec_kernels.attention import prefill as prefill_attention
from hydraspec_kernels.attention.paged import DevicePlan, GroupShape, paged_attention
from hydraspec_kernels.attention.paged import tiling as cuts
from hydraspec_kernels.attention.paged.kernel import paged_attention_kernel
from hydraspec_kernels.attention.paged.tiling import Tiling
from torch import Tensor

BLOCK_SIZE = 16
BATCHES = (1, 8, 32)
DECODE_ROWS = (1, 4)
# Requests, rows of each, keys of each: short prompts, a long one, and a chunk behind a cache.
PREFILL = ((32, 512, 512), (1, 8192, 8192), (1, 2048, 10240))
TFLOP_S = 800.0  # of large products on one H200
Arguments = tuple[Tensor, Tensor, DevicePlan]
SPARE = 8  # blocks of a table row behind the sequence


def group(heads: int, kv_heads: int, dim: int, window: int | None = None) -> GroupShape:
    return GroupShape(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        block_size=BLOCK_SIZE,
        window=window,
    )


SHAPES = {
    "E4B sliding": group(8, 2, 256, 512),
    "E4B full": group(8, 2, 512),
    "31B sliding": group(32, 16, 256, 1024),
    "31B full": group(32, 4, 512),
    "Llama": group(32, 8, 128),
    "latent": replace(group(128, 1, 576), latent_dim=512, scale=0.05),
    "latent, 16 heads": replace(group(16, 1, 576), latent_dim=512, scale=0.05),
}
SWEEP_DECODE = [
    *(Tiling(16, n, w, s) for n, w, s in product((16, 32, 64), (4, 8), (3, 5))),
    *(Tiling(m, n, w, s) for m, n, w, s in product((32, 64), (16, 32), (4, 8), (3, 5))),
]
SWEEP_SPLITS = (1, 2, 4, 8, 16, 32)
SWEEP_PREFILL = [
    *(Tiling(128, n, 8, s) for n, s in product((32, 64, 128), (1, 2, 3))),
    *(Tiling(64, n, w, s) for n, w, s in product((16, 32, 64), (4, 8), (1, 2, 3))),
]


@dataclass(frozen=True, slots=True)
class Case:
    """Equal requests: how many, rows of each, keys of each."""

    name: str
    shape: GroupShape
    requests: int
    rows: int
    keys: int

    @property
    def pairs(self) -> int:
        """Visible pairs of a request's row and key."""
        window = self.shape.window or self.keys
        return sum(min(self.keys - r, window) for r in range(self.rows))

    @property
    def nbytes(self) -> float:
        shape = self.shape
        keys = min(self.keys, (shape.window or self.keys) + self.rows - 1)
        cached = keys * shape.head_rows * shape.head_dim
        width = shape.head_dim + (shape.latent_dim or shape.head_dim)
        return 2.0 * self.requests * (cached + self.rows * shape.num_heads * width)

    @property
    def tflop(self) -> float:
        width = self.shape.head_dim + (self.shape.latent_dim or self.shape.head_dim)
        return 2e-12 * self.requests * self.pairs * self.shape.num_heads * width

    def arguments(self) -> Arguments:
        """Blocks in random order, as a cache that has been in use hands them out."""
        shape, device = self.shape, "cuda"
        blocks = -(-self.keys // BLOCK_SIZE)
        num_rows = self.requests * self.rows
        page = (1,) if shape.latent_dim else (2, shape.num_kv_heads)
        cache_rows = (self.requests * blocks + 1) * BLOCK_SIZE
        cache = torch.randn(cache_rows, *page, shape.head_dim, dtype=torch.bfloat16, device=device)
        query = torch.randn(
            num_rows, shape.num_heads, shape.head_dim, dtype=torch.bfloat16, device=device
        ).mul_(shape.head_dim**-0.5)
        table = torch.zeros(self.requests, blocks + SPARE, dtype=torch.int64, device=device)
        order = torch.randperm(self.requests * blocks, device=device) + 1
        table[:, :blocks] = order.view(self.requests, blocks)
        starts = torch.arange(self.requests + 1, device=device) * self.rows
        lens = torch.full((self.requests,), self.keys, device=device)
        return (
            query,
            cache,
            DevicePlan(shape, starts, lens, table, num_rows, self.requests, self.rows),
        )


def cases(context: int) -> Iterator[Case]:
    for name, shape in SHAPES.items():
        for batch, rows in product(BATCHES, DECODE_ROWS):
            yield Case(f"{name} decode", shape, batch, rows, context)
        for requests, rows, keys in PREFILL:
            yield Case(f"{name} prefill", shape, requests, rows, keys)


@contextmanager
def cut_as(cut: Tiling) -> Iterator[None]:
    original = cuts.tiling
    cuts.tiling = lambda *_: cut
    try:
        yield
    finally:
        cuts.tiling = original


def measured(case: Case, sets: list[Arguments], cut: Tiling | None = None) -> Measured:
    """As a model calls it, or the plain kernel with a tiling."""
    query, _, plan = sets[0]
    if cut is None and latent_attention.fits(query, plan):
        heads = case.shape.num_heads
        micros = time_us(paged_attention, sets)
        note = f"splits {latent_attention.num_splits(heads, case.rows, case.requests)}"
    elif cut is None and prefill_attention.fits(query, plan):
        micros, note = time_us(paged_attention, sets), "copying warp"
    else:
        cut = cut or cuts.tiling(case.shape, case.rows, case.requests, torch.bfloat16)
        with cut_as(cut):
            micros = time_us(paged_attention_kernel, sets)
        note = f"M{cut.block_m} N{cut.block_n} warps {cut.num_warps} stages {cut.num_stages}"
        note += f" splits {cut.splits}"
    if case.rows > cuts.MOST_SPLIT_ROWS:
        note += f", {case.tflop / micros * 1e6:.0f} TFLOP/s"
    shape = f"{case.requests}x{case.rows}x{case.keys}"
    seconds = max(case.nbytes * 1e-12 / READ_TB_S, case.tflop / TFLOP_S)
    speed = case.nbytes * 1e-12 / seconds
    return Measured(case.name, shape, micros, case.nbytes, tb_s=speed, note=note)


def swept(case: Case, sets: list[Arguments]) -> list[Measured]:
    """The five fastest tilings. What does not fit into shared memory is left out."""
    tried = SWEEP_PREFILL
    if case.rows <= cuts.MOST_SPLIT_ROWS:
        chosen = cuts.tiling(case.shape, case.rows, case.requests, torch.bfloat16).splits
        splits = [s for s in SWEEP_SPLITS if chosen / 4 <= s <= chosen * 4]
        tried = [replace(cut, splits=s) for cut, s in product(SWEEP_DECODE, splits)]
    found = []
    for cut in tried:
        try:
            found.append(measured(case, sets, cut))
        except Exception as error:  # triton's OutOfResources, without importing triton
            sys.stderr.write(f"{case.name} {cut}: {type(error).__name__}\n")
    return sorted(found, key=lambda one: one.micros)[:5]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a part of the case's name")
    parser.add_argument("--context", type=int, default=640)
    parser.add_argument("--sweep", action="store_true", help="also time other tilings")
    options = parser.parse_args()
    sys.stdout.write(describe_device() + "\n")
    lines = []
    with torch.no_grad():
        for case in cases(options.context):
            if options.only not in f"{case.name} {case.requests}x{case.rows}":
                continue
            sets = rotation(case.arguments)
            lines.append(measured(case, sets))
            if options.sweep and not (case.rows <= cuts.MOST_SPLIT_ROWS and case.shape.latent_dim):
                lines += swept(case, sets)
    print_table("paged attention", lines)


if __name__ == "__main__":
    main()
