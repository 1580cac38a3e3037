"""A layer's attention from its projection on, at the sizes of Gemma 4 E4B and 31B.

    python kernels/benchmarks/bench_decode_attention.py [--only E4B] [--context 640] [--sweep]

Head norms and cache write, then attention, as two kernels, and the fused kernel, also where a model
would not take it. Each alone, and between the linears in front of it and behind it, less those
alone: what a layer pays for it. Bytes are the keys and values that some row sees, the projection
and the result. --sweep times other tilings in the same ways; splits with a + are added up by a
kernel of their own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing import get_context

import torch
from harness import Measured, describe_device, print_table, rotation, time_us
from hydraspec_kernels.attention import decode as decode_attention
from hydraspec_kernels.attention.decode import attend_projection
from hydraspec_kernels.attention.decode import tiling as cuts
from hydraspec_kernels.attention.decode.tiling import DecodeTiling
from hydraspec_kernels.attention.paged import DevicePlan, GroupShape, paged_attention
from hydraspec_kernels.attention.qkv_write import QkvShape, write_qkv
from hydraspec_kernels.linear import linear, linear_partials
from torch import Tensor

BLOCK_SIZE = 16
SPARE = 8  # blocks of a table row behind the sequence
DEVICE = "cuda"
DTYPE = torch.bfloat16
Arguments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, DevicePlan, QkvShape]


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's attention."""

    hidden: int
    heads: int
    kv_heads: int
    dim: int
    window: int | None = None
    k_eq_v: bool = False

    @property
    def group(self) -> GroupShape:
        return GroupShape(
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.dim,
            block_size=BLOCK_SIZE,
            window=self.window,
        )

    @property
    def width(self) -> int:
        return (self.heads + (1 if self.k_eq_v else 2) * self.kv_heads) * self.dim


LAYERS = {
    "E4B sliding": Layer(2560, 8, 2, 256, 512),
    "E4B full": Layer(2560, 8, 2, 512),
    "31B sliding": Layer(5376, 32, 16, 256, 1024),
    "31B full": Layer(5376, 32, 4, 512, k_eq_v=True),
}
BATCHES = ((1, 1), (1, 4), (8, 1), (8, 4), (32, 1), (32, 4))
# Keys of a step in kilobytes (of one KV head), warps, stages.
SWEPT = ((32, 8, 3), (32, 8, 4), (16, 8, 5), (16, 8, 3), (16, 4, 3), (16, 4, 5), (32, 4, 3))
SWEPT_SPLITS = (1, 2)  # times those chosen
# The same of programs whose few queries are columns.
SWEPT_TURNED = ((8, 4, 3), (8, 4, 4), (16, 4, 3), (16, 4, 4), (16, 8, 3))


