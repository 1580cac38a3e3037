"""Products with quantised matrices: rows rounded as the checkpoint says, narrow numbers, scales.

On CUDA up to 128 rows run a kernel that reads the narrow numbers (`plan`): on Hopper with FP8
tensor cores, and of four-bit integers in an order of their own (`lanes`). More rows, of which each
has one scale, run the library's scaled product from capability 8.9 on, if each row of the matrix
has one scale too; blocks of 128 x 128 and groups of 128 have its product on Hopper. All else is
unpacked to the rows' type first, by kernels, as everything is on a CPU by the reference.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, pad, scaled_mm

from hydraspec_kernels.quantised.lanes import prepared
from hydraspec_kernels.quantised.plan import (
    MOST_ROWS,
    SpecializedTiles,
    gated_tiles,
    is_specialized,
    tiles_for,
)
from hydraspec_kernels.quantised.records import QuantisedMatrix, RoundedRows, Rounding
from hydraspec_kernels.quantised.reference import (
    E4M3,
    E4M3_MAX,
    PER_INT32,
    integers,
    quantised_linear_reference,
    rounded_rows,
    row_maxima,
    unpacked_reference,
)
from hydraspec_kernels.runtime.launch import is_hopper, runs_kernels

__all__ = [
    "E4M3",
    "E4M3_MAX",
    "MOST_ROWS",
    "PER_INT32",
    "QuantisedMatrix",
    "RoundedRows",
    "Rounding",
    "gated_quantised_linear",
    "integers",
    "prepared",
    "quantised_linear",
    "quantised_partials",
    "rounded_rows",
    "rounding_before",
    "row_maxima",
    "unpacked",
]

_NARROW = (torch.bfloat16, torch.float16)
_ALIGNMENT = 16  # of N and K, for the scaled product
_BLOCK = 128  # rows and columns of a matrix that share a scale, in the product of blocks


def rounding_before(matrix: QuantisedMatrix) -> Rounding | None:
    """How the kernel that writes up to MOST_ROWS rows may round them for a product with the matrix,
    which then takes `RoundedRows`; None: the product rounds."""
    rounding = matrix.rounding
    return rounding if rounding.kind in ("group", "token") and is_specialized(matrix) else None


def quantised_linear(
    x: Tensor | RoundedRows, matrix: QuantisedMatrix, maxima: Tensor | None = None
) -> Tensor:
    """Product [..., T, N] of rows x [..., T, K], rounded, with a matrix [..., N, K], in x's dtype.

    maxima [..., T, 1]: the rows' largest magnitudes over all ranks, where x is a part of the rows.
    """
    if isinstance(x, RoundedRows):
        return _product_of_rounded(x, matrix, partials=False)
    if not runs_kernels(x) or x.dtype not in _NARROW:
        return quantised_linear_reference(x, matrix, maxima)
    if x.dim() == 2 and matrix.data.dim() == 2:
        from hydraspec_kernels.quantised.kernel import launch  # Triton
        from hydraspec_kernels.quantised.round_kernel import round_rows

        if tiles := tiles_for(x.shape[0], matrix):
            return launch(x, matrix, maxima, tiles)
        if _has_scaled_product(x, matrix):
            numbers, scales = round_rows(x, matrix.rounding, maxima, E4M3)
            return torch._scaled_mm(
                numbers,
                matrix.data.t(),
                scale_a=scales,
                scale_b=matrix.scales.t(),
                out_dtype=x.dtype,
                use_fast_accum=False,
            )
        if _has_block_product(x, matrix):
            return _block_product(x, matrix)
    if x.dim() == 2 and matrix.rounding.kind != "float":
        from hydraspec_kernels.quantised.round_kernel import rounded_in_type  # Triton

        rows = rounded_in_type(x, matrix.rounding, maxima)
    else:
        rows = rounded_rows(x, matrix.rounding, maxima).to(x.dtype)
    return torch.matmul(rows, unpacked(matrix, x.dtype).transpose(-1, -2))


def quantised_partials(
    x: Tensor | RoundedRows, matrix: QuantisedMatrix, maxima: Tensor | None = None
) -> Tensor:
    """Product [T, N] as of `quantised_linear`, or its partial sums [S, T, N] in float32, for the
    consumer to add up. S depends on the matrix alone."""
    if isinstance(x, RoundedRows):
        return _product_of_rounded(x, matrix, partials=True)
    if runs_kernels(x) and x.dtype in _NARROW and x.dim() == 2:
        from hydraspec_kernels.quantised.kernel import launch  # Triton

        if tiles := tiles_for(x.shape[0], matrix, partials=True):
            return launch(x, matrix, maxima, tiles)
    return quantised_linear(x, matrix, maxima)


def gated_quantised_linear(
    x: Tensor, matrix: QuantisedMatrix, activation: Literal["gelu_tanh", "silu"]
) -> Tensor | None:
    """Product act(gate(x)) * up(x) [T, N / 2] of rows x [T, K] with a matrix of the rows of gate
    and up, in one kernel; None: there is none for these."""
    if not runs_kernels(x) or x.dtype is not torch.bfloat16 or x.dim() != 2:
        return None
    if not (tiles := gated_tiles(x.shape[0], matrix)):
        return None
    from hydraspec_kernels.quantised.packed_kernel import packed_product  # Gluon

    return packed_product(x, matrix, tiles, activation)


def _product_of_rounded(x: RoundedRows, matrix: QuantisedMatrix, *, partials: bool) -> Tensor:
    from hydraspec_kernels.quantised.specialized_kernel import specialized_product  # Gluon

    tiles = tiles_for(x.count, matrix, partials=partials)
    assert isinstance(tiles, SpecializedTiles), "see `rounding_before`"
    return specialized_product(x, matrix, tiles)


def unpacked(matrix: QuantisedMatrix, dtype: torch.dtype) -> Tensor:
    """The matrix [..., N, K] in dtype, each number times its scale rounded once."""
    if runs_kernels(matrix.data) and dtype is not torch.float64:
        from hydraspec_kernels.quantised.round_kernel import unpack  # Triton

        return unpack(matrix, dtype)
    return unpacked_reference(matrix, dtype)


def _has_scaled_product(x: Tensor, matrix: QuantisedMatrix) -> bool:
    """Returns whether the library multiplies these without unpacking."""
    n, k = matrix.data.shape
    return (
        matrix.data.dtype is E4M3
        and matrix.rows == 1
        and matrix.scales.shape[-1] == 1
        and matrix.rounding.kind in ("token", "static")
        and n % _ALIGNMENT == 0
        and k % _ALIGNMENT == 0
        and x.shape[0] > 0
        and _is_new_enough(x.device)
    )


def _has_block_product(x: Tensor, matrix: QuantisedMatrix) -> bool:
    """Returns whether the library multiplies blocks of 128 x 128 without unpacking: on Hopper,
    whose FP8 tensor cores it has in turns of 128 columns."""
    n, k = matrix.data.shape
    return (
        matrix.data.dtype is E4M3
        and x.dtype is torch.bfloat16
        and matrix.rows == matrix.columns == matrix.rounding.group == _BLOCK
        and matrix.rounding.kind == "group"
        and n % _ALIGNMENT == k % _BLOCK == 0
        and x.shape[0] > 0
        and is_hopper(x.device)
        and _knows_blocks()
    )


def _block_product(x: Tensor, matrix: QuantisedMatrix) -> Tensor:
    from hydraspec_kernels.quantised.round_kernel import rounded_for_blocks  # Triton

    numbers, scales = rounded_for_blocks(x, matrix.rounding)
    # The library wants the scales of a row of blocks in whole 16 bytes.
    missing = -matrix.scales.shape[1] % 4
    of_matrix = pad(matrix.scales, (0, missing)) if missing else matrix.scales
    y = scaled_mm(
        numbers,
        matrix.data.t(),
        scales,
        ScalingType.BlockWise1x128,
        of_matrix.t(),
        ScalingType.BlockWise128x128,
        output_dtype=x.dtype,
    )
    return y[: x.shape[0]]


@cache
def _is_new_enough(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 9)


@cache
def _knows_blocks() -> bool:
    """Returns whether torch was built with a library that multiplies blocks: CUDA 12.9 or later."""
    found = torch.version.cuda
    return found is not None and tuple(int(part) for part in found.split(".")[:2]) >= (12, 9)
