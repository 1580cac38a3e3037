"""Rows rounded to e4m3 numbers and scales, and what more rows than a product's kernel takes need:
rows that are rounded and still in their type, and a matrix in it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hydraspec_kernels.quantised.e4m3_kernel import e4m3_of
from hydraspec_kernels.quantised.lanes import COLUMNS, EXPONENT
from hydraspec_kernels.quantised.records import (
    MOST_ROWS,
    QuantisedMatrix,
    RoundedRows,
    Rounding,
)
from hydraspec_kernels.quantised.reference import (
    E4M3,
    E4M3_MAX,
    LEAST_GROUP_MAX,
    LEAST_ROW_SCALE,
)
from hydraspec_kernels.runtime.launch_kernel import (
    dependent_launch,
    start_next,
    wait_for_inputs,
)

ROUND_BLOCK = 2048  # numbers of a row that a program rounds at once
FEW_ROWS = 128  # up to these a program rounds one group, or reads a row at once
MOST_OF_ROW = 32768  # numbers of a row that a program reads at once
ROWS_OF_TILES = 64  # memory of x has a multiple, in which whole tiles of the product lie
UNPACK_ROWS, UNPACK_COLUMNS = 16, 256  # of a matrix, which a program unpacks


@triton.jit(do_not_specialize=["columns"])
def _round_kernel(
    # [T, K] float16 or e4m3; SCALED: any type
    numbers_ptr,
    # [T, 1] float32, unless SCALED
    scales_ptr,
    # [T, K]
    x_ptr,
    # [T] float32, where HAS_MAXIMA
    maxima_ptr,
    # [1] float32, where STATIC
    static_ptr,
    columns,
    stride_x,
    STATIC: tl.constexpr,
    HAS_MAXIMA: tl.constexpr,
    LEAST: tl.constexpr,  # of a row's scale
    MOST: tl.constexpr,
    SCALED: tl.constexpr,  # numbers times scales
    WHOLE: tl.constexpr,  # a block holds the row
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rounds a row."""
    IN_E4M3: tl.constexpr = numbers_ptr.dtype.element_ty == tl.float8e4nv
    start_next(PDL)
    wait_for_inputs(PDL)
    row, k = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x_at = x_ptr + row * stride_x
    if WHOLE:
        v = tl.load(x_at + k, mask=k < columns, other=0.0).to(tl.float32)
    if STATIC:
        scale = tl.load(static_ptr)
    else:
        if HAS_MAXIMA:
            top = tl.load(maxima_ptr + row)
        elif WHOLE:
            top = tl.max(tl.abs(v), 0)
        else:
            top = 0.0
            for start in range(0, columns, BLOCK):
                v = tl.load(x_at + start + k, mask=start + k < columns, other=0.0).to(tl.float32)
                top = tl.maximum(top, tl.max(tl.abs(v), 0))
        scale = tl.maximum(tl.div_rn(top, MOST), LEAST)
    if not SCALED:
        tl.store(scales_ptr + row, scale)
    for start in range(0, columns, BLOCK):
        inside = start + k < columns
        if not WHOLE:
            v = tl.load(x_at + start + k, mask=inside, other=0.0).to(tl.float32)
        number = e4m3_of(v, scale, MOST, SCALED, IN_E4M3).to(numbers_ptr.dtype.element_ty)
        tl.store(numbers_ptr + row * columns + start + k, number, mask=inside)


@triton.jit(do_not_specialize=["columns", "stride_scale_group"])
def _round_groups_kernel(
    # [T, K] float16 or e4m3; SCALED: any type
    numbers_ptr,
    # [T, groups] float32, unless SCALED
    scales_ptr,
    # [T, K]
    x_ptr,
    columns,
    groups,
    stride_x,
    stride_scale_row,
    stride_scale_group,
    GROUP: tl.constexpr,  # numbers that share a scale
    LEAST: tl.constexpr,  # of a group's largest magnitude
    MOST: tl.constexpr,
    SCALED: tl.constexpr,  # numbers times scales
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,  # GROUP, or the next power of two
    PDL: tl.constexpr,
):
    """Rounds GROUPS groups of a row."""
    IN_E4M3: tl.constexpr = numbers_ptr.dtype.element_ty == tl.float8e4nv
    start_next(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    group, of_group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS), tl.arange(0, BLOCK)
    k = group[:, None] * GROUP + of_group[None, :]
    inside = (k < columns) & (of_group < GROUP)[None, :]
    v = tl.load(x_ptr + row * stride_x + k, mask=inside, other=0.0).to(tl.float32)
    top = tl.maximum(tl.max(tl.abs(v), 1), LEAST)
    scale = tl.div_rn(top, tl.zeros_like(top) + MOST)
    if not SCALED:
        to = scales_ptr + row * stride_scale_row + group * stride_scale_group
        tl.store(to, scale, mask=group < groups)
    number = e4m3_of(v, scale[:, None], MOST, SCALED, IN_E4M3)
    number = number.to(numbers_ptr.dtype.element_ty)
    tl.store(numbers_ptr + row * columns + k, number, mask=inside)


