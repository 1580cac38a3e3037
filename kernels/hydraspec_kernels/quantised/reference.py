"""Specification of products with quantised matrices: rows are rounded, then multiplied.

Rounding: x / scale, clamped to +-448, to the nearest e4m3 number, times scale. The scale of a row
is its largest magnitude / 448, at least 1 / (448 * 512); that of a group of a row max(largest
magnitude, 1e-10) / 448 (vLLM 0.33's CUDA kernels). Rows do not depend on one another.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hydraspec_kernels.quantised.lanes import in_file_order
from hydraspec_kernels.quantised.records import QuantisedMatrix, Rounding

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
LEAST_ROW_SCALE = 1 / (E4M3_MAX * 512)
LEAST_GROUP_MAX = 1e-10
PER_INT32 = 8  # four-bit numbers in an element of a packed tensor, the first in the lowest bits


def row_maxima(x: Tensor) -> Tensor:
    """Largest magnitudes [..., 1] of rows x [..., K], in float32, or float64 for float64."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.abs().amax(-1, keepdim=True).to(wide)


def rounded_rows(x: Tensor, rounding: Rounding, maxima: Tensor | None = None) -> Tensor:
    """Rows x [..., K] as they enter a product, in float32 (or float64 for float64).

    maxima: the rows' largest magnitudes, of all ranks where x is one rank's part of the rows; None:
    x's own. Used for "token" only.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if rounding.kind == "float":
        return wide
    if rounding.kind != "group":
        numbers, scales = quantised_rows(x, rounding, maxima)
        return numbers.to(wide.dtype).mul_(scales)
    k, size = x.shape[-1], rounding.group
    pad = -k % size
    groups = torch.nn.functional.pad(wide, (0, pad)).unflatten(-1, (-1, size))
    scales = _by_most(groups.abs().amax(-1, keepdim=True).clamp_(min=LEAST_GROUP_MAX))
    numbers = (groups / scales).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)
    return numbers.to(wide.dtype).mul_(scales).flatten(-2)[..., :k]


def quantised_rows(
    x: Tensor, rounding: Rounding, maxima: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Rows x [..., K] as numbers [..., K] in e4m3 and scales [..., 1]; for "token" and "static"."""
    if rounding.scale is not None:
        scales = rounding.scale
    else:
        maxima = row_maxima(x) if maxima is None else maxima
        scales = _by_most(maxima).clamp_(min=LEAST_ROW_SCALE)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide / scales).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3), scales.expand(*x.shape[:-1], 1)


def _by_most(maxima: Tensor) -> Tensor:
    """Magnitudes / 448. The divisor is a tensor: CUDA multiplies by the inverse of a number."""
    return maxima / torch.full_like(maxima, E4M3_MAX)


def integers(data: Tensor, width: int) -> Tensor:
    """Integers [..., width] from -8 to 7 as int8, of an int32 tensor [..., width / 8]."""
    shifts = torch.arange(0, 32, 4, device=data.device, dtype=torch.int32)
    numbers = (data[..., None] >> shifts).bitwise_and_(15).to(torch.int8).sub_(8)
    return numbers.flatten(-2)[..., :width]


def unpacked_reference(matrix: QuantisedMatrix, dtype: torch.dtype) -> Tensor:
    """The matrix [..., N, K] in dtype, each number times its scale rounded once."""
    if matrix.lanes:
        matrix = in_file_order(matrix)
    data = matrix.data
    if data.dtype is torch.int32:
        numbers = integers(data, matrix.width)
    elif data.is_cuda:
        numbers = data
    else:
        numbers = _e4m3_on_cpu(data, torch.promote_types(dtype, torch.float32))
    wide = torch.promote_types(dtype, torch.float32)
    # Exact in 16 bits: e4m3 has four significant bits, int4 fewer.
    numbers = numbers.to(wide if dtype is wide else dtype)
    out = torch.empty(numbers.shape, dtype=dtype, device=data.device)
    scales = matrix.scales
    n, k = numbers.shape[-2:]
    if n % matrix.rows or k % scales.shape[-1] or k // scales.shape[-1] != matrix.columns:
        scales = scales.repeat_interleave(matrix.rows, -2)[..., :n, :]
        scales = scales.repeat_interleave(matrix.columns, -1)[..., :k]
        return torch.mul(numbers, scales, out=out)
    blocks = (n // matrix.rows, matrix.rows, k // matrix.columns, matrix.columns)
    *before, _, _ = numbers.shape
    torch.mul(
        numbers.view(*before, *blocks),
        scales[..., :, None, :, None],
        out=out.view(*before, *blocks),
    )
    return out


def _e4m3_on_cpu(data: Tensor, wide: torch.dtype) -> Tensor:
    """The numbers of e4m3 data, without NaN, in a wide type: 17 times as fast as the library's way.

    Exponent and fraction stand at the same distance in float16, whose exponents are 8 lower.
    """
    bits = (data.view(torch.int8).to(torch.int16) << 7).bitwise_and_(~(1 << 14))
    return bits.view(torch.float16).to(wide).mul_(256.0)


def quantised_linear_reference(
    x: Tensor, matrix: QuantisedMatrix, maxima: Tensor | None = None
) -> Tensor:
    """Product [..., T, N] of rows x [..., T, K], rounded, with the matrix, in x's dtype. Sums are
    float32, or float64 for float64."""
    rows = rounded_rows(x, matrix.rounding, maxima)
    return torch.matmul(rows, unpacked_reference(matrix, rows.dtype).transpose(-1, -2)).to(x.dtype)
