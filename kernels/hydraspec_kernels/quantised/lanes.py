"""The order in memory of four-bit integers whose kernel of few rows unpacks them in registers.

In each 256 columns the eight integers of a word are those that one lane of a warp multiplies, so
that it reads four words at once and moves none: integer i + 4 h of word 8 c + 4 f + w belongs to
column 128 f + 32 w + 8 i + 2 c + h (f, h 0 or 1; w, i, c 0 to 3). Scales of 32 columns each are
bfloat16 [K / 256, N, 8], times 2^100: those that are used together are next to each other.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hydraspec_kernels.quantised.records import QuantisedMatrix
from hydraspec_kernels.runtime.launch import is_hopper

COLUMNS = 256  # in which words are reordered
SCALED = 32  # columns of a scale
RANGE = 512  # columns: where ranges of K begin
EXPONENT = 100  # of the power of two in the scales
_FROM_FILE = (0, 1, 5, 2, 3, 6, 4)  # [n, u, f, w, i, c, h] as [n, u, c, f, w, h, i]
_TO_FILE = (0, 1, 3, 4, 6, 2, 5)
_LEAST, _MOST = 2.0**-60, 2.0**20  # scales that neither vanish nor overflow
_ROWS = 1024  # reordered at once


def can_be_in_lanes(matrix: QuantisedMatrix, dtype: torch.dtype) -> bool:
    """Returns whether a matrix as its file has it can be reordered, for rows in dtype."""
    data, scales = matrix.data, matrix.scales
    if not (
        data.dtype is torch.int32
        and data.dim() == 2
        and data.is_contiguous()
        and dtype is torch.bfloat16
        and matrix.rounding.kind == "float"
        and matrix.rows == 1
        and matrix.width % COLUMNS == matrix.columns % SCALED == 0
        and matrix.width % matrix.columns == 0
    ):
        return False
    exact = (scales.bfloat16().float() == scales) & (scales >= _LEAST) & (scales <= _MOST)
    return bool(exact.all())


def prepared(matrix: QuantisedMatrix, dtype: torch.dtype) -> QuantisedMatrix:
    """The matrix in the order that its kernels want, for rows in dtype; its data are overwritten.
    Call once after the weights are filled."""
    wants = is_hopper(matrix.data.device) and can_be_in_lanes(matrix, dtype)
    return in_lanes(matrix) if wants else matrix


def in_lanes(matrix: QuantisedMatrix) -> QuantisedMatrix:
    """A matrix for which `can_be_in_lanes` holds, reordered in place."""
    for some in matrix.data.split(_ROWS):
        some.copy_(_permuted(some, (2, 4, 4, 4, 2), _FROM_FILE))
    groups = matrix.width // SCALED
    by_row = matrix.scales.repeat_interleave(groups // matrix.scales.shape[1], 1)
    by_unit = (by_row * 2.0**EXPONENT).bfloat16().unflatten(1, (-1, COLUMNS // SCALED))
    scales = by_unit.transpose(0, 1).contiguous()
    return replace(matrix, scales=scales, columns=SCALED, lanes=True)


def in_file_order(matrix: QuantisedMatrix) -> QuantisedMatrix:
    """A copy of a matrix in lanes, as `in_lanes` has met it, with a scale for each 32 columns."""
    data = _permuted(matrix.data, (4, 2, 4, 2, 4), _TO_FILE)
    scales = matrix.scales.transpose(0, 1).flatten(1).float() * 2.0**-EXPONENT
    return replace(matrix, data=data, scales=scales, lanes=False)


def _permuted(data: Tensor, sizes: tuple[int, ...], order: tuple[int, ...]) -> Tensor:
    """Words [n, K / 8] whose integers, seen as [n, K / 256, *sizes], are permuted."""
    shifts = torch.arange(0, 32, 4, device=data.device, dtype=torch.int32)
    n, words = data.shape
    numbers = (data[..., None] >> shifts).bitwise_and_(15).view(n, -1, *sizes)
    numbers = numbers.permute(order).reshape(n, words, 8)
    return (numbers << shifts).sum(-1, dtype=torch.int32)
