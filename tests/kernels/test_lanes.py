"""Four-bit integers in the order of their kernel: the order, what may have it, and on a GPU the
products. The kernel itself is compiled for sm_90 here, as Gluon has no interpreter.

Catches an integer, a word or a scale of another place, a scale that is rounded, ranges of K that
follow the number of rows, and a program that needs too much memory.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compiled_apart import SHARED_BYTES, compiled
from hydraspec_kernels.activation import Activation
from hydraspec_kernels.activation.reference import gated_activation_reference
from hydraspec_kernels.quantised import (
    MOST_ROWS,
    QuantisedMatrix,
    Rounding,
    gated_quantised_linear,
    prepared,
    quantised_linear,
    quantised_partials,
    unpacked,
)
from hydraspec_kernels.quantised.lanes import can_be_in_lanes, in_file_order, in_lanes
from hydraspec_kernels.quantised.plan import PACKED_ROWS, PackedTiles, gated_tiles, tiles_for
from hydraspec_kernels.quantised.reference import (
    integers,
    quantised_linear_reference,
    unpacked_reference,
)
from hydraspec_kernels.quantised.round_kernel import unpack
from kernel_places import DEVICES, poison

from hydraspec.models.checkpoint.quantization import Scheme, encode

# N, K, whether partial sums are wanted: of Gemma 4 31B, and odd ones.
SHAPES = (
    (16384, 5376, False),
    (5376, 21504, True),
    (18000, 768, False),  # three groups of warps
    (1040, 768, False),
    (24, 2560, True),
)
COMPILE = """
import json, sys
from sm90 import build, weights
from triton.experimental.gluon import language as gl
from hydraspec_kernels.quantised.packed_kernel import MOST_REGISTERS, BY_WARP_ROWS
from hydraspec_kernels.quantised.packed_kernel import _packed_kernel as kernel

found = []
for m, rows, groups, units, stages, registers, end in json.loads(sys.argv[1]):
    of_x = gl.NVMMASharedLayout.get_default_for([m, 128], gl.bfloat16)
    of_words = gl.NVMMASharedLayout.get_default_for([64, 32], gl.int32)
    types, fixed = weights("w", rows, f"i32[{{}}, 32],{of_words!r}")
    of_scales = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=16, rank=2)
    types |= weights("s", rows, f"bf16[{{}}, 8],{of_scales!r}")[0]
    types |= {"out": "*bf16"} | dict.fromkeys(("M", "N", "K", "rows_of_scales"), "i32")
    types["x"] = f"tensordesc<bf16[{m}, 128],{of_x!r}>"
    fixed |= {"BM": m, "GROUPS": groups, "UNITS": units, "STAGES": stages, "PDL": True, "END": end}
    fixed["GROUP_REGISTERS"] = registers or MOST_REGISTERS[groups]
    made = build(kernel, types, fixed, ("out", "N", "K"), num_warps=4, maxnreg=registers)
    ptx = made.asm["ptx"]
    products = ptx.count("wgmma.mma_async") if m > BY_WARP_ROWS else ptx.count("mma.sync")
    found.append([made.metadata.shared, products, ptx.count("fma.rn.bf16x2")])
