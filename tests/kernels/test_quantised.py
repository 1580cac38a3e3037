"""Rounding of rows to e4m3 and products with quantised matrices are what checkpoints mean."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from hydraspec_kernels.moe import quantised as quantised_experts
from hydraspec_kernels.moe import quantised_moe
from hydraspec_kernels.quantised import (
    E4M3,
    QuantisedMatrix,
    Rounding,
    quantised_linear,
    rounded_rows,
    row_maxima,
    unpacked,
)
from hydraspec_kernels.quantised.round_kernel import round_rows
from quantised_reference import expert_sums, rounded
from torch import Tensor
from torch.nn.functional import silu

from hydraspec.models.checkpoint.quantization import Scheme, decode, encode

TYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
ROUNDINGS = {
    "float": Rounding("float"),
    "token": Rounding("token"),
    "group 128": Rounding("group", 128),
    "group 10": Rounding("group", 10),
    "static": Rounding("static", scale=torch.tensor([[0.004]])),
}
WIDTH = 300  # neither group divides it


def rows_of(count: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Rows of very different sizes, one of them zero."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, WIDTH, generator=draw, dtype=torch.float64)
    x *= torch.logspace(-3, 3, count, dtype=torch.float64)[:, None]
    x[count // 2] = 0
    return x.to(dtype)


def scheme_of(rounding: Rounding, rows: int | None, columns: int | None) -> Scheme:
    return Scheme(
        kind="fp8",
        rows=rows,
        columns=columns,
        inputs=rounding.kind,
        group=rounding.group or None,
        input_scale=None if rounding.scale is None else "input_scale",
    )


def matrix_of(weight: Tensor, scheme: Scheme, rounding: Rounding) -> tuple[QuantisedMatrix, Tensor]:
    """A matrix [N, K] in a scheme, and its numbers times scales in float64."""
    n, k = weight.shape
    stored = encode(weight, scheme, scale_dtype=torch.bfloat16)
    scales = stored["weight_scale"].float()
    matrix = QuantisedMatrix(
        stored[scheme.data], scales, scheme.rows or n, scheme.columns or k, k, rounding
    )
    return matrix, decode(stored, scheme, k).double()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("kind", ROUNDINGS)
def test_rows_round_as_published(kind: str, dtype: torch.dtype) -> None:
    """In float32 from narrow types, in float64 from float64; finite for zeros."""
    x, rounding = rows_of(9, dtype), ROUNDINGS[kind]
    found = rounded_rows(x, rounding)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    assert found.dtype is wide
    expected = rounded(x.to(wide), scheme_of(rounding, 1, None), rounding.scale)
    assert torch.equal(found, expected)
    assert not found[4].any()
    assert found.isfinite().all()


@pytest.mark.parametrize("kind", ROUNDINGS)
def test_a_row_rounds_alike_beside_any_others(kind: str) -> None:
    x, rounding = rows_of(70), ROUNDINGS[kind]
    whole = rounded_rows(x, rounding)
    for count in (1, 2, 3, 8, 33):
        parts = [rounded_rows(part, rounding) for part in x.split(count)]
        assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(rounded_rows(x.flip(0), rounding), whole.flip(0))
    assert torch.equal(rounded_rows(x[:, None], rounding)[:, 0], whole)


def by_kernel(device: str) -> Callable[[Tensor, Rounding], Tensor]:
    """Rounding by the Triton kernel on a device."""

    def run(x: Tensor, rounding: Rounding) -> Tensor:
        scale = None if rounding.scale is None else rounding.scale.to(device)
        there = Rounding(rounding.kind, rounding.group, scale)
        numbers, scales = round_rows(x.to(device), there, None, torch.float16)
        scales = scales.repeat_interleave(rounding.group or x.shape[1], 1)[:, : x.shape[1]]
        return (numbers.float() * scales).cpu()

    return run


each_way = pytest.mark.parametrize(
    "run",
    [
        pytest.param(rounded_rows, id="reference"),
        pytest.param(by_kernel("cpu"), id="kernel"),
        pytest.param(by_kernel("cuda"), id="kernel on a GPU", marks=pytest.mark.gpu),
    ],
)


@each_way
def test_numbers_are_divided_by_the_scale(run: Callable[[Tensor, Rounding], Tensor]) -> None:
    """17 lies between 16 and 18. Times the scale's reciprocal, some of these come to lie above."""
    scale = torch.arange(3.0, 4001.0, 2)[:, None]
    x = scale * torch.tensor([448.0, 17.0])
    multiplied = (x * (1 / scale)).clamp(-448, 448).to(E4M3).float()
    risky = multiplied[:, 1] == 18
    assert risky.any()
    x, scale = x[risky], scale[risky]
    assert torch.equal(run(x, Rounding("token")), scale * torch.tensor([448.0, 16.0]))


