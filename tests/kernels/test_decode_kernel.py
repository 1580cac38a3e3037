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
from hydraspec_kernels.attention import attend_projection, counters, tiling
from hydraspec_kernels.attention import decode_kernel as kernel
from hydraspec_kernels.attention.plan import RowMask
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
    "block": Case((4, 6, 1), (12, 70, 9), mask="block"),
    "block, all of it new": Case((7,), (7,), mask="block"),
    "block, several tiles": Case((9, 3), (21, 50), heads=8, kv_heads=1, mask="block"),
    "block longer than its window": Case((9, 9), (12, 40), window=3, mask="block"),
    "block beside padding": Case((4, 4, 4), (12, 0, 40), window=5, mask="block", tail=3),
    "causal block": Case((4, 6), (12, 70), window=21, mask="causal_block"),
}


WAYS = ("few splits", "many, second kernel", "none, transposed")
# In all of these ways; the interpreter takes half a second for each, and a device runs every case.
SPLIT = (
    "verify rows over a border of splits",
    "rows differ",
    "window shorter than the rows, several tiles",
    "rows after the last and padding requests",
    "block, several tiles",
    "causal block",
)


@pytest.fixture
def programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    how = request.param
    full = 8 if how == "few splits" else 32 if how.startswith("many") else 1
    monkeypatch.setattr(tiling, "FULL_DEVICE", full)
    monkeypatch.setattr(tiling, "LEAST_SHARE", 1)
    reached = dict.fromkeys(tiling.REACHED, 1e-3)
    reached |= {1: 0.5, 4: 1e3 if how == "none, transposed" else 1e-3}
    monkeypatch.setattr(tiling, "REACHED", reached)
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
@pytest.mark.parametrize("mask", ["block", "causal_block"])
@pytest.mark.parametrize("model", ["128 wide", "31B sliding"])
def test_compiled_blocks(model: str, mask: RowMask) -> None:
    for rows, lens in (((8,) * 3, (640, 8, 3000)), ((16,) * 8, (800,) * 8), ((16,), (900,))):
        case = replace(MODELS[model], rows=rows, lens=lens, dtype=torch.bfloat16, device="cuda")
        check(build(replace(case, mask=mask, block_size=16, tail=5)))


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
@pytest.mark.parametrize(
    ("model", "requests"), [("31B sliding", 16), ("31B sliding", 32), ("128 wide", 48)]
)
def test_compiled_with_two_programs_a_multiprocessor(model: str, requests: int) -> None:
    lens = tuple(600 + 7 * b for b in range(requests))
    base = replace(MODELS[model], lens=lens, dtype=torch.bfloat16, device="cuda", block_size=16)
    inputs = build(replace(base, rows=(16,) * requests))
    assert tiling.fits_decode(inputs.plan)
    check(inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("short_keys", [0, 4096])
@pytest.mark.parametrize(
    ("requests", "rows"), [(1, 8), (1, 16), (2, 16), (4, 16), (8, 8), (8, 16), (16, 16)]
)
def test_compiled_tiles_of_narrow_heads(
    requests: int, rows: int, short_keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those for short and for long sequences, whose splits are added up in one and apart."""
    monkeypatch.setattr(tiling, "SHORT_KEYS", short_keys)
    lens = tuple(3000 - 700 * (b % 4) + b for b in range(requests))
    base = replace(MODELS["128 wide"], lens=lens, dtype=torch.bfloat16, device="cuda")
    check(build(replace(base, rows=(rows,) * requests, block_size=16, tail=5)))


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
