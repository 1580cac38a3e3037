"""Linears of few rows: all kernels against the reference, and the tiling of a shape."""

import itertools

import pytest
import torch
from hydraspec_kernels.linear import (
    gated_linear,
    linear,
    linear_partials,
    plan,
    scaled_gelu_linear,
)
from hydraspec_kernels.linear.kernel import launch
from hydraspec_kernels.linear.plan import (
    GATED,
    MOST_ROWS,
    SpecializedTiling,
    Tiling,
    tiling_for,
    tiling_of,
)
from hydraspec_kernels.linear.reference import (
    gated_linear_reference,
    linear_reference,
    scaled_gelu_linear_reference,
)
from torch import Tensor

# Sums of 75 products of standard normals, in another order: float32 rounding, times the gate.
SUM_ERROR = 1e-4
# The error that bfloat16 outputs allow: half a unit in the last place, 2^-9, in the mean less.
BF16_ERROR, FP16_ERROR, FP32_ERROR = 4e-3, 5e-4, 1e-6

# One of each kind, at block sizes that 75 columns and 22 rows do not fill.
TILINGS = {
    "one row": Tiling(False, 1, 4, 32),
    "one row, whole": Tiling(False, 1, 2, 128),
    "tiles": Tiling(True, 16, 16, 32),
    "slices": Tiling(True, 16, 8, 16, slices=2, stages=2),
    "rows in blocks": Tiling(True, 4, 8, 32),
}
ENDS = ["", "softcap", "scaled_gelu", *GATED]


def operands(rows: int, k: int, n: int, *, dtype=torch.float32, device="cpu", seed: int = 0):
    """x [rows, k] out of a wider tensor, a [k, n] view of [n, k] weights, bias and a factor."""
    draw = torch.Generator().manual_seed(seed)
    wide = torch.randn(rows + 1, k + 16, generator=draw)
    weight, bias = torch.randn(n, k, generator=draw), torch.randn(n, generator=draw)
    factor = torch.randn(rows, 3, n, generator=draw)
    x, weight, bias, factor = (a.to(device, dtype) for a in (wide, weight, bias, factor))
    x[rows:], x[:, k:] = torch.nan, torch.nan  # neither a row nor a column too many
    return x[:rows, :k], weight.t(), bias, factor[:, 1]


def expected(x: Tensor, weight: Tensor, bias: Tensor | None, factor: Tensor, end: str) -> Tensor:
    if end == "scaled_gelu":
        return scaled_gelu_linear_reference(x, weight, factor)
    if end in GATED:
        return gated_linear_reference(x, weight, bias, end)
    return linear_reference(x, weight, bias, 3.0 if end == "softcap" else None)


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end or "plain")
@pytest.mark.parametrize("tiling", TILINGS.values(), ids=TILINGS.keys())
def test_the_kernels_equal_the_reference(tiling: Tiling, end: str):
    for rows in (1,) if not tiling.dots else (1, 3, 17) if tiling.m < 16 else (1, 16):
        x, weight, bias, factor = operands(rows, 75, 22)
        kept = None if end == "scaled_gelu" else bias
        want = expected(x, weight, kept, factor, end)
        out = torch.full_like(want, torch.nan)
        got = launch(out, x, weight, tiling, end=end, bias=kept, factor=factor, softcap=3.0)
        assert got is out
        assert torch.allclose(got, want, atol=SUM_ERROR), f"{rows} rows"


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end or "plain")
def test_float32_has_a_program_for_each_row(end: str):
    """The library's products of 8 to 16 rows are 10 times as slow on a device."""
    x, weight, bias, factor = operands(17, 75, 22)
    tiling = tiling_for(x, weight, end)
    assert tiling == Tiling(False, 1, 8, 128)
    kept = None if end == "scaled_gelu" else bias
    want = expected(x, weight, kept, factor, end)
    out = torch.full_like(want, torch.nan)
    launch(out, x, weight, tiling, end=end, bias=kept, factor=factor, softcap=3.0)
    assert torch.allclose(out, want, atol=SUM_ERROR)


