"""Queries over a poisoned paged cache with the results that every paged kernel must give."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from attention_layers import Queries, Requests, assert_half_close, poisoned_memory, queries
from hydraspec_kernels.attention import TiledPlan, plan_attention
from hydraspec_kernels.attention import paged_kernel as kernel
from hydraspec_kernels.attention.reference import planned_attention_reference
from torch import Tensor

from hydraspec.types import RowSegment

# Outputs are means of values of size 1. Float32 sums of a few hundred terms in another order.
FLOAT32 = 2e-5
FLOAT64 = 1e-12  # two sums in another order
REGIMES = ("split", "looked up")


@dataclass(frozen=True)
class Case(Requests):
    """With latent_dim the cache holds one key a row."""

    latent_dim: int | None = None


@dataclass
class Inputs(Queries):
    expected: Tensor  # [T, Hq * Hv] float64


def build(case: Case, seed: int = 7, given_starts: bool = True) -> Inputs:
    """Queries over a poisoned cache."""
    made = queries(case, case.latent_dim, seed=seed)
    expected = planned_attention_reference(made.query.double(), made.cache.double(), made.plan)
    if not given_starts:
        made.plan = replace(made.plan, query_start_loc=None)
    return Inputs(made.query, made.cache, made.plan, expected)


def run(inputs: Inputs) -> Tensor:
    with poisoned_memory():
        return kernel.paged_attention_kernel(inputs.query, inputs.cache, inputs.plan)


def check(inputs: Inputs) -> None:
    out = run(inputs)
    if out.dtype is torch.float32:
        assert (out.double() - inputs.expected).abs().max() < FLOAT32
    else:
        assert_half_close(out, inputs.expected)


def on_cpu(
    case: Case, dtype: torch.dtype, slack: int = 0, until: Tensor | None = None
) -> tuple[TiledPlan, Inputs]:
    """The CPU's plan of some requests; slack: of max_seq_len above the longest sequence."""
    inputs, segments, row = build(replace(case, dtype=dtype)), [], 0
    for request, (rows, length) in enumerate(zip(case.rows, case.lens, strict=True)):
        segments.append(RowSegment(row, request, 1, rows, length + slack))
        row += rows
    if len(set(case.rows)) == 1:  # one segment of several requests
        segments = [RowSegment(0, 0, len(case.rows), case.rows[0], max(case.lens) + slack)]
    positions = torch.cat(
        [torch.arange(n - r, n) for r, n in zip(case.rows, case.lens, strict=True)]
    )
    plan, device = inputs.plan, (inputs.plan.block_table, inputs.plan.seq_lens, positions)
    made = plan_attention(plan.shape, segments, *device, dtype, sees_until=until)
    assert isinstance(made, TiledPlan)
    return made, inputs
