"""The warp-specialised products with FP8 matrices compile for sm_90 on a machine without a GPU.

Gluon has no interpreter, so a CPU can only compile them, in a separate process:
in this one Triton interprets.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from compiled_apart import SHARED_BYTES, compiled
from hydraspec_kernels.quantised import E4M3, QuantisedMatrix, Rounding, plan

# Rows, N, K, whether matrix and rows have scales for each step, whether partial sums are wanted.
SHAPES = (
    (1, 43008, 5376, True, False),
    (1, 16384, 5376, True, False),
    (1, 7400, 5376, False, False),  # 25 steps in flight, the most shared memory
    (8, 22184, 2048, False, False),
    (32, 5376, 8192, True, True),
    (64, 43008, 5376, True, False),
    (64, 16384, 5376, True, False),
    (128, 16384, 5376, True, False),
    (128, 5376, 21504, False, True),
)
COMPILE = """
import json, sys
from sm90 import build, weights
from triton.experimental.gluon import language as gl
from hydraspec_kernels.quantised.plan import LEAST_SCALES, MOST_LEFT_ROWS
from hydraspec_kernels.quantised.specialized_kernel import _specialized_kernel as kernel

found = []
for m, columns, stages, registers, by_step, partials in json.loads(sys.argv[1]):
    layout = gl.NVMMASharedLayout.get_default_for([m, 128], gl.float8e4nv)
    types, fixed = weights("weight_", columns, f"fp8e4nv[{{}}, 128],{layout!r}")
    types |= {"out": "*fp32" if partials else "*bf16", "x_scales": "*fp32", "scales": "*fp32"}
    if by_step:
        of_step = [1, max(m, LEAST_SCALES)]
        line = gl.NVMMASharedLayout.get_default_for(of_step, gl.float32)
        types["x_scales"] = f"tensordesc<fp32{of_step},{line!r}>"
    types |= dict.fromkeys(("M", "N", "K", "stride_scales"), "i32")
    types["x"] = f"tensordesc<fp8e4nv[{m}, 128],{layout!r}>"
    fixed |= {"BM": m, "BK": 128, "STAGES": stages, "LEFT": m <= MOST_LEFT_ROWS, "PDL": True}
    fixed |= {"SHARED": 128 if by_step else 1, "BLOCKS": by_step, "GROUPS": by_step}
    made = build(kernel, types, fixed, ("out", "N", "K"), num_warps=4, maxnreg=registers)
    found.append([made.metadata.shared, made.asm["ptx"].count("k32.f32.e4m3.e4m3")])
print(json.dumps(found))
"""


def _matrix(n: int, k: int, *, by_step: bool) -> QuantisedMatrix:
    size = 128 if by_step else 1
    scales = torch.empty(-(-n // size), k // 128 if by_step else 1)
    rounding = Rounding("group", 128) if by_step else Rounding("token")
    data = torch.empty(n, k, dtype=E4M3)
    return QuantisedMatrix(data, scales, size, 128 if by_step else k, k, rounding)


def test_planned_kernels_compile_and_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "is_hopper", lambda device: True)
    jobs = []
    for rows, n, k, by_step, partials in SHAPES:
        tiles = plan.tiles_for(rows, _matrix(n, k, by_step=by_step), partials=partials)
        assert isinstance(tiles, plan.SpecializedTiles), (rows, n, k, tiles)
        assert tiles.m >= rows
        sizes = tiles.m, tiles.columns, tiles.stages, tiles.registers
        jobs.append([*sizes, by_step, partials])
    for (shared, products), job in zip(compiled(COMPILE, jobs, tmp_path), jobs, strict=True):
        assert shared <= SHARED_BYTES, job
        assert products > 0, job


def test_ranges_of_k_do_not_depend_on_the_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a decode step and a verify step add alike."""
    monkeypatch.setattr(plan, "is_hopper", lambda device: True)
    for n, k in ((5376, 8192), (5376, 21504), (2560, 10240), (64, 256)):
        matrix = _matrix(n, k, by_step=True)
        splits = {plan.tiles_for(rows, matrix, partials=True).splits for rows in range(1, 129)}
        assert len(splits) == 1, (n, k, splits)


def test_other_scales_run_the_plain_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "is_hopper", lambda device: True)
    whole = _matrix(256, 256, by_step=True)
    for change in (
        {"rounding": Rounding("float")},
        {"rounding": Rounding("group", 32)},
        {"columns": 64},
        {"rows": 64},
        {"data": torch.empty(256, 257, dtype=E4M3)[:, :256]},
    ):
        assert not plan.is_specialized(QuantisedMatrix(**{**_fields(whole), **change})), change
    assert plan.is_specialized(whole)


def _fields(matrix: QuantisedMatrix) -> dict[str, object]:
    return {name: getattr(matrix, name) for name in QuantisedMatrix.__dataclass_fields__}