@pytest.mark.parametrize("splits", [2, 3])
@pytest.mark.parametrize("name", ["one row", "tiles", "slices"])
def test_partial_sums_add_up(name: str, splits: int):
    like = TILINGS[name]
    tiling = Tiling(like.dots, like.m, like.rows, like.k, splits, like.slices)
    x, weight, _, _ = operands(1 if like.m == 1 else 5, 75, 22)
    parts = launch(torch.full((splits, x.shape[0], 22), torch.nan), x, weight, tiling)
    assert torch.allclose(parts.sum(0), x @ weight, atol=SUM_ERROR)
    # K is split at full steps: every part is the product of its own columns.
    steps = -(-75 // tiling.step)
    for split, part in enumerate(parts):
        own = slice(
            split * steps // splits * tiling.step, (split + 1) * steps // splits * tiling.step
        )
        assert torch.allclose(part, x[:, own] @ weight[own], atol=SUM_ERROR)


def test_on_the_cpu_the_reference_runs():
    """Published rounding: the product is rounded before what follows, and S is 1 in x's dtype."""
    x, weight, bias, factor = operands(3, 75, 22, dtype=torch.bfloat16)
    assert torch.equal(linear(x, weight), torch.mm(x, weight))
    assert torch.equal(linear(x, weight, bias), torch.addmm(bias, x, weight))
    assert torch.equal(linear_partials(x, weight), torch.mm(x, weight))
    assert torch.allclose(linear(x, weight, softcap=3.0).abs().max(), torch.tensor(3.0).bfloat16())
    for activation in GATED:
        gate, up = torch.mm(x, weight).chunk(2, -1)
        act = torch.nn.functional.silu(gate)
        if activation == "gelu_tanh":
            act = torch.nn.functional.gelu(gate, approximate="tanh")
        assert torch.equal(gated_linear(x, weight, activation=activation), act * up)
    gelu = torch.nn.functional.gelu(torch.mm(x, weight), approximate="tanh")
    assert torch.equal(scaled_gelu_linear(x, weight, factor), gelu * factor)


def test_what_the_kernels_do_not_take_goes_to_the_library():
    x, weight, _, _ = operands(4, 2560, 2560, dtype=torch.bfloat16)
    assert tiling_for(x, weight) is not None
    assert tiling_for(x, weight.contiguous()) is None, "N is contiguous"
    assert tiling_for(x.t().contiguous().t(), weight) is None, "x in columns"
    assert tiling_for(x.float(), weight.float()) is None, "many products in float32"
    assert tiling_for(x[:0], weight) is None
    assert tiling_of(MOST_ROWS + 1, 2560, 2560, partials=True) is None


def test_a_warp_copies_only_what_is_aligned(monkeypatch: pytest.MonkeyPatch):
    """TMA takes addresses and row strides that 16 bytes divide; others keep a kernel or go to the
    library.
    """
    monkeypatch.setattr(plan, "is_hopper", lambda device: True)
    wide, weights = (torch.zeros(n, 264, dtype=torch.bfloat16) for n in (64, 16385))
    aligned = weights[:16384, :256].t()
    assert isinstance(tiling_for(wide[:, 8:], aligned), SpecializedTiling)
    assert isinstance(tiling_for(wide[3:50, :256], aligned), SpecializedTiling)
    assert not isinstance(tiling_for(wide[:, 1:257], aligned), SpecializedTiling), "address of x"
    assert not isinstance(tiling_for(wide[:, :256], weights[1:, 4:260].t()), SpecializedTiling), (
        "of the weight"
    )
    odd = torch.zeros(64, 257, dtype=torch.bfloat16)[:, :256]
    assert not isinstance(tiling_for(odd, aligned), SpecializedTiling), "rows of x"


SIZES = (64, 75, 256, 2048, 2560, 5376, 10240, 21504)


@pytest.mark.parametrize("copied", [False, True], ids=["threads copy", "a warp copies"])
@pytest.mark.parametrize("partials", [False, True])
def test_every_tiling_can_be_launched(partials: bool, copied: bool):
    """Powers of two, no empty range of K, and tiles that fit into the shared memory."""
    for rows, k, n in itertools.product((1, 2, 16, 17, 32, 33, 64, 65, 128), SIZES, SIZES):
        for end in [""] if partials else ENDS:
            tiling = tiling_of(rows, k, n, end, partials=partials, copied=copied)
            if tiling is None:
                continue
            case = f"{rows} x {k} x {n} {end}: {tiling}"
            assert partials or tiling.splits == 1, case
            assert 1 <= tiling.splits <= -(-k // tiling.step), case
            if isinstance(tiling, SpecializedTiling):
                assert copied, case
                check_specialized(tiling, rows, end, case)
                continue
            for size in (tiling.m, tiling.rows, tiling.k, tiling.slices, tiling.warps):
                assert size & (size - 1) == 0, case
            stages = tiling.stages if tiling.dots else 0
            assert 2 * (tiling.rows + tiling.m) * tiling.step * stages <= 227 << 10, case
            assert not tiling.dots or tiling.k >= 16, case


def check_specialized(tiling: SpecializedTiling, rows: int, end: str, case: str) -> None:
    """Four or eight multiplying warps, accumulators that fit into their registers."""
    assert tiling.m in (64, 128), case
    assert end != "scaled_gelu", case
    assert 1 <= len(tiling.columns) <= 3, case
    assert all(size in (8, 16, 32, 64, 128, 256) for size in tiling.columns), case
    branches = 2 if end in GATED else 1
    assert branches * tiling.columns[0] <= 256, case
    assert branches * sum(tiling.columns) <= 352, case
    assert branches == 1 or tiling.k == 64, f"{case}: branches lie one below the other"
    assert tiling.stages >= 2, case
    assert tiling.shared_bytes(end in GATED) <= 226 << 10, case


@pytest.mark.parametrize(
    ("rows", "k", "n", "end"),
    [
        *[(1, 2560, 64, "scaled_gelu"), (20, 2560, 64, "scaled_gelu"), (100, 1024, 64, "partials")],
        *[(8, 2048, 72, "partials"), (70, 256, 300, "partials"), (8, 256, 512, "silu")],
        *[(40, 256, 512, "gelu_tanh"), (6, 1040, 2100, ""), (48, 512, 4096, "")],
    ],
)
def test_shapes_with_the_tilings_they_get(rows: int, k: int, n: int, end: str):
    """Each rule of the plan at the smallest size that it applies to."""
    partials = end == "partials"
    end = "" if partials else end
    tiling = tiling_of(rows, k, n, end, partials=partials, copied=False)
    assert isinstance(tiling, Tiling)
    x, weight, _, factor = operands(rows, k, n)
    weight.mul_(k**-0.5)
    want = expected(x, weight, None, factor, end)
    out = torch.full((tiling.splits, *want.shape), torch.nan)
    launch(out if partials else out[0], x, weight, tiling, end=end, factor=factor)
    assert torch.allclose(out.sum(0), want, atol=SUM_ERROR)


def test_rows_of_a_bucket_share_a_tiling():
    """A row's result does not depend on how many others came with it, within a padded shape."""
    for low, high in ((2, 16), (17, 32), (33, 64), (65, 128)):
        assert tiling_of(low, 2560, 6144) == tiling_of(high, 2560, 6144)


GPU_SHAPES = [
    *[(1, 2560, 256), (3, 256, 2560), (5, 2560, 3072), (8, 5120, 256), (16, 2048, 2560)],
    *[(17, 10240, 2560), (32, 2560, 20480), (33, 2560, 6144), (64, 2560, 2560)],
    *[(128, 10240, 2560), (128, 2560, 256), (100, 256, 2560), (7, 2576, 2000)],
    *[(20, 8200, 2562), (40, 2568, 8706), (70, 2560, 2048), (100, 2560, 3072), (65, 2568, 9002)],
    *[(128, 16400, 4104), (33, 1032, 43008), (128, 1032, 43008), (64, 8192, 2564)],
    *[(64, 20480, 5120), (40, 16400, 5384)],
]


def gpu_error(got: Tensor, want: Tensor) -> float:
    """Relative error in the Euclidean norm; inf where anything is not finite."""
    error = (got.double() - want).norm() / want.norm()
    return float(error) if bool(torch.isfinite(got).all()) else float("inf")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "bound"),
    [(torch.bfloat16, BF16_ERROR), (torch.float16, FP16_ERROR), (torch.float32, FP32_ERROR)],
    ids=str,
)
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
def test_on_the_gpu_equal_to_float64(shape: tuple[int, int, int], dtype: torch.dtype, bound: float):
    rows, k, n = shape
    x, weight, bias, factor = operands(rows, k, n, dtype=dtype, device="cuda", seed=rows)
    weight.mul_(k**-0.5)
    wide = [a.double() for a in (x, weight, bias, factor)]
    assert gpu_error(linear_partials(x, weight).double().sum(0), wide[0] @ wide[1]) < bound
    assert gpu_error(linear(x, weight, bias), expected(*wide, "")) < bound
    # Where the library runs, soft cap and activations round once more on the way.
    assert gpu_error(linear(x, weight, bias, softcap=3.0), expected(*wide, "softcap")) < 3 * bound
    for end in GATED:
        got = gated_linear(x, weight, bias, activation=end)
        assert gpu_error(got, expected(*wide, end)) < 3 * bound
    got = scaled_gelu_linear(x, weight, factor)
    assert gpu_error(got, expected(*wide, "scaled_gelu")) < 3 * bound