@triton.jit
def _unpack_kernel(
    # [E, N, K], contiguous
    out_ptr,
    # [E, N, K] e4m3, or [E, N, K / 8] int32
    data_ptr,
    # [E, R, C] float32
    scales_ptr,
    N,
    K,
    stride_stack,
    stride_data,
    stride_scales_stack,
    stride_scales,
    ROWS: tl.constexpr,  # that share a scale
    COLUMNS: tl.constexpr,
    PACKED: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Numbers times scales of BR rows and BK columns of a matrix."""
    start_next(PDL)
    wait_for_inputs(PDL)
    one = tl.program_id(2).to(tl.int64)
    n, k = tl.program_id(1) * BR + tl.arange(0, BR), tl.program_id(0) * BK + tl.arange(0, BK)
    inside = (n < N)[:, None] & (k < K)[None, :]
    at = data_ptr + one * stride_stack + n.to(tl.int64)[:, None] * stride_data
    if PACKED:
        words = tl.load(at + (k // 8)[None, :], mask=inside, other=0)
        number = (((words >> (k % 8 * 4)[None, :]) & 15) - 8).to(tl.float32)
    else:
        number = tl.load(at + k[None, :], mask=inside, other=0.0).to(tl.float32)
    scale_at = scales_ptr + one * stride_scales_stack + (n // ROWS * stride_scales)[:, None]
    scale = tl.load(scale_at + (k // COLUMNS)[None, :], mask=inside, other=0.0)
    to = out_ptr + (one * N + n)[:, None] * K + k[None, :]
    tl.store(to, (number * scale).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _unpack_lanes_kernel(
    # [N, K], contiguous
    out_ptr,
    # [N, K / 8] int32, in lanes
    data_ptr,
    # [K / 256, N, 8] bfloat16
    scales_ptr,
    N,
    K,
    stride_data,
    stride_scales,
    POWER: tl.constexpr,  # of two, in the scales
    BR: tl.constexpr,
    PDL: tl.constexpr,
):
    """Numbers times scales of BR rows and 256 columns of a matrix; a word is loaded once."""
    start_next(PDL)
    wait_for_inputs(PDL)
    unit = tl.program_id(0)
    n = tl.program_id(1) * BR + tl.arange(0, BR)
    data_at = data_ptr + n.to(tl.int64)[:, None] * stride_data + unit * 32 + tl.arange(0, 32)[None]
    words = tl.load(data_at, mask=(n < N)[:, None], other=0)
    of_unit = scales_ptr + unit.to(tl.int64) * stride_scales
    scale_at = of_unit + n[:, None] * 8 + tl.arange(0, 8)[None]
    scale = tl.load(scale_at, mask=(n < N)[:, None], other=0.0).to(tl.float32) * POWER
    # Words are [c, f, w], scales [f, w], the integers of a word [h, i]: see `lanes`.
    four = (tl.reshape(words, (BR, 32, 1)) >> (tl.arange(0, 8) * 4)[None, None]) & 15
    number = tl.reshape((four - 8).to(tl.float32), (BR, 4, 8, 2, 4))
    number = (number * tl.reshape(scale, (BR, 1, 8, 1, 1))).to(out_ptr.dtype.element_ty)
    out = tl.reshape(tl.permute(number, (0, 2, 4, 1, 3)), (BR, 256))
    out_at = out_ptr + n.to(tl.int64)[:, None] * K + unit * 256 + tl.arange(0, 256)[None]
    tl.store(out_at, out, mask=(n < N)[:, None])


def round_rows(
    x: Tensor, rounding: Rounding, maxima: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Numbers [T, K] in dtype (float16 or e4m3), and scales [T, G], of rows x [T, K]."""
    rows, columns = x.shape
    numbers = torch.empty(rows, columns, dtype=dtype, device=x.device)
    groups = _num_groups(columns, rounding)
    scales = torch.empty(rows, groups, dtype=torch.float32, device=x.device)
    _round(x, rounding, maxima, numbers, scales)
    return numbers, scales


def rounded(x: Tensor, rounding: Rounding, maxima: Tensor | None) -> RoundedRows:
    """Rows x [T, K] in e4m3, in memory of whole tiles of rows."""
    rows = empty_rounded(*x.shape, rounding, x)
    _round(x, rounding, maxima, rows.numbers, rows.scales)
    return rows


def rounded_for_blocks(x: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """Numbers [T', K] in e4m3 and scales [T', G], a group's next to each other, of rows x [T, K]
    with a scale for each group: T' is T rounded up to 4, and what follows row T is zero."""
    rows, columns = -(-x.shape[0] // 4) * 4, x.shape[1]
    numbers = torch.empty(rows, columns, dtype=E4M3, device=x.device)
    groups = triton.cdiv(columns, rounding.group)
    scales = torch.empty(groups, rows, dtype=torch.float32, device=x.device).t()
    if rows > x.shape[0]:
        numbers[x.shape[0] :].view(torch.uint8).zero_()
        scales[x.shape[0] :] = 0.0
    _round(x, rounding, None, numbers[: x.shape[0]], scales[: x.shape[0]])
    return numbers, scales


def empty_padded(rows: int, columns: int, device: torch.device) -> Tensor:
    """Memory of `rows` rows or more in e4m3. A tile that is copied whole takes up to a quarter less
    time than one that ends after its first rows (measured on an H200)."""
    rows = triton.cdiv(rows, ROWS_OF_TILES) * ROWS_OF_TILES
    return torch.empty(rows, columns, dtype=E4M3, device=device)


def least_of(rounding: Rounding | None) -> float:
    """The least scale of a row, or the least of a group's largest magnitude; see the reference."""
    if rounding is None:
        return 0.0
    return LEAST_GROUP_MAX if rounding.kind == "group" else LEAST_ROW_SCALE


def rounded_in_type(x: Tensor, rounding: Rounding, maxima: Tensor | None) -> Tensor:
    """Rows x [T, K] as they enter a product: numbers times scales, in x's dtype."""
    numbers = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _round(x, rounding, maxima, numbers, None)
    return numbers


def empty_rounded(rows: int, columns: int, rounding: Rounding, before: Tensor) -> RoundedRows:
    """Memory of up to MOST_ROWS rounded rows of `columns` numbers; `before` has their type before,
    and their device."""
    assert rows <= MOST_ROWS, f"{rows} rows"
    by_group = torch.empty(
        _num_groups(columns, rounding), MOST_ROWS, dtype=torch.float32, device=before.device
    )
    return RoundedRows(empty_padded(rows, columns, before.device), by_group, rows, before.dtype)


def _num_groups(columns: int, rounding: Rounding) -> int:
    return triton.cdiv(columns, rounding.group) if rounding.kind == "group" else 1


def _round(
    x: Tensor,
    rounding: Rounding,
    maxima: Tensor | None,
    numbers: Tensor,
    scales: Tensor | None,
) -> None:
    """Fills numbers [T, K], contiguous, and scales; without scales, numbers times their scales."""
    rows, columns = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    options = {"MOST": E4M3_MAX, "SCALED": scales is None, **dependent_launch(x)}
    if rounding.kind == "group":
        groups, block = triton.cdiv(columns, rounding.group), triton.next_power_of_2(rounding.group)
        several = 1 if rows <= FEW_ROWS else max(1, ROUND_BLOCK // block)
        _round_groups_kernel[(rows, triton.cdiv(groups, several))](
            *(numbers, scales, x, columns, groups, x.stride(0)),
            *(scales.stride() if scales is not None else (0, 0)),
            GROUP=rounding.group,
            LEAST=LEAST_GROUP_MAX,
            GROUPS=several,
            BLOCK=block,
            num_warps=1 if several == 1 else 4,
            **options,
        )
    else:
        block = triton.next_power_of_2(columns)
        is_whole = rows <= FEW_ROWS and block <= MOST_OF_ROW
        _round_kernel[(rows,)](
            *(numbers, scales, x, None if maxima is None else maxima.contiguous(), rounding.scale),
            columns,
            x.stride(0),
            STATIC=rounding.scale is not None,
            HAS_MAXIMA=maxima is not None and rounding.kind == "token",
            LEAST=LEAST_ROW_SCALE,
            WHOLE=is_whole,
            BLOCK=block if is_whole else min(ROUND_BLOCK, block),
            num_warps=max(8, min(32, block // 1024)) if is_whole else 8,
            **options,
        )


def unpack(matrix: QuantisedMatrix, dtype: torch.dtype) -> Tensor:
    """The matrix [..., N, K] in a type of up to 32 bits, each number times its scale."""
    data, scales, k = matrix.data, matrix.scales, matrix.width
    *stack, n, _ = data.shape
    out = torch.empty(*stack, n, k, dtype=dtype, device=data.device)
    if not out.numel():
        return out
    if matrix.lanes:
        _unpack_lanes_kernel[(k // COLUMNS, triton.cdiv(n, UNPACK_ROWS))](
            *(out, data, scales, n, k, data.stride(0), scales.stride(0)),
            POWER=2.0**-EXPONENT,
            BR=UNPACK_ROWS,
            **dependent_launch(out),
        )
        return out
    data, scales = data.view(-1, *data.shape[-2:]), scales.view(-1, *scales.shape[-2:])
    grid = triton.cdiv(k, UNPACK_COLUMNS), triton.cdiv(n, UNPACK_ROWS), data.shape[0]
    _unpack_kernel[grid](
        *(out, data, scales, n, k, *data.stride()[:2], *scales.stride()[:2]),
        ROWS=matrix.rows,
        COLUMNS=matrix.columns,
        PACKED=data.dtype is torch.int32,
        BR=UNPACK_ROWS,
        BK=UNPACK_COLUMNS,
        **dependent_launch(out),
    )
    return out
