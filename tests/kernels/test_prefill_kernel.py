"""The prefill kernel: which plans it takes, that it compiles, and on a device its results.

Gluon has no interpreter: a CPU only compiles the kernel, in a separate process, because in this one
Triton interprets.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from attention_layers import Queries, Requests, assert_half_close, poisoned_memory, queries
from compiled_apart import SHARED_BYTES, compiled
from hydraspec_kernels.attention import GroupShape, hopper_tiling, paged_attention, tiling
from hydraspec_kernels.attention.counters import zero_counters
from hydraspec_kernels.attention.hopper_tiling import fits_prefill as fits
from hydraspec_kernels.attention.plan import DevicePlan
from hydraspec_kernels.attention.reference import prefill_attention_reference
from torch import Tensor

# KV heads, queries of each, head size, window, block size, whether keys are split, rows up to which
# requests are skipped: a window and none, one slice of a head and two.
Shape = tuple[int, int, int, int, int, bool, int]
SHAPES = [(16, 2, 256, 1024, 16, False, 0), (4, 8, 512, 0, 32, True, 0)]
MORE_SHAPES = [
    (4, 8, 512, 0, 32, False, 0),
    (8, 4, 128, 0, 256, False, 0),
    (8, 1, 64, 0, 8, False, 0),
    (2, 4, 512, 0, 16, False, 16),
    (4, 8, 512, 0, 16, False, 16),
    (8, 4, 128, 0, 16, False, 16),
]
COMPILE = """
import json, sys
from sm90 import build
from triton.experimental.gluon import language as gl
from hydraspec_kernels.attention.prefill_kernel import LAUNCH, _prefill_kernel as kernel

