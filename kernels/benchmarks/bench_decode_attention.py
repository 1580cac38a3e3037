"""A layer's attention from its projection on, at the sizes of Gemma 4 E4B and 31B.

    python kernels/benchmarks/bench_decode_attention.py [--only E4B] [--context 640] [--sweep]

Compares two kernels (head norms and cache write, then attention) with the fused kernel, also at
sizes for which a model runs the two. Each is timed alone, and in a chain with the linears before
and after it, minus the time of those linears: its cost within a layer. Bytes are the keys and
values that some row sees, the projection and the result. --sweep also times other tilings; "+"
marks those whose splits a second kernel adds up.
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
from hydraspec_kernels import attention
from hydraspec_kernels.attention import (
    DevicePlan,
    Projection,
    QkvShape,
    attend_projection,
    paged_attention,
    tiling,
    write_qkv,
)
from hydraspec_kernels.attention.tiling import DecodeTiling
from hydraspec_kernels.linear import linear, linear_partials
from paged_caches import BLOCK_SIZE, DEVICE, DTYPE, GEMMA, Requests, tiled_by
from torch import Tensor

Arguments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, DevicePlan, QkvShape]

HIDDEN = {"E4B sliding": 2560, "E4B full": 2560, "31B sliding": 5376, "31B full": 5376}
BATCHES = ((1, 1), (1, 4), (8, 1), (8, 4), (32, 1), (32, 4))
# Keys of a step in kilobytes (of one KV head), warps, stages.
SWEPT = ((32, 8, 3), (32, 8, 4), (16, 8, 5), (16, 8, 3), (16, 4, 3), (16, 4, 5), (32, 4, 3))
SWEPT_SPLITS = (1, 2)  # times those chosen
# The same for programs whose few queries are columns.
SWEPT_TRANSPOSED = ((8, 4, 3), (8, 4, 4), (16, 4, 3), (16, 4, 4), (16, 8, 3))


@dataclass(frozen=True, slots=True)
class Case(Requests):
    @property
    def heads(self) -> QkvShape:
        weight = torch.ones(self.shape.head_dim, dtype=DTYPE, device=DEVICE)
        weight *= self.shape.head_dim**-0.25
        return QkvShape(
            num_heads=self.shape.num_heads,
            num_kv_heads=self.shape.num_kv_heads,
            head_dim=self.shape.head_dim,
            eps=1e-6,
            q_weight=weight,
            k_weight=weight,
            value_norm=True,
            k_eq_v=self.name == "31B full",
        )

    @property
    def width(self) -> int:
        """Columns of the projection."""
        return self.heads.projected_heads(writes=True) * self.shape.head_dim

    @property
    def out_width(self) -> int:
        return self.shape.num_heads * self.shape.head_dim

    @property
    def nbytes(self) -> float:
        return self.cached_bytes + 2.0 * self.num_rows * (self.width + self.out_width)

    def arguments(self) -> Arguments:
        cache, plan = self.cache_and_plan()
        qkv = self.randn(self.num_rows, self.width)
        angle = torch.randn(self.num_rows, 1, self.shape.head_dim // 2, device=DEVICE)
        cos = angle.cos().repeat(1, 1, 2).to(DTYPE)
        sin = torch.cat((-angle.sin(), angle.sin()), -1).to(DTYPE)
        at = torch.arange(self.keys - self.rows, self.keys, device=DEVICE)
        blocks = plan.block_table[:, at // BLOCK_SIZE]
        slots = (blocks * BLOCK_SIZE + at % BLOCK_SIZE).flatten()
        return qkv, cos, sin, slots, cache, plan, self.heads


def apart(*arguments: object) -> Tensor:
    *projected, cache, plan, shape = arguments
    query = write_qkv(Projection(*projected), cache, shape)  # type: ignore[arg-type]
    return paged_attention(query, cache, plan)  # type: ignore[arg-type]


def fused(*arguments: object) -> Tensor:
    *projected, cache, plan, shape = arguments
    with always_fused():
        return attend_projection(
            Projection(*projected),  # type: ignore[arg-type]
            cache,  # type: ignore[arg-type]
            plan,  # type: ignore[arg-type]
            shape,  # type: ignore[arg-type]
            writes=True,
        )


@contextmanager
def always_fused() -> Iterator[None]:
    original = attention.fits_decode
    attention.fits_decode = lambda plan: True
    try:
        yield
    finally:
        attention.fits_decode = original


def between_linears(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A call that computes its projection, and multiplies the result by another weight."""

    def call(x: Tensor, before: Tensor, after: Tensor, *rest: object) -> Tensor:
        return linear_partials(attend(linear(x, before), *rest), after)

    return call


