"""The fused decode kernel against the two kernels it replaces, and against the reference.

In Triton's interpreter in float32 and small; with `-m gpu` compiled, in the sizes of real models.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from attention_layers import CASES as ATTENTION_CASES
from attention_layers import DECODES, Case, Inputs, assert_half_close, build, poisoned_memory
from attention_layers import MODELS as ATTENTION_MODELS
from grids import in_turn, slow_unless
from hydraspec_kernels.attention import GroupShape, attend_projection, counters, tiling
from hydraspec_kernels.attention import decode_kernel as kernel
from hydraspec_kernels.attention.plan import DevicePlan
from hydraspec_kernels.attention.qkv_kernel import write_qkv_cuda
from hydraspec_kernels.attention.reference import (
    attend_projection_reference,
    planned_attention_reference,
)
from hydraspec_kernels.quantised import RoundedRows, Rounding
from hydraspec_kernels.quantised.round_kernel import round_rows
from hydraspec_kernels.runtime import breaks
from torch import Tensor

# Scratch memory of rows after the last request is never written.
pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice encountered")

# Outputs are means of values of size 1. Float32 sums of a few hundred terms in another order.
FLOAT32 = 3e-5


def run(inputs: Inputs, cache: Tensor) -> Tensor:
    with poisoned_memory():
        return kernel.attend_projection_kernel(*inputs.arguments(cache), writes=inputs.writes)


def bits(x: Tensor) -> Tensor:
    """NaN equals NaN."""
    return x.view(torch.int32 if x.element_size() == 4 else torch.int16)


def check(inputs: Inputs) -> None:
    raw, cache, expected_cache = inputs.qkv.clone(), inputs.cache.clone(), inputs.cache.clone()
    projection, _, _, shape = inputs.arguments(cache)
    q = write_qkv_cuda(projection, expected_cache if inputs.writes else None, shape)
    out = run(inputs, cache)
    assert torch.equal(inputs.qkv, raw), "the projection is only read"
    assert torch.equal(bits(cache), bits(expected_cache))
    expected = planned_attention_reference(q.double(), cache.double(), inputs.plan)
    if out.dtype is torch.float32:
        assert (out.double() - expected).abs().max() < FLOAT32
    else:
        assert_half_close(out, expected)
    assert not counters.zero_counters(out.device).any()


CASES = {
    **{name: Case(**vars(requests)) for name, requests in ATTENTION_CASES.items()},
    "decode, new key alone in the last split": Case((1,), (65,)),
    "verify rows over a border of splits": Case((4,), (34,)),
    "several tiles, the new rows alone": Case((16,), (16,), heads=8, kv_heads=1),
    "window shorter than the rows, several tiles": Case((16,), (40,), window=3, heads=8),
    "shared cache": Case((2, 3), (40, 9), writes=False),
    "shared cache, a row each": Case((1, 1), (40, 1), writes=False, starts=False),
    "values are keys": Case((2, 3), (40, 9), k_eq_v=True),
    "values are raw keys": Case((2, 3), (40, 9), k_eq_v=True, value_norm=False),
    "no norms": Case((2, 3), (40, 9), head_norms=False, value_norm=False, scale=0.25),
    "a row a request needs no starts": Case((1, 1, 1), (30, 1, 0), starts=False, window=5),
}


WAYS = ("few splits", "many, second kernel", "none, transposed")
# In all of these ways; the interpreter takes half a second for each, and a device runs every case.
SPLIT = (
    "verify rows over a border of splits",
    "rows differ",
    "window shorter than the rows, several tiles",
    "rows after the last and padding requests",
)


@pytest.fixture
def programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    how = request.param
    full = 8 if how == "few splits" else 32 if how.startswith("many") else 1
    monkeypatch.setattr(tiling, "FULL_DEVICE", full)
    monkeypatch.setattr(tiling, "LEAST_SHARE", 1)
    monkeypatch.setattr(tiling, "REACHED", {1: 0.5, 4: 1e3 if how == "none, transposed" else 1e-3})
    monkeypatch.setattr(tiling, "MOST_ADDED", 0 if how.endswith("second kernel") else 1 << 20)
    monkeypatch.setattr(tiling, "MOST_ADDED_SPLITS", tiling.MAX_SPLITS)


@pytest.mark.parametrize("programs", ["many, second kernel"], indirect=True)
@pytest.mark.usefixtures("programs")
def test_a_long_sequence_takes_more_splits_than_16() -> None:
    inputs = build(Case((1,), (2040,), block_size=16, heads=2, kv_heads=1))
    shape, keys = inputs.plan.shape, 16 * inputs.plan.block_table.shape[1]
    cut = tiling.decode_tiling(shape, 1, 1, torch.float32, max_keys=keys)
    assert cut.splits == 32
    check(inputs)


@pytest.mark.parametrize(
    ("name", "programs"),
    in_turn(CASES, WAYS, SPLIT) + slow_unless(lambda *_: False, product(CASES, ("many", "none"))),
    indirect=["programs"],
)
@pytest.mark.usefixtures("programs")
def test_cache_and_result_equal_those_of_the_two_kernels(name: str) -> None:
    check(build(CASES[name]))


@pytest.mark.parametrize("programs", ["few splits"], indirect=True)
@pytest.mark.usefixtures("programs")
def test_tiles_of_a_request_may_end_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that adds up its splits leaves the results of the next, which may be there, alone."""
    from triton.runtime.interpreter import InterpreterBuilder as Builder

    def reversed_order(self: Any, x: int, y: int, z: int) -> None:
        place(self, self.grid_dim[0] - 1 - x, y, z)

    place = Builder.set_grid_idx
    monkeypatch.setattr(Builder, "set_grid_idx", reversed_order)
    check(build(Case((8,), (36,), heads=4, kv_heads=1)))