@each_way
def test_every_number_is_the_nearest_of_the_format(
    run: Callable[[Tensor, Rounding], Tensor],
) -> None:
    """Ties go to the even one. The format is rebuilt from 4 bits of exponent and 3 of fraction."""
    exponents, fractions = torch.arange(16.0)[:, None], torch.arange(8.0) / 8
    normal = 2.0 ** (exponents - 7) * (1 + fractions)
    grid = normal.where(exponents > 0, 2.0**-6 * fractions).flatten()[:-1]  # the last is NaN
    assert grid.max() == 448
    middles = (grid[1:] + grid[:-1]) / 2
    even = torch.where(torch.arange(len(middles)) % 2 == 0, grid[:-1], grid[1:])
    static = Rounding("static", scale=torch.ones(1, 1))
    for sign in (1, -1):
        for numbers, nearest in (
            (grid, grid),
            (middles, even),
            (middles * (1 - 1e-6), grid[:-1]),
            (middles * (1 + 1e-6), grid[1:]),
        ):
            assert torch.equal(run(sign * numbers[None], static)[0], sign * nearest)


@each_way
def test_the_least_scales(run: Callable[[Tensor, Rounding], Tensor]) -> None:
    """A row's largest magnitude counts as 1/512 at least, a group's as 1e-10."""
    x = torch.full((1, 4), 1e-4)
    number = torch.tensor(1e-4 * 448 * 512).to(E4M3).float()
    expected = (number * torch.tensor(1 / (448 * 512))).expand(1, 4)
    assert torch.equal(run(x, Rounding("token")), expected)
    assert run(x, Rounding("group", 2)).sub(x).abs().max() < 1e-9
    found = run(torch.full((1, 4), 1e-12), Rounding("group", 2))
    torch.testing.assert_close(found, torch.full((1, 4), 4.5e-10 / 448), rtol=1e-6, atol=0)


@each_way
def test_static_scales_clamp(run: Callable[[Tensor, Rounding], Tensor]) -> None:
    x = torch.tensor([[3.0, -1e30, 0.5, 448.0]])
    found = run(x, Rounding("static", scale=torch.tensor([[1 / 448]])))
    torch.testing.assert_close(found, torch.tensor([[1.0, -1.0, 0.5, 1.0]]), rtol=1e-6, atol=0)


def test_a_part_of_rows_rounds_as_the_whole() -> None:
    """Ranks that divide a row give each the largest magnitude of all of it."""
    x, token = rows_of(5), Rounding("token")
    parts = [rounded_rows(part, token, row_maxima(x)) for part in x.split(100, -1)]
    assert torch.equal(torch.cat(parts, -1), rounded_rows(x, token))