@pytest.mark.gpu
def test_on_the_gpu_float32_tiles_are_not_tf32():
    """The library takes float32; the kernels can too, with products as exact as its own."""
    x, weight, _, _ = operands(16, 2560, 256, device="cuda")
    got = launch(x.new_empty(16, 256), x, weight, Tiling(True, 16, 16, 32, stages=2))
    assert gpu_error(got, x.double() @ weight.double()) < FP32_ERROR


# Warp-specialised: three products, uneven splits of K, several tiles per program, two row blocks.
BROAD = {
    "one product": SpecializedTiling(64, (128,), stages=8, registers=128),
    "three products": SpecializedTiling(128, (64, 32, 16), stages=3),
    "widest": SpecializedTiling(128, (128, 32, 16), stages=3),
    "a narrow last one": SpecializedTiling(64, (64, 8), stages=5),
    "tiles in turn": SpecializedTiling(128, (64,), stages=4, most=3, registers=96),
    "more stages than steps": SpecializedTiling(64, (16,), stages=8),
    "rows in blocks": SpecializedTiling(64, (32,), k=128, stages=6, registers=128),
}


@pytest.mark.gpu
@pytest.mark.parametrize("end", ["", "softcap", *GATED], ids=lambda end: end or "plain")
@pytest.mark.parametrize("name", BROAD)
def test_on_the_gpu_copied_tiles_equal_float64(name: str, end: str):
    """Rows, columns and K that fill no tile; also fewer steps than stages."""
    tiling = BROAD[name]
    if end in GATED and (tiling.k != 64 or tiling.shared_bytes(True) > 226 << 10):
        pytest.skip("no tiling for two branches")
    for rows, k, n in ((tiling.m - 27, 1016, 1002), (100, 136, 330), (1, 72, 14)):
        x, weight, bias, factor = operands(rows, k, n, dtype=torch.bfloat16, device="cuda")
        weight.mul_(k**-0.5)
        want = expected(*(a.double() for a in (x, weight, bias, factor)), end)
        out = torch.full(want.shape, torch.nan, dtype=x.dtype, device="cuda")
        launch(out, x, weight, tiling, end=end, bias=bias, softcap=3.0)
        assert gpu_error(out, want) < BF16_ERROR, f"{rows} x {k} x {n}"


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 2, 3, 5])
def test_on_the_gpu_copied_partial_sums_add_up(splits: int):
    tiling = SpecializedTiling(64, (128,), splits, stages=4, registers=128)
    x, weight, _, _ = operands(50, 840, 1003, dtype=torch.bfloat16, device="cuda")
    parts = torch.full((splits, 50, 1003), torch.nan, device="cuda")
    launch(parts, x, weight, tiling)
    for split, part in enumerate(parts):
        own = slice(split * 14 // splits * 64, (split + 1) * 14 // splits * 64)
        assert gpu_error(part, x[:, own].double() @ weight[own].double()) < SUM_ERROR


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "k", "n"), [(64, 2560, 9216), (128, 2560, 9216), (32, 8192, 5376)]
)
def test_on_the_gpu_a_rows_result_does_not_depend_on_how_many_there_are(rows: int, k: int, n: int):
    x, weight, _, _ = operands(rows, k, n, dtype=torch.bfloat16, device="cuda")
    few = rows // 2 + 1
    assert torch.equal(linear(x, weight)[:few], linear(x[:few], weight))
    assert torch.equal(linear_partials(x, weight)[:, :few], linear_partials(x[:few], weight))


@pytest.mark.gpu
def test_on_the_gpu_a_rows_result_does_not_depend_on_the_others():
    x, weight, _, _ = operands(16, 2560, 3072, dtype=torch.bfloat16, device="cuda")
    alone = linear(torch.cat([x[:5], torch.zeros_like(x[5:])]), weight)
    assert torch.equal(linear(x, weight)[:5], alone[:5])
    assert torch.equal(linear(x[:5], weight), alone[:5])
