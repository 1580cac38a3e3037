"""Products of few rows with quantised matrices at the sizes of Gemma 4 31B, beside their floor.

    python kernels/benchmarks/bench_quantised.py [--rows 1 8 32 64 128] [--only int4] \
        [--json out.json]
    python kernels/benchmarks/bench_quantised.py --experts [--rows 1 8 32]    # of 26B-A4B

Weights are rotated out of the L2. Rounding the rows is a kernel of its own, timed apart. The bytes
of experts are those that the rows chose.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from harness import Measured, describe_device, nbytes, print_table, rotation, time_us
from hydraspec_kernels.moe import quantised_moe, route
from hydraspec_kernels.moe.kernel import group_pairs
from hydraspec_kernels.moe.plan import Experts, expert_tiles
from hydraspec_kernels.moe.quantised_kernel import PairRows, run_quantised_experts
from hydraspec_kernels.quantised import E4M3, QuantisedMatrix, Rounding
from hydraspec_kernels.quantised.kernel import product
from hydraspec_kernels.quantised.lanes import in_lanes
from hydraspec_kernels.quantised.packed_kernel import packed_product
from hydraspec_kernels.quantised.plan import PackedTiles, SpecializedTiles, tiles_for
from hydraspec_kernels.quantised.round_kernel import round_rows, rounded
from hydraspec_kernels.quantised.specialized_kernel import specialized_product
from torch import Tensor

# Name -> rows and columns of the matrix.
SHAPES = {
    "qkv, sliding": (16384, 5376),
    "o, sliding": (5376, 8192),
    "gate and up": (43008, 5376),
    "down": (5376, 21504),
}
EXPERTS, TOP_K, WIDTH, INNER = 128, 8, 2816, 704  # of Gemma 4 26B-A4B
LAYERS = 3  # of experts, in rotation
PEAK_TB_S = 4.8  # an H200's, which is the floor of experts
BLOCK, GROUP = 128, 32
ROUNDINGS = {
    "fp8 by row": Rounding("token"),
    "fp8 by block": Rounding("group", BLOCK),
    "int4 by group": Rounding("float"),
}


def stored(kind: str, n: int, k: int, lanes: bool = True) -> tuple[Tensor, Tensor]:
    """Random numbers and scales of a matrix [n, k], of int4 in lanes: only their sizes matter."""
    if kind == "int4 by group":
        words = torch.randint(-(2**31), 2**31 - 1, (n, k // 8), dtype=torch.int32, device="cuda")
        scales = torch.full((n, k // GROUP), 0.01, device="cuda").bfloat16().float()
        matrix = QuantisedMatrix(words, scales, 1, GROUP, k, ROUNDINGS[kind])
        matrix = in_lanes(matrix) if lanes else matrix
        return matrix.data, matrix.scales
    numbers = torch.randint(0, 120, (n, k), dtype=torch.uint8, device="cuda").view(E4M3)
    shape = (n, 1) if kind == "fp8 by row" else (-(-n // BLOCK), -(-k // BLOCK))
    return numbers, torch.rand(*shape, device="cuda")


def matrix_of(
    kind: str, k: int, data: Tensor, scales: Tensor, lanes: bool = True
) -> QuantisedMatrix:
    rows = BLOCK if kind == "fp8 by block" else 1
    columns = {"fp8 by row": k, "fp8 by block": BLOCK, "int4 by group": GROUP}[kind]
    lanes = lanes and kind == "int4 by group"
    return QuantisedMatrix(data, scales, rows, columns, k, ROUNDINGS[kind], lanes)


def rows_of(rows: int, k: int) -> Tensor:
    return torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)


def measure(kind: str, name: str, rows: int) -> list[Measured]:
    """The product, after the rounding of its rows where they are rounded."""
    n, k = SHAPES[name]
    x, rounding, label = rows_of(rows, k), ROUNDINGS[kind], f"{kind}, {name}"
    sets = rotation(lambda: stored(kind, n, k))
    partials = name.startswith(("o", "down"))
    tiles = tiles_for(rows, matrix_of(kind, k, *sets[0]), partials=partials)
    assert tiles is not None, "these shapes have kernels"
    found = []
    if rounding.kind != "float":
        micros = time_us(lambda v: rounded(v, rounding, None), [(x,)])
        found.append(Measured(f"{label}: rounding", f"{rows} x {k}", micros, 2 * nbytes([x])))
    if isinstance(tiles, SpecializedTiles):
        in_e4m3 = rounded(x, rounding, None)
        note = f"{tiles.columns} rows, {tiles.stages} stages, {tiles.splits} splits"

        def call(data: Tensor, scales: Tensor) -> Tensor:
            return specialized_product(in_e4m3, matrix_of(kind, k, data, scales), tiles)
    elif isinstance(tiles, PackedTiles):
        note = f"{tiles.groups} x {sum(tiles.rows)} rows, {tiles.stages} stages of {tiles.units}"

        def call(data: Tensor, scales: Tensor) -> Tensor:
            return packed_product(x, matrix_of(kind, k, data, scales), tiles)
    else:
        numbers, row_scales = x, None
        if rounding.kind != "float":
            numbers, row_scales = round_rows(x, rounding, None, torch.float16)
        note = f"{tiles.rows} rows, {tiles.step} columns, {tiles.stages} stages"

        def call(data: Tensor, scales: Tensor) -> Tensor:
            return product(numbers, row_scales, matrix_of(kind, k, data, scales), tiles, x.dtype)

    moved = nbytes(sets[0]) + nbytes([x]) + 2 * rows * n
    shape = f"{rows} x {k} x {n}"
    found.append(Measured(label, shape, time_us(call, sets), moved, note=note))
    return found


def stack_of(kind: str, n: int, k: int) -> QuantisedMatrix:
    """A stack [E, n, k] of random experts."""
    parts = [stored(kind, n, k, lanes=False) for _ in range(EXPERTS)]
    numbers = torch.stack([data.view(torch.uint8) for data, _ in parts]).view(parts[0][0].dtype)
    return matrix_of(kind, k, numbers, torch.stack([scales for _, scales in parts]), False)


def layer_of(kind: str) -> Experts:
    gate, up = stack_of(kind, INNER, WIDTH), stack_of(kind, INNER, WIDTH)
    return gate, up, stack_of(kind, WIDTH, INNER)


def measure_experts(kind: str, rows: int, layers: list[Experts]) -> list[Measured]:
    """Both grouped products, and all of a layer's experts with the rounding, sorting and summing
    of rows."""
    x = rows_of(rows, WIDTH)
    ones = torch.ones(EXPERTS, device="cuda")
    routed = [route(torch.randn(rows, EXPERTS, device="cuda"), TOP_K, ones) for _ in layers]
    used = [chosen.unique().numel() for _, chosen in routed]
    each = [nbytes([m.data, m.scales]) / EXPERTS for m in layers[0]]  # of gate, up and down
    gate, _, down = layers[0]
    chosen = routed[0][1]
    tiles, tiles_down = expert_tiles(rows * TOP_K, gate), expert_tiles(rows * TOP_K, down)
    assert tiles is not None
    assert tiles_down is not None
    grouping = group_pairs(chosen, EXPERTS, tiles.pairs)
    wide, narrow = PairRows.of(x, gate), PairRows.of(rows_of(rows * TOP_K, INNER), down)
    # Different layers, the same experts: rotated out of the L2.
    gated = [(wide, one[0], one[1], grouping, tiles, "gelu_tanh") for one in layers]
    plain = [(narrow, one[2], None, grouping, tiles_down, "none") for one in layers]
    found = []
    for name, sets, size in (
        ("gate and up", gated, each[0] + each[1]),
        ("down", plain, each[2]),
    ):
        micros, size = time_us(run_quantised_experts, sets), size * used[0]
        shape = f"{rows} x {TOP_K} x {WIDTH} x {INNER}"
        found.append(Measured(f"{kind}, experts' {name}", shape, micros, size, PEAK_TB_S))
    sets = [(x, *pair, one, "gelu_tanh") for pair, one in zip(routed, layers, strict=True)]
    mean = sum(used) / len(used)
    note, micros = f"{mean:.0f} experts used", time_us(quantised_moe, sets)
    return [*found, Measured(f"{kind}, experts", shape, micros, sum(each) * mean, PEAK_TB_S, note)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64, 128])
    parser.add_argument("--only", default="", help="part of a format's name")
    parser.add_argument("--experts", action="store_true", help="time those of 26B-A4B instead")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = []
    for kind in (name for name in ROUNDINGS if args.only in name):
        if args.experts:
            layers = [layer_of(kind) for _ in range(LAYERS)]
            found += [line for rows in args.rows for line in measure_experts(kind, rows, layers)]
        else:
            sizes = [(name, rows) for name in SHAPES for rows in args.rows]
            found += [line for name, rows in sizes for line in measure(kind, name, rows)]
    print_table(describe_device(), found)
    if args.json:
        args.json.write_text(json.dumps([line.record() for line in found], indent=1))


if __name__ == "__main__":
    main()
