"""Plans in which requests with few rows are attended apart from those with many, into how many
splits, and that both launches compile for sm_90 on a machine without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_apart import SHARED_BYTES, compiled
from hydraspec_kernels.attention import GroupShape, splits_kernel, tiling
from hydraspec_kernels.attention import paged_kernel as kernel
from hydraspec_kernels.attention.plan import DevicePlan, device_plan

from hydraspec.types import RowSegment


def shape_of(heads: int, kv_heads: int, dim: int, **others: Any) -> GroupShape:
    sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim, "block_size": 16}
    return GroupShape(**(sizes | {"window": None} | others))


E4B, GEMMA_31B = shape_of(8, 2, 512), shape_of(32, 4, 512)


def planned(shape: GroupShape, *rows: int, keys: int = 32768) -> DevicePlan:
    """The plan of requests with so many rows, and a table with room for so many keys."""
    table = torch.zeros(len(rows), keys // shape.block_size, dtype=torch.int64)
    segments = [RowSegment(0, b, 1, n, keys) for b, n in enumerate(rows)]
    starts = torch.tensor([0, *rows]).cumsum(0)
    return device_plan(shape, segments, table, starts[1:], starts)


def splits(plan: DevicePlan, dtype: torch.dtype = torch.bfloat16) -> int:
    return tiling.splits_of_few(plan, dtype)


def test_a_plan_knows_the_fewest_rows() -> None:
    assert planned(E4B, 4, 1, 500).min_rows == 1
    assert planned(E4B, 300, 500).min_rows == 300
    assert planned(E4B, 300, 0).min_rows == 0
    assert device_plan(E4B, (), *[torch.zeros(1, 1)] * 2, torch.zeros(1)).min_rows == 0


def test_few_rows_beside_many_are_attended_apart() -> None:
    most = tiling.FEW_ROWS
    assert splits(planned(E4B, 1, 300)) > 1
    assert splits(planned(E4B, most, most + 1)) > 1
    assert splits(planned(E4B, most + 1, 300)) == 1
    assert splits(planned(E4B, 1, most)) == 1
    assert splits(planned(E4B, 300)) == 1
    assert splits(planned(E4B, 300, 0)) > 1  # a graph's bound: any number of rows


def test_short_caches_windows_and_other_masks_are_not() -> None:
    assert splits(planned(E4B, 1, 300, keys=tiling.LONG_KEYS)) > 1
    assert splits(planned(E4B, 1, 300, keys=tiling.LONG_KEYS - 16)) == 1
    assert splits(planned(replace(E4B, window=512), 1, 300)) == 1
    assert splits(planned(replace(E4B, window=1 << 20), 1, 300)) == 1
    assert splits(planned(replace(E4B, mask="block"), 1, 300)) == 1
    assert splits(planned(replace(E4B, mask="causal_block"), 1, 300)) == 1
    assert splits(planned(shape_of(16, 1, 576, latent_dim=512), 1, 300)) == 1
    ahead = replace(planned(E4B, 1, 300), sees_until=torch.zeros(301))
    assert splits(ahead) > 1


def test_splits_are_as_many_as_the_memory_of_their_sums_allows() -> None:
    """The 16 requests of a graph, of which one may decode, are divided as much as two."""
    counts = (2, 4, 5, 8, 9, 16, 17, 33, 63, 64)
    found = [splits(planned(E4B, 300, *[1] * (n - 1))) for n in counts]
    assert found == [16, 16, 16, 16, 16, 16, 16, 8, 4, 1]
    found = [splits(planned(GEMMA_31B, 300, *[1] * (n - 1))) for n in counts]
    assert found == [16, 16, 16, 8, 8, 4, 4, 1, 1, 1]
    for shape in (E4B, GEMMA_31B):
        for count in counts[:-1]:
            plan = planned(shape, 300, *[1] * (count - 1))
            rows = count * tiling.FEW_ROWS * shape.num_heads
            numbers = rows * tiling.few_rows_tiling(plan, torch.bfloat16).splits * 514
            assert 4 * numbers <= 96 << 20 or splits(plan) == 1


def test_kernels_are_the_same_for_all_numbers_of_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Loading compiles those of two; a later compilation would stop a measured step."""
    for shape in (E4B, GEMMA_31B, shape_of(8, 2, 128), shape_of(16, 2, 64), shape_of(16, 1, 512)):
        kernels = []
        for n in range(2, 20):
            plan = planned(shape, 300, *[1] * (n - 1))
            if splits(plan) > 1:
                kernels.append([job[3:] for job in recorded(shape, plan, monkeypatch)])
        assert len(kernels) > 5
        assert all(each == kernels[0] for each in kernels)