def test_work_is_cut_for_the_requests_that_have_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are padding: a request with keys has as many programs as in a smaller step."""
    monkeypatch.setattr(tiling, "FULL_DEVICE", 8)
    monkeypatch.setattr(tiling, "LEAST_SHARE", 1)
    inputs = build(Case((1, 1, 1, 1), (70, 0, 41, 0), starts=False, heads=2, kv_heads=1))
    cuts, cut_for = list[int](), tiling.decode_tiling

    def noted(*args: Any, **kwargs: Any) -> tiling.DecodeTiling:
        cuts.append(cut_for(*args, **kwargs).splits)
        return cut_for(*args, **kwargs)

    monkeypatch.setattr(tiling, "decode_tiling", noted)
    for num_busy in (0, 2):
        inputs.plan.num_busy = num_busy
        check(inputs)
    assert cuts == [2, 4]


def test_the_dispatch_off_the_device_is_the_reference() -> None:
    inputs = build(CASES["rows differ"])
    cache, other = inputs.cache.clone(), inputs.cache.clone()
    plan = inputs.plan
    expected = attend_projection_reference(*inputs.arguments(other), writes=True)
    wide = replace(inputs, qkv=inputs.qkv.double(), cos=inputs.cos.double())
    wide.sin, cache = inputs.sin.double(), cache.double()
    wide.shape = replace(
        inputs.shape,
        q_weight=inputs.shape.q_weight.double(),
        k_weight=inputs.shape.k_weight.double(),
    )
    out = attend_projection(*wide.arguments(cache), writes=True)  # float64 has no kernel
    assert plan is wide.plan
    torch.testing.assert_close(out.float(), expected, rtol=0, atol=FLOAT32)
    torch.testing.assert_close(cache.float(), other, equal_nan=True)


def test_a_piecewise_capture_leaves_it_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "FULL_DEVICE", 8)
    inputs = build(CASES["verify rows"])
    seen = []

    class Recorder:
        def call(self, function: Any, args: tuple[Any, ...]) -> Any:
            seen.append(args)
            return function(*args)

    with breaks.recording(Recorder()):
        attend_projection(*inputs.arguments(inputs.cache.clone()), writes=True)
    assert len(seen) == 1
    assert seen[0][0].qkv is inputs.qkv, "the cache is written in the same call"


@pytest.mark.parametrize(
    ("rows", "head_dim", "group", "supported"),
    [(1, 512, 8, True), (4, 512, 8, True), (16, 512, 8, False), (17, 16, 1, False)],
)
def test_what_is_supported(rows: int, head_dim: int, group: int, supported: bool) -> None:
    shape = GroupShape(
        num_heads=group, num_kv_heads=1, head_dim=head_dim, block_size=16, window=None
    )
    assert tiling.supports_decode(shape, rows) is supported


@pytest.mark.parametrize(
    ("requests", "rows", "taken"),
    [(1, 1, True), (132, 4, True), (133, 4, True), (8, 17, False), (132, 8, True), (133, 8, False)],
)
def test_which_plans_are_taken(requests: int, rows: int, taken: bool) -> None:
    shape = GroupShape(num_heads=8, num_kv_heads=2, head_dim=256, block_size=16, window=512)
    lens = torch.ones(requests, dtype=torch.int64)
    plan = DevicePlan(shape, lens, lens, lens[:, None], requests * rows, requests, rows)
    assert tiling.fits_decode(plan) is taken


@pytest.mark.parametrize("requests", [1, 2, 7, 33, 66, 67, 200, 600])
def test_splits_fill_the_device_once_and_counters_suffice(requests: int) -> None:
    shape = GroupShape(num_heads=8, num_kv_heads=2, head_dim=256, block_size=16, window=512)
    cut = tiling.decode_tiling(shape, 4, requests, torch.bfloat16, max_keys=1 << 20)
    splits = cut.splits
    assert splits == 1 or 2 * requests * splits <= tiling.FULL_DEVICE
    assert splits == tiling.MAX_SPLITS or 4 * requests * splits > tiling.FULL_DEVICE
    assert splits == 1 or 2 * requests <= counters.COUNTERS


@pytest.mark.parametrize(
    ("max_keys", "window", "splits"),
    [(4096, None, 16), (8191, None, 16), (8192, None, 32), (32_768, None, 64), (32_768, 512, 16)],
)
def test_long_sequences_have_more_splits(max_keys: int, window: int | None, splits: int) -> None:
    shape = GroupShape(num_heads=8, num_kv_heads=2, head_dim=512, block_size=16, window=window)
    cut = tiling.decode_tiling(shape, 1, 1, torch.bfloat16, max_keys=max_keys)
    assert cut.splits == splits


@pytest.mark.parametrize(
    ("requests", "rows", "head_dim", "at_once"),
    [
        (8, 4, 256, 1),
        (16, 4, 256, 1),
        (24, 4, 256, 3),
        (32, 4, 256, 4),
        (48, 4, 256, 3),
        (32, 8, 256, 1),
        (48, 8, 256, 3),
        (32, 4, 512, 1),
    ],
)
def test_programs_share_a_multiprocessor_where_few_places_stay_empty(
    requests: int, rows: int, head_dim: int, at_once: int
) -> None:
    shape = GroupShape(num_heads=32, num_kv_heads=16, head_dim=head_dim, block_size=16, window=1024)
    cut = tiling.decode_tiling(shape, rows, requests, torch.bfloat16, max_keys=4096)
    assert cut.splits == 1
    assert cut.transposed is (at_once == 4)
    is_many = requests * 16 > 2 * tiling.FULL_DEVICE  # in turn, with few warps each
    assert (cut.num_warps == 4) is (at_once > 1 or head_dim == 512 or is_many)


@pytest.mark.parametrize(
    ("requests", "rows", "kilobytes", "tile"),
    [
        (1, 8, 227, (16, 128)),
        (1, 8, 99, (32, 64)),
        (8, 8, 227, (16, 64)),
        (8, 8, 99, (32, 64)),
        (32, 8, 227, (32, 64)),
        (1, 16, 227, (32, 128)),
        (8, 16, 227, (32, 64)),
        (16, 16, 227, (64, 64)),
        (8, 16, 99, (64, 32)),
    ],
)
def test_tiles_of_narrow_heads_fit_the_shared_memory(
    requests: int, rows: int, kilobytes: int, tile: tuple[int, int]
) -> None:
    shape = GroupShape(num_heads=32, num_kv_heads=8, head_dim=128, block_size=16, window=None)
    args = shape, rows, requests, torch.bfloat16
    cut = tiling.decode_tiling(*args, max_keys=4096, room=kilobytes << 10)
    assert (cut.block_m, cut.block_n) == tile
    stage = 2 * 2 * cut.block_n * shape.head_dim  # keys and values in half precision
    assert (cut.num_stages - 1) * stage + 2 * cut.block_m * shape.head_dim <= kilobytes << 10


# ------------------------------------------------------------------------------------- compiled

CHANGED: dict[str, dict[str, Any]] = {
    "64 wide": {"head_norms": False},
    "128 wide": {"value_norm": False},
    "31B full": {"k_eq_v": True},
}
MODELS = {
    **{n: Case((), (), **CHANGED.get(n, {}), **sizes) for n, sizes in ATTENTION_MODELS.items()},
    "E4B shared": Case((), (), **ATTENTION_MODELS["E4B sliding"], writes=False),
}
ROWS = {
    **DECODES,
    "rows differ": ((8, 1, 8, 3), (1030, 1, 8, 0)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("model", MODELS)
def test_compiled(model: str, rows: str, dtype: torch.dtype) -> None:
    count, lens = ROWS[rows]
    base = replace(MODELS[model], rows=count, lens=lens, dtype=dtype, device="cuda")
    inputs = build(replace(base, block_size=16, tail=5, strided=True))
    if tiling.supports_decode(inputs.plan.shape, inputs.plan.max_rows):
        check(inputs)


@pytest.mark.gpu
def test_compiled_half() -> None:
    count, lens = ROWS["rows differ"]
    base = replace(MODELS["128 wide"], rows=count, lens=lens, dtype=torch.float16, device="cuda")
    check(build(replace(base, block_size=64)))


@pytest.mark.gpu
@pytest.mark.parametrize("requests", [1, 2, 8, 24, 32, 64])
@pytest.mark.parametrize("model", ["E4B sliding", "E4B full", "31B sliding", "31B full"])
def test_compiled_batches(model: str, requests: int) -> None:
    lens = tuple(600 + 7 * b for b in range(requests))
    base = replace(MODELS[model], lens=lens, dtype=torch.bfloat16, device="cuda", block_size=16)
    check(build(replace(base, rows=(1,) * requests, starts=False)))
    check(build(replace(base, rows=(4,) * requests)))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize(
    ("model", "threes"), [("E4B sliding", 1), ("E4B full", 1), ("31B sliding", 3)]
)
def test_a_graph_of_layers_follows_the_inputs_and_is_deterministic(
    model: str, threes: int, rows: int
) -> None:
    """Consecutive dependent launches that reuse the same counters."""
    base = replace(MODELS[model], dtype=torch.bfloat16, device="cuda", block_size=16)
    base = replace(base, rows=(rows,) * 3 * threes)
    first = build(replace(base, lens=(900, 64, 640) * threes))
    other = build(replace(base, lens=(70, 899, 0) * threes), seed=8)
    caches = [first.cache.clone() for _ in range(6)]
    run(first, caches[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [
            kernel.attend_projection_kernel(*first.arguments(cache), writes=True)
            for cache in caches
        ]
    for fresh in (other, build(replace(base, lens=(900, 64, 640) * threes))):
        expected_cache = fresh.cache.clone()
        expected = run(fresh, expected_cache)
        for name in ("qkv", "cos", "sin", "slots"):
            getattr(first, name).copy_(getattr(fresh, name))
        for mine, theirs in zip(
            (first.shape.q_weight, first.shape.k_weight),
            (fresh.shape.q_weight, fresh.shape.k_weight),
            strict=True,
        ):
            mine.copy_(theirs)
        first.plan.seq_lens.copy_(fresh.plan.seq_lens)
        first.plan.block_table.copy_(fresh.plan.block_table)
        for _ in range(20):
            for cache in caches:
                cache.copy_(fresh.cache)
            graph.replay()
            for out, cache in zip(outs, caches, strict=True):
                assert torch.equal(out, expected)
                assert torch.equal(bits(cache), bits(expected_cache))


@pytest.mark.parametrize("programs", WAYS, indirect=True)
@pytest.mark.parametrize("name", ["verify rows", "rows after the last and padding requests"])
@pytest.mark.usefixtures("programs")
def test_results_are_rounded_as_the_product_would(name: str) -> None:
    """Bit for bit, by the program that has them, or by the one that adds up splits."""
    inputs = build(replace(CASES[name], head_dim=64, heads=4))
    wanted = run(inputs, inputs.cache.clone())
    rounding = Rounding("group", 32)
    assert tiling.fits_rounding(inputs.plan.shape, len(wanted), rounding)
    with poisoned_memory():
        padded, found_scales = kernel.attend_projection_kernel(
            *inputs.arguments(inputs.cache.clone()), writes=inputs.writes, rounding=rounding
        )
    found = RoundedRows(padded, found_scales, len(wanted), wanted.dtype)
    numbers, scales = round_rows(wanted, rounding, None, torch.float8_e4m3fn)
    rows = int(inputs.plan.starts[-1])
    assert torch.equal(found.numbers.float(), numbers.float())
    assert torch.equal(found.scales[:rows], scales[:rows])
    assert not found.scales[rows:].any()


def test_what_does_not_fit_is_rounded_by_the_product() -> None:
    shape = build(CASES["verify rows"]).plan.shape
    blocks = Rounding("group", 128)
    for head_dim, rows, rounding, fits in (
        (256, 8, blocks, True),
        (512, 128, blocks, True),
        (128, 8, blocks, False),  # a group has numbers of both halves
        (384, 8, blocks, False),
        (256, 129, blocks, False),
        (256, 8, Rounding("token"), False),
    ):
        found = tiling.fits_rounding(replace(shape, head_dim=head_dim), rows, rounding)
        assert found is fits, (head_dim, rows, rounding)
