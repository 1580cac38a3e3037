"""The latent kernel: which plans it takes, that it compiles, and on a device its results.

Gluon has no interpreter: a CPU only compiles the kernel, in a separate process, because in this one
Triton interprets.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from attention_layers import Queries, Requests, assert_half_close, poisoned_memory, queries
from compiled_apart import SHARED_BYTES, compiled
from hydraspec_kernels.attention import hopper_tiling, paged_attention, tiling
from hydraspec_kernels.attention.hopper_tiling import fits_latent as fits
from hydraspec_kernels.attention.hopper_tiling import latent_splits
from hydraspec_kernels.attention.reference import latent_attention_reference
from torch import Tensor

WIDTH, RANK = 576, 512
COMPILE = """
import json, os, subprocess, sys, tempfile
import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from hydraspec_kernels.attention.latent_kernel import LAUNCH, _latent_kernel as kernel

found, names = [], kernel.arg_names
for heads, block_size, one_row, split in json.loads(sys.argv[1]):
    types = dict.fromkeys(("out", "query", "cache"), "*bf16")
    types |= {"partial": "*fp32", "scale": "fp32"}
    types |= dict.fromkeys(("block_table", "seq_lens", "starts"), "*i64")
    fixed = {"GROUP": heads, "WIDTH": 576, "RANK": 512, "BLOCK_SIZE": block_size}
    fixed |= {"ONE_ROW": one_row, "SPLIT": split, "PDL": True}
    aligned = ("out", "query", "cache", "partial", "query_stride")
    source = GluonASTSource(
        fn=kernel,
        signature={n: "constexpr" if n in fixed else types.get(n, "i32") for n in names},
        constexprs={(names.index(name),): value for name, value in fixed.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"launch_pdl": True, **LAUNCH}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = made.asm["ptx"]
    found.append([made.metadata.shared, ptx.count("wgmma.mma_async"), ptx.count("0x10, ")])
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Case(Requests):
    """Defaults of DeepSeek-V3, on a device."""

    block_size: int = 16
    heads: int = 128
    kv_heads: int = 1
    head_dim: int = WIDTH
    scale: float = 0.05
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"


@dataclass
class Inputs(Queries):
    expected: Tensor  # [T, Hq * Hv] float64


def build(case: Case, *, seed: int = 3, given_starts: bool = True) -> Inputs:
    """Queries over a poisoned cache."""
    made = queries(case, case.head_dim - 64, seed=seed)
    expected = latent_attention_reference(made.query.double(), made.cache.double(), made.plan)
    if not given_starts:
        made.plan = replace(made.plan, query_start_loc=None)
    return Inputs(made.query, made.cache, made.plan, expected)


def run(inputs: Inputs) -> Tensor:
    assert fits(inputs.query, inputs.plan)
    with poisoned_memory():
        return paged_attention(inputs.query, inputs.cache, inputs.plan)


@pytest.mark.parametrize(
    "jobs",
    [
        [(128, 16, False, True), (16, 1, True, False)],
        pytest.param([(128, 64, True, True), (16, 1, False, False)], marks=pytest.mark.slow),
    ],
    ids=["two", "two more"],
)
def test_the_kernel_compiles_and_fits(
    jobs: list[tuple[int, int, bool, bool]], tmp_path: Path
) -> None:
    for (shared, products, copies), job in zip(
        compiled(COMPILE, jobs, tmp_path), jobs, strict=True
    ):
        assert shared <= SHARED_BYTES, job
        assert products > 0, job
        assert copies > 0, job  # of 16 bytes a thread


def test_which_plans_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other devices, dtypes, widths, windows and prompts go to the paged kernel."""
    case = Case((4, 4), (9, 17), device="cpu")
    inputs = build(case)
    assert not fits(inputs.query, inputs.plan)
    monkeypatch.setattr(hopper_tiling, "is_hopper", lambda device: True)
    assert fits(inputs.query, inputs.plan)
    assert not fits(inputs.query.float(), inputs.plan)
    wide = replace(inputs.plan, max_rows=tiling.MOST_SPLIT_ROWS + 1)
    assert not fits(inputs.query, wide)
    window = replace(inputs.plan, shape=replace(inputs.plan.shape, window=8))
    assert not fits(inputs.query, window)
    narrow = build(Case((1,), (9,), device="cpu", heads=2, head_dim=192))
    assert not fits(narrow.query, narrow.plan)


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("requests", [1, 2, 7, 33, 67, 200])
def test_splits_fill_the_device_once(requests: int, heads: int) -> None:
    for rows in (1, 2, 4):
        splits = latent_splits(heads, rows, requests)
        programs = requests * -(-rows * heads // hopper_tiling.WGMMA_ROWS) * splits
        assert splits == 1 or programs <= tiling.FULL_DEVICE
        assert splits == hopper_tiling.MAX_LATENT_SPLITS or 2 * programs > tiling.FULL_DEVICE


# ------------------------------------------------------------------------------------- on a device

CASES = {
    "decode": Case((1, 1, 1, 1, 1), (640, 1, 17, 5000, 1500)),
    "decode, one request": Case((1,), (4099,)),
    "verify rows, no splits": Case((4,) * 33, tuple(37 * b + 4 for b in range(33))),
    "rows differ, rows after the last request": Case((8, 1, 3), (1030, 8, 65), tail=5),
    "no splits, rows after the last request": Case((4,) * 33, (129,) * 33, tail=7),
    "padding requests": Case((2, 2, 2), (130, 0, 0), tail=1),
    "padding requests, no splits": Case((4,) * 40, (70,) * 30 + (0,) * 10),
    "16 heads": Case((4, 1, 4), (4, 700, 1000), heads=16),
    "3 heads, part of wider rows": Case((1, 5), (64, 128), heads=3, strided=True),
    "blocks of one": Case((2, 2), (6, 300), block_size=1),
    "blocks of 64": Case((2, 2), (70, 1111), block_size=64),
    "half": Case((4, 1), (70, 1111), dtype=torch.float16),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_matches_the_reference(name: str) -> None:
    inputs = build(CASES[name])
    assert_half_close(run(inputs), inputs.expected)


@pytest.mark.gpu
@pytest.mark.parametrize("requests", [3, 80])
def test_a_row_a_request_needs_no_starts(requests: int) -> None:
    lens = tuple((37 * b) % 500 for b in range(requests))
    inputs = build(Case((1,) * requests, lens), given_starts=False)
    assert_half_close(run(inputs), inputs.expected)


@pytest.mark.gpu
@pytest.mark.parametrize("requests", [3, 40])
def test_a_request_does_not_see_its_neighbours(requests: int) -> None:
    """Bitwise, and every time."""
    case = Case((4,) * requests, (1000, *[33] * (requests - 1)))
    one = build(case)
    two = build(replace(case, lens=(1000, 1400, *[0] * (requests - 2))), seed=8)
    two.query[:4] = one.query[:4]
    j = torch.arange(1000, device="cuda")
    at = [i.plan.block_table[0, j // 16] * 16 + j % 16 for i in (one, two)]
    two.cache[at[1]] = one.cache[at[0]]
    first = run(one)[:4]
    for _ in range(20):
        assert torch.equal(first, run(two)[:4])
