"""Few rows times a quantised matrix, whose narrow numbers are read once and stay narrow in memory.

In `_product_kernel` a program owns BR rows of the matrix and all of K, or one of its ranges: FP8
numbers become float16, which holds them exactly, so that products are exact and sums are float32;
scales are applied to sums, of each step where blocks or groups have their own. Four-bit integers
are multiplied by their scale first, rounded to the type of x once, as the reference does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hydraspec_kernels.quantised.plan import (
    RANGE_UNIT,
    PackedTiles,
    SpecializedTiles,
    Tiles,
    shared_columns,
)
from hydraspec_kernels.quantised.records import QuantisedMatrix
from hydraspec_kernels.quantised.round_kernel import round_rows, rounded
from hydraspec_kernels.runtime.launch_kernel import (
    dependent_launch,
    prefetch_l2,
    start_next,
    wait_for_inputs,
)


@triton.jit
def unpacked_step(
    # [BR, 1], the rows' first words
    data_at,
    # [BR], the rows' first scales
    scale_at,
    start,
    K,
    COLUMNS: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
    EVEN: tl.constexpr,
    dtype: tl.constexpr,
):
    """Returns integers times scales [BR, BK] of the columns from `start` on. A word of eight
    integers, and the scale of a group, is loaded once."""
    GROUP: tl.constexpr = COLUMNS if COLUMNS > 0 and COLUMNS < BK else BK
    word = start // 8 + tl.arange(0, BK // 8)
    group = tl.arange(0, BK // GROUP)
    if COLUMNS:
        group += start // COLUMNS
    if EVEN:
        words = tl.load(data_at + word[None, :])
        scales = tl.load(scale_at[:, None] + group[None, :])
    else:
        words = tl.load(data_at + word[None, :], mask=(word * 8 < K)[None, :], other=0)
        inside = (group * COLUMNS < K)[None, :]
        scales = tl.load(scale_at[:, None] + group[None, :], mask=inside, other=0.0)
    four = (words[:, :, None] >> (tl.arange(0, 8) * 4)[None, None, :]) & 15
    four = tl.reshape(four, (BR, BK // GROUP, GROUP)) - 8
    return tl.reshape((four.to(tl.float32) * scales[:, :, None]).to(dtype), (BR, BK))


@triton.jit(do_not_specialize=["M"])
def _product_kernel(
    # [M, N], or partial sums [splits, M, N]
    out_ptr,
    # [M, K]: numbers in float16, or rows that are not rounded
    x_ptr,
    # [M, G] float32, unless PLAIN
    x_scales_ptr,
    # [N, K] e4m3, or [N, K / 8] int32
    data_ptr,
    # [R, C] float32
    scales_ptr,
    M,
    N,
    K,
    stride_x,
    stride_data,
    stride_scales,
    ROWS: tl.constexpr,  # rows of the matrix that share a scale
    COLUMNS: tl.constexpr,  # its columns that do; 0: all
    GROUP: tl.constexpr,  # numbers of x that do; 0: all of a row
    PLAIN: tl.constexpr,  # x is not rounded
    PACKED: tl.constexpr,
    BM: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
    UNIT: tl.constexpr,  # columns, which BK divides: where ranges may begin
    EVEN: tl.constexpr,  # BK divides K
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,  # lines of 128 bytes of a row
    PDL: tl.constexpr,
):
    """One range of K for BR rows of the matrix and BM rows of x."""
    start_next(PDL)
    units, split, splits = tl.cdiv(K, UNIT), tl.program_id(2), tl.num_programs(2)
    low = split * units // splits * UNIT
    high = tl.minimum((split + 1) * units // splits * UNIT, K)
    row = tl.minimum(tl.program_id(0) * BR + tl.arange(0, BR), N - 1).to(tl.int64)
    if PDL and PREFETCH > 0:
        PER_ELEMENT: tl.constexpr = 8 if PACKED else 1
        LINE: tl.constexpr = 128 // (data_ptr.dtype.element_ty.primitive_bitwidth // 8)
        first = low // PER_ELEMENT
        line = tl.minimum(first + tl.arange(0, PREFETCH) * LINE, stride_data - 1)
        prefetch_l2(data_ptr + row[:, None] * stride_data + line[None, :])
    wait_for_inputs(PDL)
    m, k = tl.program_id(1) * BM + tl.arange(0, BM), tl.arange(0, BK)
    real = m < M
    x_at = x_ptr + m.to(tl.int64)[:, None] * stride_x + k[None, :]
    scale_at = scales_ptr + row // ROWS * stride_scales
    by_step: tl.constexpr = not PACKED and (COLUMNS > 0 or GROUP > 0)
    y = tl.zeros((BR, BM), tl.float32)
    for start in tl.range(low, high, BK, num_stages=STAGES):
        x_mask = real[:, None]
        if not EVEN:
            x_mask = x_mask & (start + k < K)[None, :]
        v = tl.load(x_at + start, mask=x_mask, other=0.0)
        if PACKED:
            at = data_ptr + row[:, None] * stride_data
            w = unpacked_step(at, scale_at, start, K, COLUMNS, BR, BK, EVEN, v.dtype)
        else:
            at = data_ptr + row[:, None] * stride_data + (start + k)[None, :]
            if EVEN:
                w = tl.load(at).to(tl.float16)
            else:
                w = tl.load(at, mask=(start + k < K)[None, :], other=0.0).to(tl.float16)
            if PLAIN:
                w = w.to(v.dtype)
        if by_step:
            part = tl.dot(w, tl.trans(v))
            if COLUMNS:
                part = part * tl.load(scale_at + start // COLUMNS)[:, None]
            if GROUP:
                groups = tl.cdiv(K, GROUP)
                s_at = x_scales_ptr + m * groups + start // GROUP
                part = part * tl.load(s_at, mask=real, other=0.0)[None, :]
            y += part
        else:
            y = tl.dot(w, tl.trans(v), y)
    if not PACKED and COLUMNS == 0:
        y = y * tl.load(scale_at)[:, None]
    if not PLAIN and GROUP == 0:
        y = y * tl.load(x_scales_ptr + m, mask=real, other=0.0)[None, :]
    n = tl.program_id(0) * BR + tl.arange(0, BR)
    to = out_ptr + (split.to(tl.int64) * M + m)[None, :] * N + n[:, None]
    tl.store(to, y.to(out_ptr.dtype.element_ty), mask=(n < N)[:, None] & real[None, :])


def launch(
    x: Tensor,
    matrix: QuantisedMatrix,
    maxima: Tensor | None,
    tiles: Tiles | SpecializedTiles | PackedTiles,
) -> Tensor:
    """Product [T, N] of rows x [T, K], rounded first, with the matrix, in x's dtype; partial sums
    [S, T, N] in float32 if the tiles split K."""
    if isinstance(tiles, SpecializedTiles):
        from hydraspec_kernels.quantised.specialized_kernel import specialized_product  # Gluon

        return specialized_product(rounded(x, matrix.rounding, maxima), matrix, tiles)
    if isinstance(tiles, PackedTiles):
        from hydraspec_kernels.quantised.packed_kernel import packed_product  # Gluon

        return packed_product(x, matrix, tiles)
    rounding = matrix.rounding
    numbers, scales = x if x.stride(1) == 1 else x.contiguous(), None
    if rounding.kind != "float":
        numbers, scales = round_rows(x, rounding, maxima, torch.float16)
    return product(numbers, scales, matrix, tiles, x.dtype)


def product(
    numbers: Tensor,
    scales: Tensor | None,
    matrix: QuantisedMatrix,
    tiles: Tiles,
    dtype: torch.dtype,
) -> Tensor:
    """Product [T, N] in dtype, or partial sums [S, T, N] in float32, of rounded rows, numbers
    [T, K] in float16 with scales [T, G], or of rows that are not rounded, with the matrix."""
    rows, n, rounding = numbers.shape[0], matrix.data.shape[0], matrix.rounding
    if tiles.splits > 1:
        out = numbers.new_empty(tiles.splits, rows, n, dtype=torch.float32)
    else:
        out = numbers.new_empty(rows, n, dtype=dtype)
    grid = triton.cdiv(n, tiles.rows), triton.cdiv(rows, tiles.m), tiles.splits
    _product_kernel[grid](
        out,
        numbers,
        scales,
        matrix.data,
        matrix.scales,
        rows,
        n,
        matrix.width,
        numbers.stride(0),
        matrix.data.stride(0),
        matrix.scales.stride(0),
        ROWS=matrix.rows,
        COLUMNS=shared_columns(matrix),
        GROUP=rounding.group if rounding.kind == "group" else 0,
        PLAIN=rounding.kind == "float",
        PACKED=matrix.data.dtype is torch.int32,
        BM=tiles.m,
        BR=tiles.rows,
        BK=tiles.step,
        UNIT=RANGE_UNIT,
        EVEN=matrix.width % tiles.step == 0,
        STAGES=tiles.stages,
        PREFETCH=tiles.prefetch,
        num_warps=tiles.warps,
        **dependent_launch(numbers),
    )
    return out