def assert_sums(found: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """Outputs [T, N] are rounded once from sums in float32, or float64 for float64."""
    assert found.dtype is dtype
    size = exact.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    tolerance = 1e-14 if dtype is torch.float64 else max(1e-6, torch.finfo(dtype).eps)
    assert ((found.double() - exact).abs() <= tolerance * size).all()


MATRICES = {
    "a scale for all": (None, None),
    "a scale per row": (1, None),
    "blocks": (128, 128),
    "odd blocks": (24, 10),
}


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("blocks", MATRICES)
@pytest.mark.parametrize("kind", ["token", "group 10", "static"])
def test_products_in_fp8(kind: str, blocks: str, dtype: torch.dtype) -> None:
    rounding = ROUNDINGS[kind]
    weight = torch.randn(130, WIDTH, generator=torch.Generator().manual_seed(1))
    scheme = scheme_of(rounding, *MATRICES[blocks])
    matrix, decoded = matrix_of(weight, scheme, rounding)
    assert torch.equal(unpacked(matrix, dtype), decoded.to(dtype))
    x = rows_of(7, dtype)[1:6]
    expected = rounded_rows(x, rounding).double() @ decoded.t()
    assert_sums(quantised_linear(x, matrix), expected, dtype)
    first = 2 * matrix.rows if matrix.rows < 60 else 0
    assert torch.equal(unpacked(matrix.from_row(first), dtype), decoded[first:].to(dtype))


@pytest.mark.parametrize("group", [32, 100, None])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_products_in_int4(group: int | None, dtype: torch.dtype) -> None:
    """Rows are not rounded. A width that eight does not divide is padded in the file."""
    weight = torch.randn(21, WIDTH, generator=torch.Generator().manual_seed(2))
    scheme = Scheme(kind="int4", rows=1, columns=group, inputs="float")
    matrix, decoded = matrix_of(weight, scheme, ROUNDINGS["float"])
    assert torch.equal(unpacked(matrix, dtype), decoded.to(dtype))
    x = rows_of(6, dtype)
    assert_sums(quantised_linear(x, matrix), x.double() @ decoded.t(), dtype)


def test_every_number_of_e4m3_is_read() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F].view(E4M3)[None]  # without NaN
    matrix = QuantisedMatrix(codes, torch.ones(1, 1), 1, 254, 254, ROUNDINGS["float"])
    for dtype in TYPES:
        assert torch.equal(unpacked(matrix, dtype), codes.to(dtype))


def test_rows_inside_a_block_are_refused() -> None:
    matrix, _ = matrix_of(
        torch.randn(48, 20), scheme_of(ROUNDINGS["token"], 24, 10), Rounding("token")
    )
    with pytest.raises(AssertionError, match="inside a block of 24"):
        matrix.from_row(12)


def expert_stack(
    count: int, n: int, k: int, scheme: Scheme, rounding: Rounding, seed: int
) -> tuple[QuantisedMatrix, Tensor]:
    """Matrices [E, N, K] of experts, and their numbers times scales."""
    weights = torch.randn(count, n, k, generator=torch.Generator().manual_seed(seed)) * k**-0.5
    pairs = [matrix_of(weight, scheme, rounding) for weight in weights]
    first = pairs[0][0]
    stacked = QuantisedMatrix(
        torch.stack([matrix.data.view(torch.uint8) for matrix, _ in pairs]).view(E4M3),
        torch.stack([matrix.scales for matrix, _ in pairs]),
        first.rows,
        first.columns,
        k,
        rounding,
    )
    return stacked, torch.stack([decoded for _, decoded in pairs])


@pytest.mark.parametrize("rows", [1, 2, 40])
@pytest.mark.parametrize(("kind", "blocks"), [("token", (1, None)), ("group 10", (24, 10))])
@pytest.mark.parametrize("chunk", [1, 1 << 26])
def test_experts_round_their_inputs_and_inner_rows(
    kind: str,
    blocks: tuple[int, int | None],
    rows: int,
    chunk: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Few chosen experts are gathered, else all run, in chunks: the same sums in float64."""
    monkeypatch.setattr(quantised_experts, "MAX_CHUNK_NUMBERS", chunk)
    count, size, inner, rounding = 9, 50, 30, ROUNDINGS[kind]
    scheme = scheme_of(rounding, *blocks)
    (gate, g), (up, u), (down, d) = (
        expert_stack(count, n, k, scheme, rounding, seed)
        for seed, (n, k) in enumerate([(inner, size), (inner, size), (size, inner)])
    )
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(rows, size, generator=draw, dtype=torch.float64)
    weights = torch.rand(rows, 2, generator=draw, dtype=torch.float64)
    chosen = torch.stack([torch.randperm(count, generator=draw)[:2] for _ in range(rows)])
    found = quantised_moe(x, weights, chosen, (gate, up, down), "silu")
    plain = SimpleNamespace(gate_up_proj=torch.cat((g, u), 1), down_proj=d, act_fn=silu)
    expected = expert_sums(plain, lambda y: rounded(y, scheme), x, chosen, weights)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
