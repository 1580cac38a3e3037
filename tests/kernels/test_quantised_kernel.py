"""The kernels for few rows and a quantised matrix, against the reference.

Catches a number that is not rounded to its nearest neighbour, a scale of another block, row or
group, an edge that 16, 32 or 128 do not divide, and memory that is not written.
"""

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from hydraspec_kernels.activation.kernel import gated_activation_cuda, rounded_activation_cuda
from hydraspec_kernels.norms.add_norm_kernel import add_norm_cuda
from hydraspec_kernels.quantised import (
    QuantisedMatrix,
    Rounding,
    quantised_linear,
    quantised_partials,
    rounded_rows,
)
from hydraspec_kernels.quantised.e4m3_kernel import rounded_row
from hydraspec_kernels.quantised.kernel import launch
from hydraspec_kernels.quantised.plan import LEAST_RANGE, tiles_for
from hydraspec_kernels.quantised.records import MOST_ROWS
from hydraspec_kernels.quantised.reference import (
    E4M3_MAX,
    LEAST_GROUP_MAX,
    quantised_linear_reference,
    unpacked_reference,
)
from hydraspec_kernels.quantised.round_kernel import (
    round_rows,
    rounded_for_blocks,
    rounded_in_type,
    unpack,
)
from hydraspec_kernels.runtime.launch import is_hopper
from kernel_places import DEVICES, poison
from torch import Tensor

from hydraspec.models.checkpoint.quantization import Scheme, encode

ROUNDINGS = {
    "token": Rounding("token"),
    "group 32": Rounding("group", 32),
    "group 128": Rounding("group", 128),
    "static": Rounding("static", scale=torch.tensor([[0.004]])),
}
SCHEMES = {
    "rows": Scheme(kind="fp8", rows=1, columns=None, inputs="token"),
    "blocks": Scheme(kind="fp8", rows=128, columns=128, inputs="group", group=128),
    "blocks beside rows": Scheme(kind="fp8", rows=128, columns=128, inputs="token"),
    "rows beside groups": Scheme(kind="fp8", rows=1, columns=None, inputs="group", group=128),
    "narrow blocks": Scheme(kind="fp8", rows=32, columns=32, inputs="group", group=32),
    "blocks beside tokens": Scheme(kind="fp8", rows=16, columns=32, inputs="token"),
    "one scale": Scheme(kind="fp8", rows=None, columns=None, inputs="token"),
    "weights alone": Scheme(kind="fp8", rows=1, columns=None, inputs="float"),
    "int4 groups": Scheme(kind="int4", rows=1, columns=32, inputs="float"),
    "int4 rows": Scheme(kind="int4", rows=1, columns=None, inputs="float"),
}
NARROW = {"cpu": torch.float16, "cuda": torch.bfloat16}  # see kernel_places


def rows_of(count: int, width: int, device: str, dtype: torch.dtype) -> Tensor:
    """Rows of very different sizes out of a wider tensor, one of them zero."""
    draw = torch.Generator().manual_seed(count)
    wide = torch.randn(count, width + 16, generator=draw)
    wide *= torch.logspace(-2, 2, count)[:, None]
    wide[count // 2] = 0
    wide[:, width:] = torch.nan
    return wide.to(device, dtype)[:, :width]


def matrix_of(n: int, k: int, scheme: Scheme, device: str) -> QuantisedMatrix:
    stored = encode(torch.randn(n, k, generator=torch.Generator().manual_seed(n)), scheme)
    data, scales = stored[scheme.data].to(device), stored[scheme.scale].float().to(device)
    rounding = Rounding(scheme.inputs, scheme.group or 0)
    return QuantisedMatrix(data, scales, scheme.rows or n, scheme.columns or k, k, rounding)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [96, 300])
