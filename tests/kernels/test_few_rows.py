"""Requests with few rows and long caches beside prompts, which a second launch attends whose
programs divide their keys, against the reference.

In Triton's interpreter in float32 and small; with `-m gpu` compiled, in the sizes of real models.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from attention_layers import Queries, Requests, assert_half_close, poisoned_memory, queries
from grids import slow_unless
from hydraspec_kernels.attention import paged_attention, tiling
from hydraspec_kernels.attention import paged_kernel as kernel
from hydraspec_kernels.attention.e4m3 import round_kv
from hydraspec_kernels.attention.reference import prefill_attention_reference
from paged_queries import FLOAT32
from torch import Tensor

E4M3_SUMS = 5e-5  # float32 sums of values up to 3, in another order

CASES = {
    "a decode beside a prompt": Requests((1, 20), (70, 30)),
    "a prompt beside decodes": Requests((33, 1, 1), (40, 70, 9)),
    "sixteen rows are few and seventeen many": Requests((16, 17, 16), (60, 40, 16)),
    "drafts": Requests((4, 4, 21, 4), (70, 4, 21, 33)),
    "several tiles of each": Requests((9, 18, 16), (70, 50, 40), heads=8, kv_heads=1),
    "a group of three": Requests((5, 19), (70, 30), heads=6),
    "a KV head per query head": Requests((3, 18), (50, 30), kv_heads=4),
    "padding with few rows, and with many": Requests((1, 3, 18, 20), (50, 0, 40, 0)),
    "requests without rows": Requests((0, 2, 0, 19, 0), (0, 60, 40, 30, 0)),
    "all have few rows after all": Requests((1, 3), (70, 9)),
    "all have many rows after all": Requests((17, 20), (70, 20)),
    "few rows after the last request": Requests((2, 18), (70, 40), tail=3),
    "many rows after the last request": Requests((18, 2), (40, 70), tail=37),
    "parts of wider rows": Requests((2, 18), (70, 40), scale=3.0, strided=True),
    "head size that is no power of two": Requests((2, 18), (70, 40), head_dim=24),
    "blocks of one": Requests((2, 18), (70, 40), block_size=1),
}
IN_EVERY_SUITE = {
    "sixteen rows are few and seventeen many",
    "padding with few rows, and with many",
    "few rows after the last request",
    "many rows after the last request",
}


def bounded(made: Queries) -> Queries:
    """The plan of a graph: some request may have all rows, and the others any number."""
    made.plan = replace(made.plan, min_rows=0, max_rows=max(len(made.query), tiling.FEW_ROWS + 1))
    return made


def build(case: Requests, size: float = 2.0) -> Queries:
    return bounded(queries(case, size=size))


def is_apart(made: Queries) -> bool:
    return tiling.splits_of_few(made.plan, made.query.dtype) > 1


def expected(made: Queries) -> Tensor:
    return prefill_attention_reference(made.query.double(), made.cache.double(), made.plan)


def run(made: Queries, scales: Tensor | None = None) -> Tensor:
    assert is_apart(made)
    with poisoned_memory():
        return paged_attention(made.query, made.cache, made.plan, scales)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few keys are many."""
    monkeypatch.setattr(tiling, "LONG_KEYS", 32)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch, short: None) -> None:
    """The dispatch on a CPU."""
    monkeypatch.setattr("hydraspec_kernels.attention._attend", kernel.paged_attention_kernel)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("interpreted")
def test_matches_the_definition(name: str) -> None:
    made = build(CASES[name])
    assert (run(made).double() - expected(made)).abs().max() < FLOAT32


@pytest.mark.parametrize("name", slow_unless(lambda name: name in IN_EVERY_SUITE, product(CASES)))
@pytest.mark.usefixtures("short")
def test_each_launch_stores_its_own_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that the other one stores, for they may be in any order."""
    made, mine = build(CASES[name]), few_rows(CASES[name])
    first = torch.full((len(made.query), made.query[0].numel()), torch.nan)
    second = first.clone()
    with poisoned_memory():
        kernel.attend_few_rows(second, made.query, made.cache, made.plan)
        monkeypatch.setattr(kernel, "attend_few_rows", lambda *_: None)
        first = kernel.paged_attention_kernel(made.query, made.cache, made.plan)
    assert torch.equal(first.isnan().all(1), mine)
    assert torch.equal(first.isnan().any(1), mine)
    assert torch.equal(second.isnan().all(1), ~mine)
    assert torch.equal(second.isnan().any(1), ~mine)


@pytest.mark.usefixtures("short")
def test_programs_of_requests_with_many_rows_store_no_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their keys would be read for nothing."""
    kept: list[Tensor] = []

    def combine(out: Tensor, partial: Tensor, *_: object, splits: int, **given: object) -> None:
        kept.append(partial[: 3 * tiling.FEW_ROWS * 4 * splits * 16].view(3, -1))

    monkeypatch.setattr(kernel, "combine_splits", combine)
    made = build(Requests((2, 20, 16), (70, 40, 50)))
    with poisoned_memory():
        kernel.attend_few_rows(made.query, made.query, made.cache, made.plan)
    assert [each.isnan().all().item() for each in kept[0]] == [False, True, False]