def test_requests_are_looked_up_in_one_way_wherever_some_are_apart() -> None:
    """BLOCK_B is a constant of kernels: loading compiles one kernel, for two requests."""
    one_head = shape_of(1, 1, 128)
    most = max(n for n in range(2, 200) if splits(planned(one_head, 300, *[1] * (n - 1))) > 1)
    assert most < 64


COMPILE = """
import importlib, json, sys
from sm90 import build
from triton.compiler import ASTSource

found = []
for module, name, types, fixed, options in json.loads(sys.argv[1]):
    kernel = getattr(importlib.import_module(f"hydraspec_kernels.attention.{module}"), name)
    # Copies to shared memory in flight need aligned pointers, and take most of it.
    aligned = [each for each in types if types[each][0] == "*" or each == "query_stride"]
    made = build(kernel, types, fixed, aligned, source=ASTSource, **options)
    found.append([made.metadata.shared, made.asm["ptx"].count("st.global")])
print(json.dumps(found))
"""
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int64: "*i64",
    torch.float8_e4m3fn: "*fp8e4nv",
    int: "i32",
    float: "fp32",
}


@dataclass
class Recorded:
    """A kernel that is launched nowhere; its launches as jobs to compile."""

    kernel: Any
    module: str
    jobs: list[list[Any]]

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self._record

    def _record(self, *args: Any, **given: Any) -> None:
        types = {
            name: TYPES[getattr(value, "dtype", type(value))]
            for name, value in zip(self.kernel.arg_names, args, strict=False)
            if value is not None
        }
        options = {name: given.pop(name) for name in ("num_warps", "num_stages") if name in given}
        fixed = given | {"PDL": True}
        self.jobs.append([self.module, self.kernel.__name__, types, fixed, options])


def recorded(
    shape: GroupShape, plan: DevicePlan, monkeypatch: pytest.MonkeyPatch, *, scaled: bool = False
) -> list[list[Any]]:
    """The launches of a call in bfloat16, `scaled` over an e4m3 cache."""
    jobs: list[list[Any]] = []
    query = torch.zeros(301, shape.num_heads, shape.head_dim, dtype=torch.bfloat16)
    cache = query.new_zeros(16, 2, shape.num_kv_heads, shape.head_dim)
    scales = torch.ones(2, shape.num_kv_heads) if scaled else None
    cache = cache.to(torch.float8_e4m3fn) if scaled else cache
    with monkeypatch.context() as patched:
        for module, name in ((kernel, "_attention_kernel"), (splits_kernel, "_combine_kernel")):
            home = module.__name__.rpartition(".")[2]
            patched.setattr(module, name, Recorded(getattr(module, name), home, jobs))
        kernel.paged_attention_kernel(query, cache, plan, scales)
    return jobs


@pytest.mark.parametrize(
    ("shape", "scaled"),
    [
        pytest.param(shape_of(8, 2, 64), False, id="64 wide"),
        pytest.param(shape_of(8, 2, 128), True, id="128 wide", marks=pytest.mark.slow),
        pytest.param(shape_of(8, 4, 256), False, id="256 wide", marks=pytest.mark.slow),
        pytest.param(E4B, False, id="E4B", marks=pytest.mark.slow),
        pytest.param(E4B, True, id="E4B, e4m3", marks=pytest.mark.slow),
        pytest.param(GEMMA_31B, False, id="31B", marks=pytest.mark.slow),
        pytest.param(GEMMA_31B, True, id="31B, e4m3", marks=pytest.mark.slow),
        pytest.param(shape_of(16, 1, 512), False, id="12B", marks=pytest.mark.slow),
    ],
)
def test_both_launches_compile_and_fit(
    shape: GroupShape, scaled: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    jobs = recorded(shape, planned(shape, 1, 300), monkeypatch, scaled=scaled)
    assert [job[3].get("ONLY", job[3].get("FEW_ROWS")) for job in jobs] == ["many", "few", 16]
    for (shared, stores), job in zip(compiled(COMPILE, jobs, tmp_path), jobs, strict=True):
        assert shared <= SHARED_BYTES, job
        assert stores > 0, job