@pytest.mark.parametrize("name", ROUNDINGS)
def test_rows_round_to_the_reference_s_bits(
    name: str, width: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounding = ROUNDINGS[name]
    if rounding.scale is not None:
        rounding = Rounding("static", scale=rounding.scale.to(device))
    poison(monkeypatch)
    for dtype in (torch.float32, NARROW[device]):
        x = rows_of(9, width, device, dtype)
        wanted, size = rounded_rows(x, rounding), rounding.group or width
        for kind in (torch.float16, torch.float8_e4m3fn):
            numbers, scales = round_rows(x, rounding, None, kind)
            groups = numbers.float().split(size, 1)
            found = [part * scales[:, i : i + 1] for i, part in enumerate(groups)]
            assert torch.equal(torch.cat(found, 1), wanted)


@triton.jit
def _rounded_row_kernel(
    numbers_ptr, scales_ptr, x_ptr, LEAST: tl.constexpr, MOST: tl.constexpr, GROUP: tl.constexpr
):
    k = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    v = tl.load(x_ptr + k).to(tl.float32)
    numbers, scale = rounded_row(v, GROUP // 2, LEAST, MOST, GROUP)
    tl.store(numbers_ptr + k, numbers.to(numbers_ptr.dtype.element_ty))
    tl.store(scales_ptr + tl.program_id(0) * 2 + tl.arange(0, 2), scale)


@pytest.mark.parametrize(
    ("device", "count"), [("cpu", 20), pytest.param("cuda", 1024, marks=pytest.mark.gpu)]
)
def test_numbers_of_their_own_scale_are_divided_exactly(device: str, count: int) -> None:
    """Every fraction of 11 bits beside every one that a largest magnitude may have."""
    draw = torch.Generator().manual_seed(count)
    fractions = torch.arange(1024) / 1024 + 1
    tops = fractions[torch.randperm(1024, generator=draw)[:count]]
    small = fractions.repeat(count, 1) * 2.0 ** -torch.randint(1, 12, (count, 1), generator=draw)
    small = torch.nn.functional.pad(small, (0, 10 * 127 - 1024)).view(count, 10, 127)
    x = torch.cat([tops[:, None, None].expand(count, 10, 1), small], 2).view(-1, 128)
    x = torch.cat([x, torch.full((1, 128), 2.0**-24), torch.zeros(1, 128)])
    x = x.to(device, torch.float16)
    wanted, of_groups = round_rows(x, Rounding("group", 128), None, torch.float8_e4m3fn)
    numbers, scales = torch.empty_like(wanted), torch.empty_like(of_groups)
    _rounded_row_kernel[(len(x) // 2,)](
        numbers, scales, x, LEAST=LEAST_GROUP_MAX, MOST=E4M3_MAX, GROUP=256
    )
    assert torch.equal(scales, of_groups)
    assert torch.equal(numbers.float(), wanted.float())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [8, 9])
def test_rows_for_blocks_are_padded_and_their_scales_lie_by_group(
    rows: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch)
    rounding, x = Rounding("group", 128), rows_of(rows, 384, device, NARROW[device])
    numbers, scales = rounded_for_blocks(x, rounding)
    wanted, by_row = round_rows(x, rounding, None, torch.float8_e4m3fn)
    padded = -(-rows // 4) * 4
    assert numbers.shape == (padded, 384)
    assert scales.stride() == (1, padded)
    assert torch.equal(numbers[:rows].float(), wanted.float())
    assert torch.equal(scales[:rows], by_row)
    assert not numbers[rows:].float().any()
    assert not scales[rows:].any()


@pytest.mark.gpu
def test_many_rows_times_blocks_are_the_reference_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the library on Hopper; numbers of blocks in K, and of rows, that are no multiple of 4."""
    poison(monkeypatch)
    for count, n, k in ((129, 1040, 1280), (300, 5376, 5376), (2048, 2064, 512)):
        matrix = matrix_of(n, k, SCHEMES["blocks"], "cuda")
        x = rows_of(count, k, "cuda", torch.bfloat16)
        if is_hopper(x.device):
            monkeypatch.setattr("hydraspec_kernels.quantised.unpacked", None)
        wanted = quantised_linear_reference(x.float(), matrix)
        for first in (0, 128):
            found = quantised_linear(x, matrix.from_row(first))
            assert found.shape == (count, n - first)
            most = wanted[:, first:].abs().amax(1).clamp(min=1e-20)
            error = (found.float() - wanted[:, first:]).abs().amax(1) / most
            assert error.max() < 0.01, (count, n, k, first)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", [1.0, 3e-5])
def test_what_is_too_large_rounds_to_the_largest(scale: float, device: str) -> None:
    rounding = Rounding("static", scale=torch.tensor([[scale]], device=device))
    sizes = (0.0, 0.1, 447, 465, 1e3, 1e5, 6e4, float("inf"))
    for dtype in (torch.float32, torch.float16):
        x = torch.tensor([sizes, sizes], device=device) * torch.tensor([[1], [-1]], device=device)
        x = x.to(dtype)
        for kind in (torch.float16, torch.float8_e4m3fn):
            numbers, scales = round_rows(x, rounding, None, kind)
            assert torch.equal(numbers.float() * scales, rounded_rows(x, rounding))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ROUNDINGS)
def test_many_rows_are_rounded_and_stay_in_their_type(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounding = ROUNDINGS[name]
    if rounding.scale is not None:
        rounding = Rounding("static", scale=rounding.scale.to(device))
    poison(monkeypatch)
    for rows, width in ((3, 300), (131, 2100 if device == "cuda" else 96)):
        x = rows_of(rows, width, device, NARROW[device])
        found = rounded_in_type(x, rounding, None)
        assert torch.equal(found, rounded_rows(x, rounding).to(x.dtype))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SCHEMES)
def test_a_matrix_is_unpacked_to_the_reference_s_bits(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch)
    matrix = matrix_of(70, 320, SCHEMES[name], device)
    for dtype in (torch.float32, NARROW[device]):
        assert torch.equal(unpack(matrix, dtype), unpacked_reference(matrix, dtype))
        rows = matrix.by_row().from_row(33)
        assert torch.equal(unpack(rows, dtype), unpacked_reference(rows, dtype))
        two = replace(
            rows, data=torch.stack([rows.data] * 2), scales=torch.stack([rows.scales, rows.scales])
        )
        assert torch.equal(unpack(two, dtype), unpacked_reference(two, dtype))


@pytest.mark.parametrize("device", DEVICES)
def test_rows_round_by_the_magnitudes_of_all_ranks(device: str) -> None:
    x = rows_of(5, 96, device, torch.float32)
    maxima = 2 * x.abs().amax(1, keepdim=True)
    numbers, scales = round_rows(x, Rounding("token"), maxima, torch.float16)
    assert torch.equal(numbers.float() * scales, rounded_rows(x, Rounding("token"), maxima))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [384, 300, 1400, 9000])
@pytest.mark.parametrize("name", ["token", "group 128"])
def test_a_norm_and_a_gate_round_as_the_product_would(
    name: str, width: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, into memory that is wider than the rows."""
    rounding, dtype = ROUNDINGS[name], NARROW[device]
    poison(monkeypatch)
    h, x = rows_of(5, width, device, dtype), rows_of(6, width, device, dtype)[1:]
    gain = rows_of(1, width, device, dtype)[0].contiguous() + 1
    options = {"post_weight": gain, "next_weight": gain, "eps": 1e-6, "scale": 0.5}
    wanted = add_norm_cuda(h.clone(), x, **options).y
    found = add_norm_cuda(h.clone(), x, **options, rounding=rounding).y
    both = rows_of(7, 2 * width, device, dtype).clamp(-30, 30)
    gated = gated_activation_cuda(both, "silu")
    pairs = [(wanted, found), (gated, rounded_activation_cuda(both, "silu", rounding))]
    for wanted, found in pairs:
        numbers, scales = round_rows(wanted, rounding, None, torch.float8_e4m3fn)
        assert found.padded.shape == (64, width)
        assert torch.equal(found.numbers.float(), numbers.float())
        assert torch.equal(found.scales, scales)
        some = torch.tensor([4, 1], device=device)
        chosen = found.index_select(0, some)
        assert torch.equal(chosen.numbers.float(), numbers[[4, 1]].float())
        assert torch.equal(chosen.scales, scales[[4, 1]])


SHAPES = [(1, 40, 96), (5, 70, 160), (17, 33, 104)]
LARGE = [(1, 4096, 4096), (6, 5376, 2112), (33, 1040, 5376), (128, 2064, 1000)]
# Programs of the warp-specialised kernel with two or three products, and with several tiles.
WIDE = [(5, 17000), (17, 34100), (40, 34100), (64, 24008), (128, 34100)]
LARGE += [(rows, n, 528) for rows, n in WIDE]


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize(
    ("device", "shapes"), [("cpu", SHAPES), pytest.param("cuda", LARGE, marks=pytest.mark.gpu)]
)
def test_products_are_the_reference_s(
    name: str, device: str, shapes: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch)
    for count, n, k in shapes:
        matrix = matrix_of(n, k, SCHEMES[name], device)
        x = rows_of(count, k, device, NARROW[device])
        tiles = tiles_for(count, matrix)
        assert tiles is not None
        found = launch(x, matrix, None, tiles).float()
        wanted = quantised_linear_reference(x.float(), matrix)
        # The last step of the narrow type, and sums in another order; int4 rounds weights too.
        error = (found - wanted).abs().amax(1) / wanted.abs().amax(1).clamp(min=1e-20)
        assert error.max() < (0.01 if device == "cuda" else 0.002), (count, n, k)
        assert not found[count // 2].any()


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1040, 17000])
@pytest.mark.parametrize("name", SCHEMES)
def test_a_row_is_multiplied_alike_beside_any_others(name: str, n: int) -> None:
    """Bit for bit for all numbers of rows that the kernel takes."""
    matrix = matrix_of(n, 1088, SCHEMES[name], "cuda")
    x = rows_of(MOST_ROWS, 1088, "cuda", torch.bfloat16)
    whole = quantised_linear(x, matrix)
    for count in (1, 2, 7, 16, 17, 40, 64, 65):
        assert torch.equal(quantised_linear(x[:count], matrix), whole[:count]), count


@pytest.mark.gpu
@pytest.mark.parametrize("name", SCHEMES)
def test_many_rows_agree_with_few(name: str) -> None:
    matrix = matrix_of(1040, 1088, SCHEMES[name], "cuda")
    x = rows_of(300, 1088, "cuda", torch.bfloat16)
    few = torch.cat([quantised_linear(part, matrix) for part in x.split(100)]).float()
    many = quantised_linear(x, matrix).float()
    error = (many - few).abs().amax(1) / few.abs().amax(1).clamp(min=1e-20)
    assert error.max() < 0.01


@pytest.mark.parametrize(
    ("device", "k", "name"),
    [("cpu", 2080, name) for name in ("rows", "blocks", "int4 groups")]  # others take long there
    + [pytest.param("cuda", 4128, name, marks=pytest.mark.gpu) for name in SCHEMES],
)
def test_partial_sums_add_up_to_the_reference_s(
    name: str, device: str, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a row's do not depend on the rows beside it."""
    poison(monkeypatch)
    matrix = matrix_of(40, k, SCHEMES[name], device)
    x = rows_of(17, k, device, NARROW[device])
    tiles = tiles_for(17, matrix, partials=True)
    assert tiles is not None
    assert tiles.splits == k // LEAST_RANGE
    parts = launch(x, matrix, None, tiles)
    assert parts.shape == (tiles.splits, 17, 40)
    wanted = quantised_linear_reference(x.float(), matrix)
    error = (parts.sum(0) - wanted).abs().amax(1) / wanted.abs().amax(1).clamp(min=1e-20)
    rounds_weights = "int4" in name or "alone" in name
    # FP8 tensor cores sum the products of a step with some 14 bits.
    assert error.max() < (0.01 if rounds_weights else 1e-3 if device == "cuda" else 1e-4)
    if device == "cuda":
        x = rows_of(MOST_ROWS, k, device, NARROW[device])
        whole = quantised_partials(x, matrix)
        for count in (1, 16, 17, 33, 64, 65):
            assert torch.equal(quantised_partials(x[:count], matrix), whole[:, :count]), count


def test_what_has_no_kernel_is_left_to_the_library() -> None:
    assert tiles_for(MOST_ROWS + 1, matrix_of(32, 64, SCHEMES["rows"], "cpu")) is None
    assert tiles_for(0, matrix_of(32, 64, SCHEMES["rows"], "cpu")) is None
    odd = Scheme(kind="fp8", rows=8, columns=24, inputs="group", group=24)
    assert tiles_for(1, matrix_of(32, 72, odd, "cpu")) is None, "steps of 24 columns"
    packed = Scheme(kind="int4", rows=1, columns=None, inputs="float")
    assert tiles_for(1, matrix_of(32, 70, packed, "cpu")) is None, "a part of an int32"