def few_rows(case: Requests) -> Tensor:
    """Which rows [T] are of a request with few."""
    flags = [rows <= tiling.FEW_ROWS for rows in case.rows for _ in range(rows)]
    return torch.tensor(flags + [False] * case.tail)


def test_other_devices_attend_all_alike_without_long_caches() -> None:
    made = build(CASES["drafts"])
    assert not is_apart(made)
    out = kernel.paged_attention_kernel(made.query, made.cache, made.plan)
    assert (out.double() - expected(made)).abs().max() < FLOAT32


def seeing_ahead(made: Queries, case: Requests, images: dict[int, tuple[int, int]]) -> Queries:
    """The same where rows of an image, first to last position in a request, see all of it."""
    until: list[int] = []
    for b, (rows, length) in enumerate(zip(case.rows, case.lens, strict=True)):
        first, last = images.get(b, (0, -1))
        until += [last if first <= p <= last else 0 for p in range(length - rows, length)]
    made.plan.sees_until = torch.tensor([*until, *[0] * case.tail], device=case.device)
    return made


@pytest.mark.usefixtures("interpreted")
def test_rows_that_see_ahead() -> None:
    case = Requests((9, 20, 1), (60, 40, 70), tail=3)
    made = seeing_ahead(build(case), case, {0: (53, 58), 1: (22, 39)})
    assert (run(made).double() - expected(made)).abs().max() < FLOAT32


def in_e4m3(made: Queries) -> tuple[Queries, Queries, Tensor]:
    """The same over an e4m3 cache, with its numbers times scales as a plain one, and the scales
    [2, Hkv]."""
    draw = torch.Generator().manual_seed(7)
    scales = torch.rand(2, made.plan.shape.num_kv_heads, generator=draw) * 0.2 + 0.05
    scales = scales.to(made.cache.device)
    numbers = round_kv(made.cache, scales)
    plain = numbers.double() * scales.double()[:, :, None]
    return replace(made, cache=numbers), replace(made, cache=plain), scales


@pytest.mark.parametrize("name", ["drafts", "padding with few rows, and with many"])
@pytest.mark.usefixtures("interpreted")
def test_an_e4m3_cache(name: str) -> None:
    made, plain, scales = in_e4m3(build(CASES[name]))
    assert (run(made, scales).double() - expected(plain)).abs().max() < E4M3_SUMS


@pytest.mark.parametrize("part", [0, 1], ids=["a key", "a value"])
@pytest.mark.parametrize("request_", [0, 1], ids=["few rows", "many rows"])
@pytest.mark.usefixtures("interpreted")
def test_what_is_no_number_shows(part: int, request_: int) -> None:
    """In the rows that see it, and in no others."""
    case = Requests((2, 18), (70, 40))
    made = build(case)
    made.cache[made.plan.block_table[request_, 0] * case.block_size + 1, part] = torch.nan
    mine = few_rows(case) == (request_ == 0)
    out = run(made)
    assert torch.equal(out.isnan().all(1), mine)
    assert torch.equal(out.isnan().any(1), mine)


# ------------------------------------------------------------------------------------- compiled

MODELS: dict[str, dict[str, Any]] = {
    "128 wide": {"heads": 32, "kv_heads": 8, "head_dim": 128, "scale": 0.09},
    "256 wide": {"heads": 8, "kv_heads": 4, "head_dim": 256},
    "E4B full": {"heads": 8, "kv_heads": 2, "head_dim": 512},
    "31B full": {"heads": 32, "kv_heads": 4, "head_dim": 512},
    "12B full": {"heads": 16, "kv_heads": 1, "head_dim": 512},
}
ROWS = {
    "decodes beside a chunk": ((1, 1, 300), (9000, 700, 1500)),
    "drafts beside a chunk": ((4, 200), (8500, 200)),
    "sixteen and seventeen": ((16, 17), (8300, 8200)),
    "padding": ((1, 1, 130, 20), (8800, 0, 900, 0)),
    "requests without rows": ((0, 2, 100, 0), (0, 8600, 400, 0)),
}


