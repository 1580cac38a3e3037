"""The fused decode kernel, and the one that adds up its splits, compile for sm_90 on a machine
without a GPU, with rounded results and without.

Catches what the interpreter does not: it runs Python, in which a branch that is not taken is never
looked at.
"""

from __future__ import annotations

from pathlib import Path

from compiled_apart import SHARED_BYTES, compiled

COMPILE = """
import json, sys
import triton.language as tl
from sm90 import build
from triton.compiler import ASTSource
from hydraspec_kernels.attention.decode_kernel import _decode_kernel
from hydraspec_kernels.attention.splits_kernel import _sum_kernel

BFLOAT16 = ("cache", "qkv", "cos", "sin", "q_weight", "k_weight")
INT32 = ("num_rows", "num_requests", "split_shift", "least_share", "qkv_stride", "table_stride",
         "table_width", "num_blocks")
found = []
for name, rounded, one_row in json.loads(sys.argv[1]):
    types = {"out": "*fp8e4nv" if rounded else "*bf16", "partial": "*fp32", "arrived": "*i32"}
    types |= dict.fromkeys(BFLOAT16, "*bf16") | dict.fromkeys(INT32, "i32")
    types |= {"cache_rows": "*i64", "scale": "fp32", "eps": "fp32"}
    types |= dict.fromkeys(("block_table", "seq_lens", "starts"), "*i32")
    types |= {"scales": "*fp32"} if rounded else {}
    fixed = {"NUM_HEADS": 8, "NUM_KV_HEADS": 2, "HEAD_DIM": 64, "HALF": 32, "WINDOW": 0}
    fixed |= {"BLOCK_SIZE": 16, "Q_NORM": True, "K_NORM": True, "VALUE_NORM": True}
    fixed |= {"K_EQ_V": False, "WRITES": True, "ONE_ROW": one_row, "ROW_TILES": 1}
    fixed |= {"QUERIES": 4 if one_row else 16, "BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_H": 32}
    fixed |= {"BLOCK_NEW": 1 if one_row else 4, "BLOCK_V": 64, "TRANSPOSED": False, "ADDS": True}
    fixed |= {"SPLITS": 4, "DTYPE": tl.bfloat16, "ROUNDED": rounded, "PREFETCHED": 16}
    fixed |= {"PRECISION": "tf32", "PDL": True}
    kernel = _sum_kernel if name == "sum" else _decode_kernel
    made = build(kernel, types, fixed, source=ASTSource, num_warps=4)
    found.append([made.metadata.shared, made.asm["ptx"].count("st.global")])
print(json.dumps(found))
"""


def test_kernels_compile_and_fit(tmp_path: Path) -> None:
    jobs = [["decode", 0, True], ["decode", 32, False], ["sum", 0, False], ["sum", 32, False]]
    for (shared, stores), job in zip(compiled(COMPILE, jobs, tmp_path), jobs, strict=True):
        assert shared <= SHARED_BYTES, job
        assert stores > 0, job
