"""Attention over a paged cache at the sizes of Gemma 4 E4B and 31B, and over a latent cache.

    python kernels/benchmarks/bench_paged_attention.py [--only E4B] [--context 640] [--rows 1 4] \
        [--sweep]

Bytes are the keys and values that some row sees, the queries and the result; prefill's note gives
its arithmetic speed over the visible pairs. The floor is the larger of bytes and arithmetic. Calls
of a graph follow one another with dependent launch, as they follow other kernels in a model.
--sweep also times other tilings of the plain kernel.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from harness import READ_TB_S, Measured, describe_device, print_table, rotation, time_us
from hydraspec_kernels.attention import DevicePlan, hopper_tiling, paged_attention, tiling
from hydraspec_kernels.attention.paged_kernel import paged_attention_kernel
from hydraspec_kernels.attention.tiling import Tiling
from paged_caches import DTYPE, GEMMA, Requests, group, tiled_by
from torch import Tensor

BATCHES = (1, 8, 32)
DECODE_ROWS = (1, 4)
# Requests, rows of each, keys of each: short prompts, a long one, and a chunk after cached keys.
PREFILL = ((32, 512, 512), (1, 8192, 8192), (1, 2048, 10240))
TFLOP_S = 800.0  # of large products on one H200
Arguments = tuple[Tensor, Tensor, DevicePlan]

SHAPES = GEMMA | {
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
class Case(Requests):
    @property
    def width(self) -> int:
        """Numbers of a query and its result."""
        return self.shape.head_dim + (self.shape.latent_dim or self.shape.head_dim)

    @property
    def nbytes(self) -> float:
        return self.cached_bytes + 2.0 * self.num_rows * self.shape.num_heads * self.width

    @property
    def tflop(self) -> float:
        """Operations of the visible pairs of a row and a key."""
        window = self.shape.window or self.keys
        pairs = sum(min(self.keys - r, window) for r in range(self.rows))
        return 2e-12 * self.requests * pairs * self.shape.num_heads * self.width

    def arguments(self) -> Arguments:
        cache, plan = self.cache_and_plan()
        query = self.randn(self.num_rows, self.shape.num_heads, self.shape.head_dim)
        return query.mul_(self.shape.head_dim**-0.5), cache, plan


def cases(context: int, decode_rows: Sequence[int]) -> Iterator[Case]:
    for name, shape in SHAPES.items():
        for batch, rows in product(BATCHES, decode_rows):
            yield Case(f"{name} decode", shape, batch, rows, context)
        for requests, rows, keys in PREFILL:
            yield Case(f"{name} prefill", shape, requests, rows, keys)


def measured(case: Case, sets: list[Arguments], cut: Tiling | None = None) -> Measured:
    """The kernel that a model runs, or with `cut` the plain kernel."""
    query, _, plan = sets[0]
    if cut is None and hopper_tiling.fits_latent(query, plan):
        heads = case.shape.num_heads
        micros = time_us(paged_attention, sets)
        note = f"splits {hopper_tiling.latent_splits(heads, case.rows, case.requests)}"
    elif cut is None and hopper_tiling.fits_prefill(query, plan):
        micros, note = time_us(paged_attention, sets), "copying warp"
    else:
        cut = cut or tiling.paged_tiling(case.shape, case.rows, case.requests, DTYPE)
        with tiled_by("paged_tiling", cut):
            micros = time_us(paged_attention_kernel, sets)
        note = f"M{cut.block_m} N{cut.block_n} warps {cut.num_warps} stages {cut.num_stages}"
        note += f" splits {cut.splits}"
    if case.rows > tiling.MOST_SPLIT_ROWS:
        note += f", {case.tflop / micros * 1e6:.0f} TFLOP/s"
    seconds = max(case.nbytes * 1e-12 / READ_TB_S, case.tflop / TFLOP_S)
    speed = case.nbytes * 1e-12 / seconds
    return Measured(case.name, case.label, micros, case.nbytes, tb_s=speed, note=note)


def swept(case: Case, sets: list[Arguments]) -> list[Measured]:
    """The five fastest tilings, without those that exceed the shared memory."""
    tried = SWEEP_PREFILL
    if case.rows <= tiling.MOST_SPLIT_ROWS:
        chosen = tiling.paged_tiling(case.shape, case.rows, case.requests, DTYPE).splits
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
    parser.add_argument("--only", default="", help="part of a case's name")
    parser.add_argument("--context", type=int, default=640)
    parser.add_argument("--rows", type=int, nargs="+", default=DECODE_ROWS, help="of decode cases")
    parser.add_argument("--sweep", action="store_true", help="also time other tilings")
    options = parser.parse_args()
    sys.stdout.write(describe_device() + "\n")
    lines = []
    with torch.no_grad():
        for case in cases(options.context, options.rows):
            if options.only not in f"{case.name} {case.requests}x{case.rows}":
                continue
            sets = rotation(case.arguments)
            lines.append(measured(case, sets))
            if options.sweep and not (
                case.rows <= tiling.MOST_SPLIT_ROWS and case.shape.latent_dim
            ):
                lines += swept(case, sets)
    print_table("paged attention", lines)


if __name__ == "__main__":
    main()