print(json.dumps(found))
"""


def matrix_of(n: int, k: int, group: int | None, device: str = "cpu") -> QuantisedMatrix:
    """A matrix as a checkpoint has it, with scales in bfloat16."""
    scheme = Scheme(kind="int4", rows=1, columns=group, inputs="float")
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(n))
    stored = encode(weight, scheme, scale_dtype=torch.bfloat16)
    data, scales = stored[scheme.data].to(device), stored[scheme.scale].float().to(device)
    return QuantisedMatrix(data, scales.reshape(n, -1), 1, group or k, k, Rounding("float"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("k", "group"), [(512, 32), (768, 128), (256, None)])
def test_the_same_numbers_in_another_order(
    k: int, group: int | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = matrix_of(70, k, group, device)
    before, wanted = matrix.data.clone(), unpacked_reference(matrix, torch.float32)
    assert can_be_in_lanes(matrix, torch.bfloat16)
    found = in_lanes(matrix)
    assert not torch.equal(found.data, before), "data are overwritten"
    assert torch.equal(in_file_order(found).data, before)
    assert torch.equal(unpacked_reference(found, torch.float32), wanted)
    poison(monkeypatch)
    assert torch.equal(unpack(found, torch.float32), wanted)
    assert torch.equal(unpack(found.from_row(33), torch.float32), wanted[33:])


def test_each_integer_has_the_documented_place() -> None:
    matrix = matrix_of(1, 512, 32)
    by_column = integers(matrix.data, 512)[0].tolist()
    words = [word & 0xFFFFFFFF for word in in_lanes(matrix).data[0].tolist()]
    for column, number in enumerate(by_column):
        unit, rest = divmod(column, 256)
        f, w, i, c, h = rest // 128, rest // 32 % 4, rest // 8 % 4, rest // 2 % 4, rest % 2
        word = words[32 * unit + 8 * c + 4 * f + w]
        assert (word >> (4 * (i + 4 * h)) & 15) - 8 == number, column


def test_what_has_no_place_stays_as_its_file_has_it() -> None:
    whole = matrix_of(8, 512, 32)
    assert can_be_in_lanes(whole, torch.bfloat16)
    assert not can_be_in_lanes(whole, torch.float16)
    third = torch.full_like(whole.scales, 1 / 3)
    changes = {
        "a scale that bfloat16 rounds": {"scales": third},
        "a scale that vanishes": {"scales": torch.full_like(third, 2.0**-70)},
        "groups of 16": {"scales": third[:, :1].expand(8, 32), "columns": 16},
        "a width of no whole 256": {"width": 320, "data": whole.data[:, :40].contiguous()},
        "groups that end beyond the width": {"scales": whole.scales[:, :6], "columns": 96},
        "experts": {"data": whole.data[None], "scales": whole.scales[None]},
    }
    for why, change in changes.items():
        assert not can_be_in_lanes(replace(whole, **change), torch.bfloat16), why
    assert prepared(whole, torch.bfloat16) is whole, "no GPU of its kind is here"


def test_ranges_of_k_do_not_depend_on_the_number_of_rows() -> None:
    """So that a decode step and a verify step add alike."""
    for n, k in ((5376, 8192), (5376, 21504), (2560, 10240), (64, 256)):
        matrix = in_lanes(matrix_of(8, k, 32))
        matrix = replace(matrix, data=matrix.data[:1].expand(n, -1))
        found = [tiles_for(rows, matrix, partials=True) for rows in range(1, MOST_ROWS + 1)]
        assert len({tiles.splits for tiles in found if tiles}) == 1, (n, k)


def test_planned_kernels_compile_and_fit(tmp_path: Path) -> None:
    matrix = in_lanes(matrix_of(1, 5376, 32))
    matrix = replace(matrix, data=matrix.data.expand(43008, -1))
    sizes = []
    for tiles, end in (
        (tiles_for(16, matrix), "none"),
        (tiles_for(1, matrix, partials=True), "none"),
        (gated_tiles(1, matrix), "gelu_tanh"),
    ):
        assert isinstance(tiles, PackedTiles)
        assert sum(tiles.rows) in PACKED_ROWS
        chosen = tiles.m, tiles.rows, tiles.groups, tiles.units, tiles.stages, tiles.registers
        sizes.append([*chosen, end])
    for shared, products, unpacks in compiled(COMPILE, sizes, tmp_path):
        assert shared <= SHARED_BYTES
        assert products > 0
        assert unpacks > 0


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k", "partials"), SHAPES)
def test_products_are_the_reference_s(
    n: int, k: int, partials: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a row's do not depend on the rows beside it, bit for bit."""
    poison(monkeypatch)
    matrix = matrix_of(n, k, 32, "cuda")
    draw = torch.Generator().manual_seed(k)
    x = torch.randn(300, k, generator=draw).to("cuda", torch.bfloat16)
    wanted = quantised_linear_reference(x[:MOST_ROWS].float(), matrix)
    wanted_rounded = x[:MOST_ROWS].float() @ unpacked_reference(matrix, torch.bfloat16).float().t()
    many = quantised_linear(x, matrix)
    matrix = prepared(matrix, torch.bfloat16)
    assert matrix.lanes
    assert torch.equal(quantised_linear(x, matrix), many), "unpacked first"
    product = quantised_partials if partials else quantised_linear
    whole = product(x[:MOST_ROWS], matrix)
    for count in (1, 2, 7, 8, 9, 16, 17, 32, 33, 40, 64, 65):
        assert torch.equal(product(x[:count], matrix), whole[..., :count, :]), count
    total = whole.sum(0) if whole.dim() == 3 else whole.float()
    for reference, most in ((wanted, 0.01), (wanted_rounded, 1e-4 if whole.dim() == 3 else 0.005)):
        error = (total - reference).abs().amax(1) / reference.abs().amax(1)
        assert error.max() < most


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["gelu_tanh", "silu"])
@pytest.mark.parametrize(("n", "k"), [(43008, 5376), (18000, 768), (1040, 2560)])
def test_an_activation_at_the_end(
    n: int, k: int, activation: Activation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is that of unrounded products, and a row's output does not depend on the rows beside."""
    poison(monkeypatch)
    matrix = matrix_of(n, k, 32, "cuda")
    draw = torch.Generator().manual_seed(k)
    x = torch.randn(MOST_ROWS + 1, k, generator=draw).to("cuda", torch.bfloat16)
    products = x[:MOST_ROWS].float() @ unpacked_reference(matrix, torch.bfloat16).float().t()
    wanted = gated_activation_reference(products, activation)
    matrix = prepared(matrix, torch.bfloat16)
    assert gated_quantised_linear(x, matrix, activation) is None, "more rows than a kernel takes"
    whole = gated_quantised_linear(x[:MOST_ROWS], matrix, activation)
    assert whole is not None
    assert whole.shape == wanted.shape
    for count in (1, 2, 8, 9, 17, 33, 64, 65):
        found = gated_quantised_linear(x[:count], matrix, activation)
        assert found is not None
        assert torch.equal(found, whole[:count]), count
    assert ((whole - wanted).abs() / wanted.abs().amax(1, keepdim=True)).max() < 0.005


@pytest.mark.gpu
def test_large_and_small_scales_are_exact() -> None:
    """Powers of two move through the kernel's own, whatever their size."""
    matrix = matrix_of(64, 512, 32, "cuda")
    x = torch.randn(5, 512, device="cuda", dtype=torch.bfloat16)
    plain = quantised_linear(x, prepared(replace(matrix, data=matrix.data.clone()), x.dtype))
    for power in (2.0**-40, 2.0**15):
        scaled = replace(matrix, data=matrix.data.clone(), scales=matrix.scales * power)
        found = quantised_linear(x, prepared(scaled, x.dtype))
        assert torch.equal(found, plain * power), power
    ready = prepared(replace(matrix, data=matrix.data.clone()), x.dtype)
    assert torch.equal(unpacked(ready, x.dtype), unpacked_reference(matrix, x.dtype))
