"""Loops of kernels end: each `while` says what bounds it, and threads of a program stay together.

The interpreter runs a program as one thread, so what separate threads do is read from the PTX.
"""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compiled_apart import compiled
from hydraspec_kernels.embedding import centroid_kernel as centroids
from hydraspec_kernels.sampling.truncation import launches, truncate_

KERNELS = Path(__file__).parents[2] / "kernels"
JITS = {"triton.jit", "gluon.jit"}


def is_kernel(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and any(
        ast.unparse(part.func if isinstance(part, ast.Call) else part) in JITS
        for part in node.decorator_list
    )


def unexplained_loops(source: str) -> list[int]:
    """Lines of `while` loops of kernels without a comment `# bound: ...` there or just above."""
    lines = source.splitlines()
    kernels = [node for node in ast.walk(ast.parse(source)) if is_kernel(node)]
    loops = [node for kernel in kernels for node in ast.walk(kernel) if isinstance(node, ast.While)]
    return [
        loop.lineno
        for loop in loops
        if not any("# bound: " in line for line in lines[loop.lineno - 2 : loop.lineno])
    ]


def test_while_loops_say_what_bounds_them() -> None:
    """A loop until something holds hangs a device for ever where it never does, as the search for
    a nucleus did; a `for` over a range ends. What cannot be one says why it ends."""
    found = {
        str(path.relative_to(KERNELS)): lines
        for path in sorted(KERNELS.rglob("*.py"))
        if (lines := unexplained_loops(path.read_text()))
    }
    assert not found, "write `# bound: <what bounds it>` above, or a `for` over a range"


def test_an_unexplained_loop_is_found() -> None:
    loop = "@triton.jit(do_not_specialize=['n'])\ndef k(n):\n    {}while n > 0:\n        n -= 1\n"
    assert unexplained_loops(loop.format("")) == [3]
    assert unexplained_loops(loop.format("# bound: n trips\n    ")) == []
    assert (
        unexplained_loops(loop.format("").replace("@triton.jit(do_not_specialize=['n'])\n", ""))
        == []
    )


COMPILE = """
import importlib, json, sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton._C.libtriton import ir

target, found = GPUTarget("cuda", 90, 32), []
backend = make_backend(target)
for module, name, types, fixed, given in json.loads(sys.argv[1]):
    kernel = getattr(importlib.import_module(f"hydraspec_kernels.{module}"), name)
    kinds = {name: kind for kind, names in types.items() for name in names.split()}
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: kinds.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in fixed.items()},
    )
    options = backend.parse_options(given)
    context, stages, metadata = ir.context(), {}, {"target": target, **options.__dict__}
    ir.load_dialects(context)
    backend.load_dialects(context)
    backend.add_stages(stages, options, source.language)
    made = source.make_ir(
        target, options, backend.get_codegen_implementation(options),
        backend.get_module_map(), context,
    )
    for stage in ("ttir", "ttgir", "llir", "ptx"):
        made = stages[stage](made, metadata)
    found.append([made.count("fma.rn.f32"), made.count("shfl.sync")])
print(json.dumps(found))
"""

CUTS: dict[str, str] = {
    "*i32": "least_ptr greatest_ptr last_ptr list_ptr keys_ptr",
    "*fp32": "masses_ptr logits_ptr temperature_ptr top_p_ptr min_p_ptr",
    "*i64": "verify_rows_ptr num_drafts_ptr slots_ptr top_k_ptr",
    "*i8": "samples_ptr",
    "i32": "row_stride vocab_size num_groups",
}
CUT_SIZES = {"K": 0, "LISTED": 32, "GROUP": 32, "SHIFT": 0, "BLOCK": 32, "WIDE": 32, "PDL": False}
CHOSEN: dict[str, str] = {
    "*fp32": "best_ptr d_ptr table_ptr",
    "*i32": "ids_ptr chosen_ptr",
    "*i64": "clusters_ptr",
    "i32": "d_stride k",
}
CHOSEN_SIZES = {"H": 16, "SIZE": 4, "BLOCK_H": 16, "PARTS": 1, "PART": 4, "TILE": 4, "PDL": False}


class Recorded:
    """A kernel that is launched nowhere."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}

    def __getitem__(self, grid: object) -> Any:
        return lambda *args, **options: self.options.update(options)


def test_threads_round_a_shared_sum_alike(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The mass of a row with 2 to 32 groups is added up within a warp: with fused multiply-adds, a
    thread rounds all products but one. Threads then search for different keys, and one that ends
    earlier leaves the others waiting: top_p alone hung GPUs at vocabularies of 65 to 2,048."""
    kernel = Recorded()
    monkeypatch.setattr(launches, "find_cuts", kernel)
    monkeypatch.setattr(launches, "group_statistics", Recorded())
    monkeypatch.setattr(launches, "cut_rows", Recorded())
    one = torch.zeros(1, dtype=torch.int64)
    batch = SimpleNamespace(verify_rows=one.view(1, 1), num_drafts=one, samples=one > -1, slots=one)
    names = ("temperature", "top_k", "top_p", "min_p")
    truncate_(torch.zeros(1, 70), batch, SimpleNamespace(**dict.fromkeys(names, one.float())))  # type: ignore[arg-type]
    given = {"num_warps": 1, "enable_fp_fusion": kernel.options.get("enable_fp_fusion", True)}
    job = ("sampling.truncation.kernel", "find_cuts", CUTS, CUT_SIZES | {"ALL_GROUPS": 2}, given)
    ((fused, shuffles),) = compiled(COMPILE, [job], tmp_path)
    assert fused == 0
    assert shuffles > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lanes_share_one_score_of_a_candidate(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dtype: torch.dtype
) -> None:
    """A candidate's score is a sum of products, too: of narrow float32 rows its lanes held two
    scores, of which one is the best's and the other not. Products of 16 bits are exact: fused,
    they are as good, and a large table is read no slower."""
    kernel = Recorded()
    monkeypatch.setattr(centroids, "_best_of_chosen", kernel)
    monkeypatch.setattr(centroids, "_cluster_scores", Recorded())
    monkeypatch.setattr(centroids, "_choose_clusters", Recorded())
    monkeypatch.setattr(centroids, "best_of_rows", lambda best, ids: ids)
    d, table = torch.zeros(8, 16, dtype=dtype), torch.zeros(32, 16, dtype=dtype)
    clusters = torch.arange(32).view(8, 4)
    centroids.centroid_greedy_kernel(d, table, table[:8].t(), clusters, 2, None)
    assert kernel.options["enable_fp_fusion"] is (dtype is torch.bfloat16)
    if dtype is torch.float32:
        jobs = [
            (
                "embedding.centroid_kernel",
                "_best_of_chosen",
                CHOSEN,
                CHOSEN_SIZES,
                {"enable_fp_fusion": fuses},
            )
            for fuses in (False, True)
        ]
        (apart, shuffles), (fused, _) = compiled(COMPILE, jobs, tmp_path)
        assert (apart, fused > 0, shuffles > 0) == (0, True, True)
