"""The warp-specialised linears compile for sm_90 on a machine without a GPU.

Gluon has no interpreter, so a CPU can only compile them, in a separate process:
in this one Triton interprets.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from compiled_apart import SHARED_BYTES, compiled
from hydraspec_kernels.linear.plan import SpecializedTiling, tiling_of

# Rows, K, N (both branches of a gated one), end, whether partial sums are wanted.
SHAPES = [
    *[(128, 5376, 43008, "gelu_tanh", False), (128, 21504, 5376, "", True)],
    (64, 25600, 5120, "", False),
]
MORE_SHAPES = [(64, 2560, 20480, "silu", False), (128, 2560, 262144, "softcap", False)]
COMPILE = """
import json, sys
from sm90 import build, weights
from triton.experimental.gluon import language as gl
from hydraspec_kernels.linear.specialized_kernel import _specialized_kernel as kernel

found = []
for m, columns, stages, k, registers, end, partials in json.loads(sys.argv[1]):
    layout = gl.NVMMASharedLayout.get_default_for([m, k], gl.bfloat16)
    types, fixed = weights("weight_", columns, f"bf16[{{}}, {k}],{layout!r}")
    types |= {"out": "*fp32" if partials else "*bf16", "bias": "*bf16", "softcap": "fp32"}
    types |= dict.fromkeys(("M", "N", "K"), "i32")
    types["x"] = f"tensordesc<bf16[{m}, {k}],{layout!r}>"
    fixed |= {"BM": m, "BK": k, "STAGES": stages, "END": end, "HAS_BIAS": True, "PDL": True}
    options = {"num_warps": m // 16, "maxnreg": registers}
    made = build(kernel, types, fixed, ("out", "N", "K"), **options)
    found.append([made.metadata.shared, made.asm["ptx"].count("wgmma.mma_async")])
print(json.dumps(found))
"""


@pytest.mark.parametrize("shapes", [SHAPES, pytest.param(MORE_SHAPES, marks=pytest.mark.slow)])
def test_planned_kernels_compile_and_fit(
    shapes: list[tuple[int, int, int, str, bool]], tmp_path: Path
) -> None:
    jobs = []
    for rows, k, n, end, partials in shapes:
        tiling = tiling_of(rows, k, n, end, partials=partials)
        assert isinstance(tiling, SpecializedTiling), (rows, k, n, end, tiling)
        jobs.append(
            [tiling.m, tiling.columns, tiling.stages, tiling.k, tiling.registers, end, partials]
        )
    for (shared, products), job in zip(compiled(COMPILE, jobs, tmp_path), jobs, strict=True):
        assert shared <= SHARED_BYTES, job
        assert products > 0, job
