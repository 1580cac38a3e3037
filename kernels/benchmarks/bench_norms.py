"""Norm, rotary, cache-write, activation and soft-cap kernels at the sizes of Gemma 4 E4B and 31B.

    python kernels/benchmarks/bench_norms.py [--rows 1 4 32 128 8192] [--torch]

Up to 128 rows the arguments stay in the L2, where a layer's preceding kernel has left them; above,
they are rotated out of it. With --torch the same operation as plain operators, for comparison.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from harness import COPY_TB_S, Measured, describe_device, print_table, rotation, time_us
from hydraspec_kernels.activation import gated_activation, soft_cap_
from hydraspec_kernels.activation.reference import gated_activation_reference, soft_cap_reference_
from hydraspec_kernels.attention import Projection, QkvShape, write_qkv
from hydraspec_kernels.attention.reference import write_qkv_reference
from hydraspec_kernels.embedding import embed, ple_inputs
from hydraspec_kernels.embedding.reference import embed_reference, ple_inputs_reference
from hydraspec_kernels.norms import add_norm, rms_norm
from hydraspec_kernels.norms.reference import add_norm_reference, rms_norm_reference
from hydraspec_kernels.rope import mirrored, rope_frequencies, rope_table
from hydraspec_kernels.rope.reference import rope_table_reference
from torch import Tensor

EPS = 1e-6
LOGITS, SOFTCAP = 262144, 30.0
VOCAB = 32768  # enough for gathered rows never to repeat in the L2
DECODE_ROWS = 128
CACHE_ROWS = 16384


class Case(NamedTuple):
    """An operation on one shape."""

    name: str
    shape: str
    kernel: Callable[..., Any]
    reference: Callable[..., Any]
    arguments: Callable[[], tuple[Any, ...]]
    nbytes: float  # read and written


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, dtype=dtype, device="cuda")


def add_norm_case(rows: int, width: int, parts: int) -> Case:
    """parts 0: a bfloat16 block output, as of a library's product."""
    post, following = normal(width), normal(width)

    def run(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda h, x: function(h, x, post_weight=post, next_weight=following, eps=EPS)

    def arguments() -> tuple[Tensor, Tensor]:
        if not parts:
            return normal(rows, width), normal(rows, width)
        return normal(rows, width), normal(parts, rows, width, dtype=torch.float32)

    moved = rows * width * (2 * 3 + (4 * parts or 2))
    name = f"add_norm S={parts}" if parts else "add_norm"
    return Case(name, f"{rows}x{width}", run(add_norm), run(add_norm_reference), arguments, moved)


def qkv_case(rows: int, label: str, shape: QkvShape) -> Case:
    heads = shape.num_heads + shape.num_kv_heads * (1 if shape.k_eq_v else 2)
    size, written = shape.head_dim, shape.num_heads + 2 * shape.num_kv_heads
    cache = normal(CACHE_ROWS, 2, shape.num_kv_heads, size)
    theta = mirrored(rope_frequencies(size, 1e6).to("cuda"))
    cos, sin = rope_table(torch.arange(rows, device="cuda"), theta, torch.bfloat16)
    slots = (torch.randperm(CACHE_ROWS, device="cuda")[:rows]).contiguous()
    moved = 2 * rows * size * (heads + written + 2)
    return Case(
        "write_qkv",
        f"{rows}x{label}",
        lambda qkv: write_qkv(Projection(qkv, cos, sin, slots), cache, shape),
        lambda qkv: write_qkv_reference(Projection(qkv, cos, sin, slots), cache, shape),
        lambda: (normal(rows, heads * size),),
        moved,
    )


def qkv_shapes() -> dict[str, QkvShape]:
    def shape(heads: int, kv_heads: int, size: int, *, k_eq_v: bool = False) -> QkvShape:
        weights = normal(size), normal(size)
        return QkvShape(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=size,
            eps=EPS,
            q_weight=weights[0],
            k_weight=weights[1],
            value_norm=True,
            k_eq_v=k_eq_v,
        )

    return {
        "E4B sliding": shape(8, 2, 256),
        "E4B full": shape(8, 2, 512),
        "31B sliding": shape(32, 16, 256),
        "31B full": shape(32, 4, 512, k_eq_v=True),
    }


def elementwise_cases(rows: int, width: int, inner: int) -> Iterator[Case]:
    weight = normal(width)
    yield Case(
        "rms_norm",
        f"{rows}x{width}",
        lambda x: rms_norm(x, weight, EPS),
        lambda x: rms_norm_reference(x, weight, EPS),
        lambda: (normal(rows, width),),
        4 * rows * width,
    )
    yield Case(
        "gated_activation",
        f"{rows}x{inner}",
        gated_activation,
        lambda gate_up: gated_activation_reference(gate_up, "gelu_tanh"),
        lambda: (normal(rows, 2 * inner),),
        6 * rows * inner,
    )
    table, scale = normal(VOCAB, width), math.sqrt(width)
    yield Case(
        "embed",
        f"{rows}x{width}",
        lambda ids: embed(ids, table, scale),
        lambda ids: embed_reference(ids, table, scale),
        lambda: (torch.randint(VOCAB, (rows,), device="cuda"),),
        4 * rows * width,
    )


def ple_case(rows: int, layers: int, width: int) -> Case:
    table, weight = normal(VOCAB, layers * width), normal(width)
    scales = {"table_scale": 16.0, "projection_scale": 0.0198, "eps": EPS}
    return Case(
        "ple_inputs",
        f"{rows}x{layers}x{width}",
        lambda ids, x: ple_inputs(ids, table, x, weight, **scales),
        lambda ids, x: ple_inputs_reference(ids, table, x, weight, **scales),
        lambda: (torch.randint(VOCAB, (rows,), device="cuda"), normal(rows, layers * width)),
        6 * rows * layers * width,
    )


def soft_cap_case(rows: int) -> Case:
    return Case(
        "soft_cap",
        f"{rows}x{LOGITS}",
        lambda logits: soft_cap_(logits, SOFTCAP),
        lambda logits: soft_cap_reference_(logits, SOFTCAP),
        lambda: (normal(rows, LOGITS),),
        4 * rows * LOGITS,
    )


def table_case(rows: int, size: int) -> Case:
    theta = mirrored(rope_frequencies(size, 1e6).to("cuda"))
    return Case(
        "rope_table",
        f"{rows}x{size}",
        lambda positions: rope_table(positions, theta, torch.bfloat16),
        lambda positions: rope_table_reference(positions, theta, torch.bfloat16),
        lambda: (torch.randint(131072, (rows,), device="cuda"),),
        4 * rows * size,
    )


def cases(rows: int) -> Iterator[Case]:
    for width, inner in ((2560, 10240), (5376, 21504)):
        for parts in (0, 1, 4, 8) if rows <= DECODE_ROWS else (0,):
            yield add_norm_case(rows, width, parts)
        yield from elementwise_cases(rows, width, inner)
    for label, shape in qkv_shapes().items():
        if rows <= CACHE_ROWS:
            yield qkv_case(rows, label, shape)
    yield ple_case(rows, 42, 256)
    yield table_case(rows, 256)
    yield table_case(rows, 512)
    yield soft_cap_case(rows)


def measured(case: Case, rows: int, *, plain: bool) -> Measured:
    arguments = [case.arguments()] if rows <= DECODE_ROWS else rotation(case.arguments)
    micros = time_us(case.kernel, arguments)
    note = f"torch {time_us(case.reference, arguments):.2f} us" if plain else ""
    return Measured(case.name, case.shape, micros, case.nbytes, COPY_TB_S, note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 32, 128, 8192])
    parser.add_argument("--torch", action="store_true", help="plain operators too")
    options = parser.parse_args()
    sys.stdout.write(describe_device() + "\n")
    with torch.no_grad():
        for rows in options.rows:
            lines = [measured(case, rows, plain=options.torch) for case in cases(rows)]
            print_table(f"{rows} rows", lines)


if __name__ == "__main__":
    main()