NUMBERS = "num_rows", "num_requests", "units", "tiles", "splits", "table_stride"
found = []
for heads, group, dim, window, block, is_split, skipped, cut in json.loads(sys.argv[1]):
    types = {"out": "*bf16", "partial": "*fp32", "scale": "fp32", "counters": "*i32"}
    types |= dict.fromkeys(("block_table", "seq_lens", "starts"), "*i64")
    types |= dict.fromkeys(NUMBERS, "i32")
    for name, tile in (("query", [64 // group, group, 64]), ("cache", [cut["page"], 64])):
        layout = gl.NVMMASharedLayout.get_default_for(tile, gl.bfloat16)
        types[name] = f"tensordesc<bf16{tile},{layout!r}>"
    fixed = {name.upper(): value for name, value in cut.items()}
    fixed |= {"KV_HEADS": heads, "GROUP": group, "DIM": dim, "WINDOW": window, "PDL": True}
    fixed |= {"BLOCK_SIZE": block, "BLOCK_B": 64, "FEW": is_split, "SPLIT": is_split}
    fixed["SKIPPED_ROWS"] = skipped
    made = build(kernel, types, fixed, ("out", "partial"), **LAUNCH)
    found.append([made.metadata.shared, made.asm["ptx"].count("wgmma.mma_async")])
print(json.dumps(found))
"""


def build(case: Requests, latent_dim: int | None = None) -> Queries:
    """Queries that are part of wider rows, with rows after the last request's."""
    return queries(replace(case, strided=True, tail=5), latent_dim, size=2 / case.scale)


def run(inputs: Queries) -> Tensor:
    assert fits(inputs.query, inputs.plan)
    with poisoned_memory():
        return paged_attention(inputs.query, inputs.cache, inputs.plan)


def check(case: Requests) -> None:
    inputs = build(case)
    out = run(inputs)
    expected = prefill_attention_reference(
        inputs.query.double(), inputs.cache.double(), inputs.plan
    )
    assert_half_close(out, expected)


@pytest.mark.parametrize("shapes", [SHAPES, pytest.param(MORE_SHAPES, marks=pytest.mark.slow)])
def test_compiles_and_fits(shapes: list[Shape], tmp_path: Path) -> None:
    jobs = []
    for heads, group, dim, window, block, is_split, skipped in shapes:
        shape = GroupShape(
            num_heads=heads * group,
            num_kv_heads=heads,
            head_dim=dim,
            block_size=block,
            window=window or None,
        )
        cut = asdict(hopper_tiling.prefill_tiling(shape))
        jobs.append([heads, group, dim, window, block, is_split, skipped, cut])
    for (shared, products), job in zip(compiled(COMPILE, jobs, tmp_path), jobs, strict=True):
        assert shared <= SHARED_BYTES, job
        assert products > 0, job


MODELS = {
    "64 wide": {"heads": 8, "kv_heads": 8, "head_dim": 64, "scale": 0.125},
    "128 wide": {"heads": 32, "kv_heads": 8, "head_dim": 128, "scale": 0.09},
    "E4B sliding": {"heads": 8, "kv_heads": 2, "head_dim": 256, "window": 512},
    "E4B full": {"heads": 8, "kv_heads": 2, "head_dim": 512},
    "31B sliding": {"heads": 32, "kv_heads": 16, "head_dim": 256, "window": 1024},
    "31B full": {"heads": 32, "kv_heads": 4, "head_dim": 512},
    "12B full": {"heads": 16, "kv_heads": 1, "head_dim": 512},
}


def case_of(model: str, rows: tuple[int, ...], lens: tuple[int, ...]) -> Requests:
    return Requests(rows, lens, dtype=torch.bfloat16, block_size=16, **MODELS[model])


def test_which_plans_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_tiling, "is_hopper", lambda _: True)
    few = tiling.MOST_SPLIT_ROWS
    case = case_of("128 wide", (few + 1,), (40,))

    def takes(case: Requests, latent_dim: int | None = None) -> bool:
        inputs = build(case, latent_dim)
        return fits(inputs.query, inputs.plan)

    assert takes(case)
    assert takes(replace(case, dtype=torch.float16))
    assert not takes(replace(case, dtype=torch.float32))
    assert not takes(replace(case, rows=(few,)))
    wide = case_of("31B full", (5,), (40,))  # 40 queries of a KV head
    assert takes(wide)
    assert not takes(replace(wide, rows=(4,)))
    assert not takes(replace(wide, mask="causal_block"))
    assert not takes(replace(case, head_dim=96))
    assert not takes(replace(case, heads=24))
    assert not takes(replace(case, heads=128, kv_heads=1))
    assert not takes(replace(case, block_size=4))
    assert not takes(replace(case, block_size=24))
    assert not takes(replace(case, heads=8, kv_heads=1, head_dim=512), latent_dim=256)
    inputs = build(case)
    query = inputs.query
    assert not fits(query.new_empty(query.numel() + 4)[4:].view(query.shape), inputs.plan)


def test_splits_fill_the_device_without_many_rows() -> None:
    shape = build(case_of("31B full", (5,), (40,))).plan.shape
    found = [
        hopper_tiling.prefill_splits(shape, 6, requests, 1024) for requests in (1, 4, 8, 16, 32)
    ]
    assert found == [16, 8, 4, 2, 1]
    assert hopper_tiling.prefill_splits(shape, 9, 8, 1024) == 2  # two tiles of 64 queries each
    assert hopper_tiling.prefill_splits(shape, tiling.MOST_SPLIT_ROWS + 1, 1, 1024) == 1
    one_head = replace(shape, num_kv_heads=1, num_heads=16)
    found = [hopper_tiling.prefill_splits(one_head, 4, 1, keys) for keys in (1024, 8192, 32768)]
    assert found == [16, 32, 64]


def test_other_devices_run_the_paged_kernel() -> None:
    inputs = build(case_of("128 wide", (40,), (40,)))
    assert not fits(inputs.query, inputs.plan)


# ------------------------------------------------------------------------------------- compiled

ROWS = {
    "one tile": ((17,), (17,)),
    "ends on block borders": ((64, 128, 512), (64, 640, 512)),
    "chunks after long caches": ((70, 33, 129), (3000, 1111, 1153)),
    "a window inside the rows": ((2500,), (2600,)),
    "one row between prompts": ((100, 1, 1, 200), (100, 900, 1, 333)),
    "padding requests": ((90, 30, 1), (90, 0, 0)),
}

FEW_ROWS = {  # of wide heads: rows and lengths
    "verify": ((6,) * 5, (640, 6, 17, 5000, 1500)),
    "one request, every split": ((5,), (4000,)),
    "fewer keys than splits": ((5, 5), (5, 130)),
    "rows differ": ((16, 1, 5, 8), (3000, 900, 5, 129)),
    "one split": ((6,) * 40, tuple(6 + 50 * b for b in range(40))),
    "padding requests": ((6, 6, 6), (900, 0, 0)),
    "requests without rows": ((6, 0, 7, 0), (900, 0, 2000, 0)),
    "one long sequence": ((4,), (33000,)),
}


@pytest.fixture
def hopper() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")


def on_device(model: str, rows: tuple[int, ...], lens: tuple[int, ...]) -> Requests:
    return replace(case_of(model, rows, lens), device="cuda")


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("model", MODELS)
def test_matches_the_reference(model: str, rows: str) -> None:
    check(on_device(model, *ROWS[rows]))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", FEW_ROWS)
@pytest.mark.parametrize("model", ["31B full", "12B full"])
def test_few_rows_of_wide_heads(model: str, rows: str, dtype: torch.dtype) -> None:
    most, lens = FEW_ROWS[rows]
    if model == "31B full":  # eight queries a row
        most = tuple(5 if n == 4 else n for n in most)
    check(replace(on_device(model, most, lens), dtype=dtype))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("rows", "lens", "bound"),
    [((5, 7), (900, 2000), 16), ((7,), (66000,), 8)],
    ids=["of other requests", "with 64 splits"],
)
def test_a_plan_bounds_rows(rows: tuple[int, ...], lens: tuple[int, ...], bound: int) -> None:
    inputs = build(replace(on_device("31B full", rows, lens), heads=8, kv_heads=1))
    inputs = replace(inputs, plan=replace(inputs.plan, max_rows=bound))
    expected = prefill_attention_reference(
        inputs.query.double(), inputs.cache.double(), inputs.plan
    )
    assert_half_close(run(inputs), expected)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("block_size", [8, 32, 64, 128, 256])
@pytest.mark.parametrize("model", ["128 wide", "E4B sliding", "31B full"])
def test_block_sizes(model: str, block_size: int) -> None:
    check(replace(on_device(model, (100, 33, 300), (700, 95, 600)), block_size=block_size))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_half() -> None:
    check(replace(on_device("128 wide", (100, 40), (300, 40)), dtype=torch.float16))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_many_requests() -> None:
    """More than two for each lane of a warp."""
    rows = tuple(1 + 7 * b % 40 for b in range(90))
    check(on_device("E4B sliding", rows, tuple(n + 11 * b for b, n in enumerate(rows))))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("model", ["128 wide", "31B sliding", "31B full"])
def test_a_request_does_not_see_its_neighbours(model: str) -> None:
    """Bitwise, whichever program takes which tile."""
    inputs = build(on_device(model, (200, 300, 100), (700, 300, 0)))
    plan, whole = inputs.plan, run(inputs)
    assert all(torch.equal(whole, run(inputs)) for _ in range(5))
    starts = plan.query_start_loc
    assert starts is not None
    alone = DevicePlan(plan.shape, starts[:2], plan.seq_lens[:1], plan.block_table[:1], 200, 1, 200)
    out = paged_attention(inputs.query[:200], inputs.cache, alone)
    assert torch.equal(out, whole[:200])
    assert not zero_counters(out.device).any()


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("model", "rows"), [("E4B sliding", 64), ("31B full", 6)])
def test_a_graph_follows_the_sequence_lengths(model: str, rows: int) -> None:
    first = build(on_device(model, (rows,) * 3, (900, 64, 640)))
    second = build(on_device(model, (rows,) * 3, (70, 899, 0)))
    plan = first.plan
    kept = [first.query.clone(), first.cache.clone(), plan.seq_lens.clone()]
    kept += [plan.block_table.clone()]
    before, other = run(first), run(second)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention(first.query, first.cache, plan)
    theirs = [second.query, second.cache, second.plan.seq_lens, second.plan.block_table]
    for given, expected in ((theirs, other), (kept, before)):
        mine = (first.query, first.cache, plan.seq_lens, plan.block_table)
        for to, new in zip(mine, given, strict=True):
            to.copy_(new)
        graph.replay()
        assert torch.equal(out, expected)