@dataclass(frozen=True, slots=True)
class Case:
    """Equal requests: how many, rows of each, keys of each."""

    name: str
    requests: int
    rows: int
    keys: int

    @property
    def layer(self) -> Layer:
        return LAYERS[self.name]

    @property
    def nbytes(self) -> float:
        layer = self.layer
        keys = min(self.keys, (layer.window or self.keys) + self.rows - 1)
        rows = self.rows * (layer.width + layer.heads * layer.dim)
        return 2.0 * self.requests * (keys * 2 * layer.kv_heads * layer.dim + rows)

    def arguments(self) -> Arguments:
        """Blocks in random order, as a cache that has been in use hands them out."""
        layer, blocks = self.layer, -(-self.keys // BLOCK_SIZE)
        num_rows = self.requests * self.rows
        size = ((self.requests * blocks + 1) * BLOCK_SIZE, 2, layer.kv_heads, layer.dim)
        cache = torch.randn(*size, dtype=DTYPE, device=DEVICE)
        qkv = torch.randn(num_rows, layer.width, dtype=DTYPE, device=DEVICE)
        angle = torch.randn(num_rows, 1, layer.dim // 2, device=DEVICE)
        cos = angle.cos().repeat(1, 1, 2).to(DTYPE)
        sin = torch.cat((-angle.sin(), angle.sin()), -1).to(DTYPE)
        order = torch.randperm(self.requests * blocks, device=DEVICE) + 1
        table = torch.zeros(self.requests, blocks + SPARE, dtype=torch.int64, device=DEVICE)
        table[:, :blocks] = order.view(self.requests, blocks)
        at = torch.arange(self.keys - self.rows, self.keys, device=DEVICE)
        slots = (table[:, at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE).flatten()
        starts = torch.arange(self.requests + 1, device=DEVICE) * self.rows
        lens = torch.full((self.requests,), self.keys, device=DEVICE)
        plan = DevicePlan(layer.group, starts, lens, table, num_rows, self.requests, self.rows)
        weight = torch.ones(layer.dim, dtype=DTYPE, device=DEVICE) * layer.dim**-0.25
        shape = QkvShape(
            num_heads=layer.heads,
            num_kv_heads=layer.kv_heads,
            head_dim=layer.dim,
            eps=1e-6,
            q_weight=weight,
            k_weight=weight,
            value_norm=True,
            k_eq_v=layer.k_eq_v,
        )
        return qkv, cos, sin, slots, cache, plan, shape


def apart(
    qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, cache: Tensor, plan: DevicePlan,
    shape: QkvShape,
) -> Tensor:  # fmt: skip
    return paged_attention(write_qkv(qkv, cos, sin, slots, cache, shape), cache, plan)


def fused(*arguments: object) -> Tensor:
    with always_fused():
        return attend_projection(*arguments, writes=True)  # type: ignore[arg-type]


@contextmanager
def always_fused() -> Iterator[None]:
    original = decode_attention.fits
    decode_attention.fits = lambda plan: True
    try:
        yield
    finally:
        decode_attention.fits = original


def between_linears(layer: Layer, attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A call that makes its projection itself, and multiplies the result by another weight."""

    def call(x: Tensor, before: Tensor, behind: Tensor, *rest: object) -> Tensor:
        return linear_partials(attend(linear(x, before), *rest), behind)

    return call


def linears(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    layer = case.layer
    x = torch.randn(case.requests * case.rows, layer.hidden, dtype=DTYPE, device=DEVICE)
    before = torch.randn(layer.width, layer.hidden, dtype=DTYPE, device=DEVICE) * 0.02
    behind = torch.randn(layer.hidden, layer.heads * layer.dim, dtype=DTYPE, device=DEVICE)
    return x, before.t(), behind.t()


@contextmanager
def cut_as(cut: DecodeTiling) -> Iterator[None]:
    original = cuts.decode_tiling
    cuts.decode_tiling = lambda *_: cut
    try:
        yield
    finally:
        cuts.decode_tiling = original


def swept(case: Case) -> list[DecodeTiling]:
    group, found = case.layer.group, []
    chosen = cuts.decode_tiling(group, case.rows, case.requests, DTYPE)
    rows = cuts.block_queries(group, case.rows)
    for kilobytes, warps, stages in SWEPT:
        keys = kilobytes * 512 // case.layer.dim
        for times, apart in product(SWEPT_SPLITS, (False, True)):
            splits = min(chosen.splits * times, cuts.MAX_SPLITS)
            found.append(DecodeTiling(rows, keys, warps, stages, splits, adds_apart=apart))
    if cuts.queries_of(group, case.rows) <= cuts.TURNED_QUERIES:
        for kilobytes, warps, stages in SWEPT_TURNED:
            keys = max(16, kilobytes * 512 // case.layer.dim)
            cut = DecodeTiling(cuts.TURNED_QUERIES, keys, warps, stages, turned=True)
            found.append(replace(cut, adds_apart=True, prefetched=32 << 10))
    return list(dict.fromkeys(found))


def compile_one(job: tuple[Case, DecodeTiling]) -> None:
    """Into the cache on disk, beside other processes."""
    case, cut = job
    try:
        with torch.no_grad(), cut_as(cut):
            fused(*replace(case, requests=2).arguments())
    except Exception as error:  # triton's OutOfResources, without importing triton
        sys.stderr.write(f"{case.name} {cut}: {type(error).__name__}\n")


def compile_all(cases: list[Case]) -> None:
    jobs: dict[tuple[object, ...], tuple[Case, DecodeTiling]] = {}
    for case in cases:
        for cut in swept(case):
            key = (case.name, case.rows, replace(cut, splits=0))
            jobs[key] = (case, cut)
    with ProcessPoolExecutor(12, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_one, jobs.values()))


def measure(case: Case, sweep: bool) -> list[Measured]:
    sets = rotation(case.arguments, most=64)
    around = [linears(case) for _ in range(8)]  # many times the L2
    chained = [(*around[i % 8], *rest[1:]) for i, rest in enumerate(sets)]
    attended = torch.randn(len(sets[0][0]), around[0][2].shape[0], dtype=DTYPE, device=DEVICE)
    shape = f"{case.requests}x{case.rows}x{case.keys}"

    def line(name: str, micros: float, note: str = "") -> Measured:
        return Measured(f"{case.name} {name}", shape, micros, case.nbytes, note=note)

    def chain(attend: Callable[..., Tensor]) -> float:
        return time_us(between_linears(case.layer, attend), chained)

    base = chain(lambda *_: attended)
    lines = [line("apart", time_us(apart, sets)), line("apart, chained", chain(apart) - base)]
    chosen = cuts.decode_tiling(case.layer.group, case.rows, case.requests, DTYPE)
    tried = [chosen, *(swept(case) if sweep else [])]
    found = []
    for cut in tried:
        note = f"{'turned ' if cut.turned else ''}N{cut.block_n} warps {cut.num_warps}"
        note += f" stages {cut.num_stages} splits {cut.splits}{'+' if cut.adds_apart else ''}"
        try:
            with cut_as(cut):
                alone, layer = time_us(fused, sets), chain(fused) - base
        except Exception as error:  # triton's OutOfResources, without importing triton
            sys.stderr.write(f"{case.name} {cut}: {type(error).__name__}\n")
            continue
        found.append((line("fused", alone, note), line("fused, chained", layer, note)))
    best = sorted(found[1:], key=lambda pair: pair[1].micros)[:4]
    return lines + [one for pair in (found[:1] + best) for one in pair]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="parts of cases' names, between commas")
    parser.add_argument("--context", type=int, default=640)
    parser.add_argument("--sweep", action="store_true", help="also time other tilings")
    options = parser.parse_args()
    sys.stdout.write(describe_device() + "\n")
    cases = [
        case
        for name in LAYERS
        for batch in BATCHES
        if any(
            part in f"{(case := Case(name, *batch, options.context)).name} {batch[0]}x{batch[1]}"
            for part in options.only.split(",")
        )
    ]
    if options.sweep:
        compile_all(cases)
    with torch.no_grad():
        for case in cases:
            print_table("", measure(case, options.sweep))


if __name__ == "__main__":
    main()
