"""The fused decode kernel, and the one that adds up its splits, compile for sm_90 on a machine
without a GPU, with rounded results and without; those that write and read an e4m3 cache too.

Catches what the interpreter does not: it runs Python, in which a branch that is not taken is never
looked at.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from compiled_apart import SHARED_BYTES, compiled

COMPILE = """
import json, sys
import triton.language as tl
from sm90 import build
from triton.compiler import ASTSource
from hydraspec_kernels.attention.decode_kernel import _decode_kernel
from hydraspec_kernels.attention.paged_kernel import _attention_kernel
from hydraspec_kernels.attention.qkv_kernel import write_qkv_kernel
from hydraspec_kernels.attention.splits_kernel import _sum_kernel

BFLOAT16 = ("cache", "qkv", "cos", "sin", "q_weight", "k_weight")
INT32 = ("num_rows", "num_requests", "split_shift", "least_share", "qkv_stride", "table_stride",
         "table_width", "num_blocks", "splits", "row_tiles", "query_stride", "num_heads",
         "num_kv_heads", "heads")
KERNELS = {"sum": _sum_kernel, "decode": _decode_kernel, "write": write_qkv_kernel,
           "paged": _attention_kernel}
found = []
for name, rounded, one_row, scaled, size in json.loads(sys.argv[1]):
    kernel = KERNELS[name]
    types = {"out": "*fp8e4nv" if rounded else "*bf16", "partial": "*fp32", "arrived": "*i32"}
    types |= dict.fromkeys(BFLOAT16, "*bf16") | dict.fromkeys(INT32, "i32")
    types |= {"cache_rows": "*i64", "scale": "fp32", "eps": "fp32"}
    types |= dict.fromkeys(("block_table", "seq_lens", "starts"), "*i32")
    types |= {"scales": "*fp32"} if rounded else {}
    types |= {"cache": "*fp8e4nv", "kv_scales": "*fp32"} if scaled else {}
    types |= {"query": "*bf16", "q": "*bf16"}
    types |= {f"{n}_ptr": t for n, t in types.items() if f"{n}_ptr" in kernel.arg_names}
    types = {n: t for n, t in types.items() if n in kernel.arg_names}
    half, keys = size // 2, 32 if size == 64 else 64
    fixed = {"NUM_HEADS": 8, "NUM_KV_HEADS": 2, "HEAD_DIM": size, "HALF": half, "WINDOW": 0}
    fixed |= {"BLOCK_SIZE": 16, "Q_NORM": True, "K_NORM": True, "VALUE_NORM": True}
    fixed |= {"K_EQ_V": False, "WRITES": True, "ONE_ROW": one_row, "ROW_TILES": 1}
    fixed |= {"QUERIES": 4 if one_row else 16, "BLOCK_M": 16, "BLOCK_N": keys, "BLOCK_H": half}
    fixed |= {"BLOCK_NEW": 1 if one_row else 4, "BLOCK_V": size}
    fixed |= {"TRANSPOSED": scaled > 1, "ADDS": True}
    fixed |= {"VALUE_DIM": size, "LATENT": False, "ONLY": "all"}
    fixed |= {"MASK": "block" if rounded else "causal"}
    fixed |= {"SPLIT": True, "BLOCK_R": 0, "BLOCK_B": 0, "HAS_Q_NORM": True, "HAS_K_NORM": True}
    fixed |= {"HAS_CACHE": True, "HEADS": 4, "PADDED_HALF": half}
    fixed |= {"SPLITS": 4, "DTYPE": tl.bfloat16, "ROUNDED": rounded, "PREFETCHED": 16}
    fixed |= {"PRECISION": "tf32", "PDL": True}
    if scaled > 1:  # queries are columns, and values are the keys
        fixed |= {"BLOCK_M": 8, "QUERIES": 8, "K_EQ_V": True}
    made = build(kernel, types, fixed, source=ASTSource, num_warps=4)
    found.append([made.metadata.shared, made.asm["ptx"].count("st.global")])
print(json.dumps(found))
"""


def check(jobs: list[list[Any]], cache: Path) -> None:
    for (shared, stores), job in zip(compiled(COMPILE, jobs, cache), jobs, strict=True):
        assert shared <= SHARED_BYTES, job
        assert stores > 0, job


@pytest.mark.parametrize("size", [64, pytest.param(256, marks=pytest.mark.slow)])
def test_kernels_compile_and_fit(size: int, tmp_path: Path) -> None:
    """With narrow heads, which compile faster, and those of Gemma 4."""
    jobs = [["decode", 0, True], ["decode", size // 2, False]]
    jobs += [["sum", 0, False], ["sum", size // 2, False]]
    check([[*job, 0, size] for job in jobs], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("scaled", [1, 2], ids=["queries are rows", "queries are columns"])
def test_kernels_over_an_e4m3_cache_compile_and_fit(scaled: int, tmp_path: Path) -> None:
    jobs = [[name, 0, name == "decode" and scaled == 1] for name in ("decode", "paged", "write")]
    check([[*job, scaled, 256] for job in jobs], tmp_path)
