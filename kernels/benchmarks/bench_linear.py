"""Linears of few rows at the sizes of Gemma 4 E4B, 31B and the E4B assistant, and the library's.

    python kernels/benchmarks/bench_linear.py [--rows 1 8 32 64 128] [--json out.json]

Weights are rotated out of the L2. The last lines are chains of linears and residual norms in one
graph, of E4B's 42 layers and six of 31B: they show dependent launches, single kernels do not.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import NamedTuple

import torch
from harness import (
    Measured,
    describe_device,
    print_table,
    rotation,
    time_us,
)
from hydraspec_kernels.linear import gated_linear, linear, linear_partials, scaled_gelu_linear
from hydraspec_kernels.norms import add_norm
from torch import Tensor


class Shape(NamedTuple):
    """A weight [K, N] and what is computed with it; N counts gate and up."""

    name: str
    k: int
    n: int
    kind: str = "linear"


E4B = [
    Shape("qkv, sliding", 2560, 3072),
    Shape("qkv, full", 2560, 6144),
    Shape("q, sliding", 2560, 2048),
    Shape("q, full", 2560, 4096),
    Shape("o, sliding", 2048, 2560, "partials"),
    Shape("o, full", 4096, 2560, "partials"),
    Shape("gate and up", 2560, 20480, "gated"),
    Shape("down", 10240, 2560, "partials"),
    Shape("per-layer gate", 2560, 256, "scaled"),
    Shape("per-layer projection", 256, 2560, "partials"),
    Shape("per-layer model projection", 2560, 10752),
    Shape("logits", 2560, 262144, "softcap"),
]
B31 = [
    Shape("31B qkv, sliding", 5376, 16384),
    Shape("31B qkv, full", 5376, 18432),
    Shape("31B o, sliding", 8192, 5376, "partials"),
    Shape("31B o, full", 16384, 5376, "partials"),
    Shape("31B gate and up", 5376, 43008, "gated"),
    Shape("31B down", 21504, 5376, "partials"),
    Shape("31B logits", 5376, 262144, "softcap"),
]
ASSISTANT = [
    Shape("assistant in", 5120, 256),
    Shape("assistant q, sliding", 256, 1024),
    Shape("assistant q, full", 256, 2048),
    Shape("assistant o, sliding", 1024, 256, "partials"),
    Shape("assistant o, full", 2048, 256, "partials"),
    Shape("assistant gate and up", 256, 4096, "gated"),
    Shape("assistant out", 256, 2560),
]


def weight(k: int, n: int) -> Tensor:
    """A [k, n] view of [n, k] storage; products with it keep the scale of x."""
    drawn = torch.empty(n, k, device="cuda", dtype=torch.bfloat16).normal_(0, k**-0.5)
    return drawn.t()


def rows_of(rows: int, size: int) -> Tensor:
    return torch.randn(rows, size, device="cuda", dtype=torch.bfloat16)


def run(kind: str, x: Tensor, w: Tensor, factor: Tensor) -> Tensor:
    if kind == "partials":
        return linear_partials(x, w)
    if kind == "gated":
        return gated_linear(x, w, activation="gelu_tanh")
    if kind == "scaled":
        return scaled_gelu_linear(x, w, factor)
    return linear(x, w, softcap=30.0 if kind == "softcap" else None)


def measure(shape: Shape, rows: int) -> Measured:
    """Our kernel; the note has the library's product alone, without what follows it."""
    columns = shape.n // 2 if shape.kind == "gated" else shape.n
    factor = rows_of(rows, columns if shape.kind == "scaled" else 1)
    sets = rotation(lambda: (rows_of(rows, shape.k), weight(shape.k, shape.n)))
    ours = time_us(lambda x, w: run(shape.kind, x, w, factor), sets)
    library = time_us(torch.mm, sets)
    out = run(shape.kind, *sets[0], factor)
    nbytes = 2 * (shape.k * shape.n + rows * shape.k) + out.numel() * out.element_size()
    note = f"library's product {library:.2f} us"
    return Measured(shape.name, f"{rows} x {shape.k} x {shape.n}", ours, nbytes, note=note)


LAYERS, FULL_EVERY, OWN_CACHE, LAYERS_31B = 42, 6, 24, 6


def chain_of_e4b(rows: int) -> Measured:
    """E4B's layers without attention, with the queries in place of its output."""
    layers = []
    for layer in range(LAYERS):
        full, own = layer % FULL_EVERY == FULL_EVERY - 1, layer < OWN_CACHE
        heads = 4096 if full else 2048
        sizes = [(2560, heads * 3 // 2 if own else heads), (heads, 2560), (2560, 20480)]
        layers.append([weight(*s) for s in [*sizes, (10240, 2560), (2560, 256), (256, 2560)]])
    return chain("layers of E4B, no attention", rows, layers)


def chain_of_31b(rows: int) -> Measured:
    """The same as chain_of_e4b: five sliding layers of 31B and a full one."""
    layers = []
    for layer in range(LAYERS_31B):
        qkv, heads = (18432, 16384) if layer % FULL_EVERY == FULL_EVERY - 1 else (16384, 8192)
        sizes = [(5376, qkv), (heads, 5376), (5376, 43008), (21504, 5376)]
        layers.append([weight(*s) for s in sizes])
    return chain("layers of 31B, no attention", rows, layers)


def chain(name: str, rows: int, layers: list[list[Tensor]]) -> Measured:
    """A graph of qkv, o, gate and up, down, and any per-layer gate and projection."""
    width = layers[0][0].shape[0]
    gain = torch.ones(width, device="cuda", dtype=torch.bfloat16)
    h, y, factor = rows_of(rows, width), rows_of(rows, width), rows_of(rows, 256)

    def step() -> None:
        x = y
        for qkv, o, gate_up, down, *per_layer in layers:
            a = linear(x, qkv)[:, : o.shape[0]]
            x = joined(linear_partials(a, o))
            x = joined(linear_partials(gated_linear(x, gate_up, activation="gelu_tanh"), down))
            if per_layer:
                gate, projection = per_layer
                x = joined(linear_partials(scaled_gelu_linear(x, gate, factor), projection))

    def joined(partials: Tensor) -> Tensor:
        normed = add_norm(h, partials, post_weight=gain, next_weight=gain, eps=1e-6).y
        assert normed is not None
        return normed

    nbytes = sum(2 * w.numel() for layer in layers for w in layer)
    micros = time_us(step, [()], least_calls=1, replays=20)
    note = f"{micros / len(layers):.1f} us per layer"
    return Measured(name, f"{rows} rows", micros, nbytes, note=note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64, 128])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    measured = []
    for rows in options.rows:
        table = [measure(shape, rows) for shape in [*E4B, *B31, *ASSISTANT]]
        torch.cuda.empty_cache()
        table += [chain_of_e4b(rows), chain_of_31b(rows)]
        torch.cuda.empty_cache()
        print_table(f"{rows} rows, {describe_device()}", table)
        measured += table
    if options.json:
        options.json.write_text(json.dumps([row.record() for row in measured], indent=1))


if __name__ == "__main__":
    main()