def linears(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    hidden = HIDDEN[case.name]
    before, after = case.randn(case.width, hidden) * 0.02, case.randn(hidden, case.out_width)
    return case.randn(case.num_rows, hidden), before.t(), after.t()


def chosen_tiling(case: Case) -> DecodeTiling:
    return tiling.decode_tiling(case.shape, case.rows, case.requests, DTYPE, max_keys=case.keys)


def swept(case: Case) -> list[DecodeTiling]:
    shape, found = case.shape, []
    chosen = chosen_tiling(case)
    sizes = {chosen.block_m, tiling.block_queries(shape, case.rows)}
    for (kilobytes, warps, stages), rows in product(SWEPT, sizes):
        keys = kilobytes * 512 // shape.head_dim
        for times, apart in product(SWEPT_SPLITS, (False, True)):
            splits = min(
                chosen.splits * times, tiling.most_splits(shape, chosen, case.rows, case.keys)
            )
            found.append(DecodeTiling(rows, keys, warps, stages, splits, adds_apart=apart))
    if tiling.queries_of(shape, case.rows) <= tiling.TRANSPOSED_QUERIES:
        for kilobytes, warps, stages in SWEPT_TRANSPOSED:
            keys = max(16, kilobytes * 512 // shape.head_dim)
            cut = DecodeTiling(tiling.TRANSPOSED_QUERIES, keys, warps, stages, transposed=True)
            found.append(replace(cut, adds_apart=True, prefetched=32 << 10))
    return list(dict.fromkeys(found))


def compile_one(job: tuple[Case, DecodeTiling]) -> None:
    """Compile into the cache on disk, in one of several processes."""
    case, cut = job
    try:
        with torch.no_grad(), tiled_by("decode_tiling", cut):
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
    attended = case.randn(case.num_rows, case.out_width)

    def line(name: str, micros: float, note: str = "") -> Measured:
        return Measured(f"{case.name} {name}", case.label, micros, case.nbytes, note=note)

    def chain(attend: Callable[..., Tensor]) -> float:
        return time_us(between_linears(attend), chained)

    base = chain(lambda *_: attended)
    lines = [line("apart", time_us(apart, sets)), line("apart, chained", chain(apart) - base)]
    chosen = chosen_tiling(case)
    tried = [chosen, *(swept(case) if sweep else [])]
    found = []
    for cut in tried:
        note = f"{'transposed ' if cut.transposed else ''}N{cut.block_n} warps {cut.num_warps}"
        mark = "+" if cut.splits > 1 and cut.adds_apart else ""
        note += f" stages {cut.num_stages} splits {cut.splits}{mark}"
        try:
            with tiled_by("decode_tiling", cut):
                alone, layer = time_us(fused, sets), chain(fused) - base
        except Exception as error:  # triton's OutOfResources, without importing triton
            sys.stderr.write(f"{case.name} {cut}: {type(error).__name__}\n")
            continue
        found.append((line("fused", alone, note), line("fused, chained", layer, note)))
    best = sorted(found[1:], key=lambda pair: pair[1].micros)[:4]
    return lines + [one for pair in (found[:1] + best) for one in pair]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="parts of cases' names, separated by commas")
    parser.add_argument("--context", type=int, default=640)
    parser.add_argument("--sweep", action="store_true", help="also time other tilings")
    options = parser.parse_args()
    sys.stdout.write(describe_device() + "\n")
    cases = [
        Case(name, shape, requests, rows, options.context)
        for name, shape in GEMMA.items()
        for requests, rows in BATCHES
        if any(part in f"{name} {requests}x{rows}" for part in options.only.split(","))
    ]
    if options.sweep:
        compile_all(cases)
    with torch.no_grad():
        for case in cases:
            print_table("", measure(case, options.sweep))


if __name__ == "__main__":
    main()