def on_device(model: str, rows: str, **others: Any) -> Requests:
    count, lens = ROWS[rows]
    sizes: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda", "block_size": 16, "tail": 5}
    return Requests(count, lens, **(sizes | MODELS[model] | others))


def strided(case: Requests) -> Queries:
    return build(replace(case, strided=True), size=2 / case.scale)


def assert_each_close(out: Tensor, right: Tensor, case: Requests) -> None:
    """The rows of each launch alone: few ones of long caches, whose results are small, hardly
    count beside a prompt's."""
    mine = few_rows(case).to(out.device)
    for rows in (mine, ~mine):
        assert_half_close(out[rows], right[rows])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("model", MODELS)
def test_compiled(model: str, rows: str) -> None:
    """By the prefill kernel on Hopper, else by the paged one."""
    case = on_device(model, rows)
    made = strided(case)
    assert_each_close(run(made), expected(made), case)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("model", ["E4B full", "31B full"])
def test_compiled_paged(model: str, dtype: torch.dtype) -> None:
    case = on_device(model, "decodes beside a chunk", dtype=dtype)
    made = strided(case)
    with poisoned_memory():
        out = kernel.paged_attention_kernel(made.query, made.cache, made.plan)
    if dtype is torch.float32:
        assert (out.double() - expected(made)).abs().max() < FLOAT32
    else:
        assert_each_close(out, expected(made), case)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("model", MODELS)
def test_compiled_over_an_e4m3_cache(model: str, rows: str) -> None:
    case = on_device(model, rows)
    made, plain, scales = in_e4m3(strided(case))
    assert_each_close(run(made, scales), expected(plain), case)


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["128 wide", "31B full"])
def test_compiled_rows_that_see_ahead(model: str) -> None:
    case = replace(on_device(model, "drafts beside a chunk"), rows=(9, 200))
    made = seeing_ahead(strided(case), case, {0: (8492, 8499), 1: (20, 180)})
    assert_each_close(run(made), expected(made), case)


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["E4B full", "31B full"])
@pytest.mark.parametrize("part", [0, 1], ids=["a key", "a value"])
def test_compiled_what_is_no_number_shows(model: str, part: int) -> None:
    case = replace(on_device(model, "drafts beside a chunk"), tail=0)
    made = strided(case)
    made.cache[made.plan.block_table[0, 100] * case.block_size + 1, part] = torch.nan
    out = run(made)
    mine = few_rows(case).cuda()
    assert torch.equal(out.isnan().all(1), mine)
    assert torch.equal(out.isnan().any(1), mine)


@pytest.mark.gpu
@pytest.mark.parametrize("scaled", [False, True], ids=["bfloat16", "e4m3"])
@pytest.mark.parametrize("model", ["E4B full", "31B full"])
def test_a_graph_follows_rows_and_lengths(model: str, scaled: bool) -> None:
    """Requests with few rows get many, and those with many few."""
    base = on_device(model, "padding", tail=3)
    cases = [replace(base, rows=rows, lens=lens, strided=False) for rows, lens in GRAPH]
    made = [bounded(queries(case, seed=seed, size=2.0)) for seed, case in enumerate(cases)]
    scales: Tensor | None = None
    if scaled:
        made = [in_e4m3(each)[0] for each in made]
        scales = in_e4m3(queries(cases[0]))[2]
    wanted = [run(each, scales) for each in made]
    static = made[0]
    held = tensors(static)
    kept = [[each.clone() for each in tensors(one)] for one in made]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention(static.query, static.cache, static.plan, scales)
    for new, right in (*zip(kept, wanted, strict=True), (kept[0], wanted[0])):
        for to, given in zip(held, new, strict=True):
            to.view(torch.uint8).copy_(given.view(torch.uint8))
        graph.replay()
        assert torch.equal(out, right)


GRAPH = [
    ((1, 16, 130, 3), (8800, 8600, 900, 0)),
    ((120, 17, 1, 12), (8800, 17, 8700, 8500)),
    ((0, 0, 150, 0), (0, 0, 8800, 0)),
]


def tensors(made: Queries) -> list[Tensor]:
    plan = made.plan
    assert plan.query_start_loc is not None
    return [made.query, made.cache, plan.query_start_loc, plan.seq_lens, plan.block_table]
