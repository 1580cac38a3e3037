"""Routers and experts at the size of Gemma 4 26B-A4B (128 experts, 8 of them a token).

    python kernels/benchmarks/bench_moe.py [--rows 1 2 4 8 16 32 64 128 2048 8192]

The bytes are the weights of the experts in use; the prefill's note gives its arithmetic speed.
"""

from __future__ import annotations

import argparse
import sys
from typing import NamedTuple

import torch
from harness import Measured, describe_device, print_table, time_us
from hydraspec_kernels.moe import moe, route, route_grouped
from hydraspec_kernels.moe.kernel import group_pairs, run_experts, tiles_for
from torch import Tensor

EXPERTS, TOP_K, WIDTH, INNER = 128, 8, 2816, 704
LAYERS = 3  # weight sets in rotation: each is 1.5 GB, of which a row touches a sixteenth


class Layer(NamedTuple):
    """A layer's weights, as views of checkpoints' storage."""

    gate_up: Tensor  # [E, D, 2I]
    down: Tensor  # [E, I, D]


def layer() -> Layer:
    def weights(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda").mul_(shape[2] ** -0.5)

    gate_up, down = weights(EXPERTS, 2 * INNER, WIDTH), weights(EXPERTS, WIDTH, INNER)
    return Layer(gate_up.transpose(1, 2), down.transpose(1, 2))


def measured(rows: int, layers: list[Layer]) -> list[Measured]:
    logits = torch.randn(rows, EXPERTS, dtype=torch.bfloat16, device="cuda")
    scale = torch.ones(EXPERTS, dtype=torch.bfloat16, device="cuda")
    x = torch.randn(rows, WIDTH, dtype=torch.bfloat16, device="cuda")
    routed = [route(torch.randn_like(logits), TOP_K, scale) for _ in layers]
    sets = [(x, *pair, *one) for pair, one in zip(routed, layers, strict=True)]
    used = sum(pair[1].unique().numel() for pair in routed) / len(routed)
    expert_bytes = 2 * 3 * WIDTH * INNER
    chosen = routed[0][1]
    tiles = tiles_for(chosen.numel(), EXPERTS, x.dtype)
    shape = f"{rows}x{WIDTH}x{INNER}"
    out = [
        Measured(
            "route", f"{rows}x{EXPERTS}", time_us(lambda: route(logits, TOP_K, scale), [()]), 0
        )
    ]
    wide, bias = logits.float(), scale.float()
    micros = time_us(lambda: route_grouped(wide, bias, TOP_K, 8, 4), [()])
    out.append(Measured("route_grouped", f"{rows}x{EXPERTS}", micros, 0))
    if rows > 1:
        micros = time_us(lambda: group_pairs(chosen, EXPERTS, tiles.rows), [()])
        out.append(Measured("group_pairs", f"{rows}x{TOP_K}", micros, 0))
    grouping = group_pairs(chosen, EXPERTS, tiles.rows)
    inner = run_experts(x, layers[0].gate_up, grouping, chosen, tiles, "gelu_tanh")
    used_first = chosen.unique().numel()
    for name, source, index in (("gate_up", x, 0), ("down", inner, 1)):
        activation = "none" if index else "gelu_tanh"
        # Different layers, the same experts: rotated out of the L2.
        arguments = [(source, one[index], grouping, chosen, tiles, activation) for one in layers]
        micros = time_us(run_experts, arguments)
        share = used_first * expert_bytes * (2 - index) / 3
        out.append(Measured(name, shape, micros, share))
    micros = time_us(moe, sets)
    tflops = 2 * rows * TOP_K * 3 * WIDTH * INNER / micros * 1e-6
    note = f"{used:.0f} experts used, {tflops:.0f} TFLOP/s"
    return [*out, Measured("moe", shape, micros, used * expert_bytes, note=note)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    rows = [1, 2, 4, 8, 16, 32, 64, 128, 2048, 8192]
    parser.add_argument("--rows", type=int, nargs="+", default=rows)
    options = parser.parse_args()
    sys.stdout.write(describe_device() + "\n")
    with torch.no_grad():
        layers = [layer() for _ in range(LAYERS)]
        lines = [line for rows in options.rows for line in measured(rows, layers)]
    print_table("experts", lines)


if __name__ == "__main__":
    main()
