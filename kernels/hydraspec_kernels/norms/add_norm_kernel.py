"""The residual sum and its norms: a row stays in registers from partial sums to the next norm."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hydraspec_kernels.norms.records import MAX_WIDTH, AddNorm
from hydraspec_kernels.quantised.e4m3_kernel import (
    INTERPRETED,
    NEXT_GROUP,
    own_row_scale,
    rounded_by,
    rounded_row,
)
from hydraspec_kernels.quantised.records import RoundedRows, Rounding
from hydraspec_kernels.quantised.reference import E4M3_MAX
from hydraspec_kernels.quantised.round_kernel import empty_rounded, least_of
from hydraspec_kernels.runtime.launch_kernel import dependent_launch, start_next, wait_for_inputs

REGISTERS = 65536  # of an SM
FEW_ROWS = 512
LEAST_IN_PIECES, MOST_IN_PIECES = 1024, 8192  # numbers of a row
# Registers of a thread with which a program of a row in pieces fits beside one of the product
# before it, which matters from so many rows on; they suffice for up to so many parts.
REGISTERS_BESIDE, ROWS_BESIDE, PARTS_BESIDE = 48, 16, 3


@triton.jit
def _in_type(x, dtype: tl.constexpr):
    """float32 x as if it had been stored in dtype. bfloat16 takes one conversion for two numbers:
    the compiler converts them one by one, at a quarter of the rate."""
    if INTERPRETED or dtype != tl.bfloat16:
        return x.to(dtype).to(tl.float32)
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 pair;
            cvt.rn.bf16x2.f32 pair, $3, $2;
            shl.b32 $0, pair, 16;
            and.b32 $1, pair, 0xFFFF0000;
            }""",
            "=r,=r,r,r",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )


@triton.jit
def _inverse_rms(x, width, eps, PIECES: tl.constexpr):
    """`inverse_rms` of a row in pieces, all in one layout: one sum over threads."""
    squares = x[0] * x[0]
    for piece in tl.static_range(1, PIECES):
        squares += x[piece] * x[piece]
    return tl.rsqrt(tl.sum(squares, axis=-1, keep_dims=True) / width + eps)


@triton.jit
def add_norm_kernel(
    # [T, width] in rows of h_stride, read and written
    h_ptr,
    # [T, width]; e4m3 with ROUNDS
    y_ptr,
    # [groups, NEXT_GROUP] float32; not written unless ROUNDS
    scales_ptr,
    # [PARTS, T, width]
    x_ptr,
    # [width]
    post_weight_ptr,
    # [width]
    next_weight_ptr,
    width,
    h_stride,
    x_part_stride,
    x_row_stride,
    eps,
    scale,  # None: 1
    PARTS: tl.constexpr,
    HAS_POST_NORM: tl.constexpr,
    HAS_POST_WEIGHT: tl.constexpr,
    HAS_NEXT_NORM: tl.constexpr,
    ROUNDS: tl.constexpr,  # y to e4m3
    GROUP: tl.constexpr,  # numbers of y that share a scale; 0: a row's do
    LEAST: tl.constexpr,  # of a group's largest magnitude, of a row's scale
    MOST: tl.constexpr,  # the largest e4m3 number
    PIECES: tl.constexpr,  # of a row, of equal padded width
    WIDTH: tl.constexpr,  # of a piece
    PDL: tl.constexpr,
):
    """Adds the norm of the summed parts of x to h in place, and writes the next norm of h to y."""
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    dtype = h_ptr.dtype.element_ty
    post_weight, next_weight = (), ()
    for piece in tl.static_range(PIECES):
        column = piece * WIDTH + tl.arange(0, WIDTH)
        if HAS_POST_WEIGHT:
            post_weight += (tl.load(post_weight_ptr + column, mask=column < width, other=0.0),)
        if HAS_NEXT_NORM:
            next_weight += (tl.load(next_weight_ptr + column, mask=column < width, other=0.0),)
    wait_for_inputs(PDL)
    before, x, h = (), (), ()
    for piece in tl.static_range(PIECES):
        column = piece * WIDTH + tl.arange(0, WIDTH)
        before += (tl.load(h_ptr + row * h_stride + column, mask=column < width, other=0.0),)
    tl.debug_barrier()  # else ptxas moves these loads after the sums, which exposes their latency
    for piece in tl.static_range(PIECES):
        column = piece * WIDTH + tl.arange(0, WIDTH)
        x_at = x_ptr + row * x_row_stride + column
        total = tl.load(x_at, mask=column < width, other=0.0).to(tl.float32)
        for _ in tl.static_range(1, PARTS):
            x_at += x_part_stride
            total += tl.load(x_at, mask=column < width, other=0.0).to(tl.float32)
        x += (_in_type(total, dtype),)
    if HAS_POST_NORM:
        factor = _inverse_rms(x, width, eps, PIECES)
    for piece in tl.static_range(PIECES):
        column = piece * WIDTH + tl.arange(0, WIDTH)
        added = x[piece]
        if HAS_POST_NORM:
            added *= factor
            if HAS_POST_WEIGHT:
                added *= post_weight[piece].to(tl.float32)
            added = _in_type(added, dtype)
        after = _in_type(before[piece].to(tl.float32) + added, dtype)
        if scale is not None:
            after = _in_type(after * scale, dtype)
        tl.store(h_ptr + row * h_stride + column, after.to(dtype), mask=column < width)
        h += (after,)
    if HAS_NEXT_NORM:
        factor = _inverse_rms(h, width, eps, PIECES)
        normed = ()
        for piece in tl.static_range(PIECES):
            normed += (h[piece] * factor * next_weight[piece].to(tl.float32),)
        if ROUNDS and GROUP == 0:
            top = tl.abs(_in_type(normed[0], dtype))
            for piece in tl.static_range(1, PIECES):
                top = tl.maximum(top, tl.abs(_in_type(normed[piece], dtype)))
            row_scale = own_row_scale(tl.max(top, 0), LEAST, MOST)
            tl.store(scales_ptr + row, row_scale)
        for piece in tl.static_range(PIECES):
            column = piece * WIDTH + tl.arange(0, WIDTH)
            y = normed[piece]
            if ROUNDS and GROUP == 0:
                y = rounded_by(_in_type(y, dtype), row_scale, MOST)
            elif ROUNDS:
                y, scales = rounded_row(_in_type(y, dtype), GROUP, LEAST, MOST, WIDTH)
                group = piece * (WIDTH // GROUP) + tl.arange(0, WIDTH // GROUP)
                groups = tl.cdiv(width, GROUP)
                tl.store(scales_ptr + group * NEXT_GROUP + row, scales, mask=group < groups)
            y_at = y_ptr + row * width + column
            tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=column < width)


def add_norm_cuda(
    h: Tensor,
    x: Tensor,
    *,
    post_weight: Tensor | None,
    next_weight: Tensor | None,
    eps: float,
    scale: float | None = None,
    has_post_norm: bool = True,
    rounding: Rounding | None = None,
) -> AddNorm:
    """See `hydraspec_kernels.norms.add_norm`; D is at most MAX_WIDTH."""
    rows, width = h.shape
    parts = x.shape[0] if x.dim() == 3 else 1
    assert width <= MAX_WIDTH, f"rows of {width} numbers"
    assert x.shape[-2:] == h.shape, f"{tuple(x.shape)} added to {tuple(h.shape)}"
    assert h.stride(1) == 1
    if x.stride(-1) != 1:
        x = x.contiguous()
    y: Tensor | RoundedRows | None = None
    stored, scales = None, None
    if next_weight is not None:
        assert next_weight.is_contiguous()
        if rounding is None:
            y = stored = torch.empty(rows, width, dtype=h.dtype, device=h.device)
        else:
            y = empty_rounded(rows, width, rounding, h)
            stored, scales = y.padded, y.by_group
    has_post_weight = has_post_norm and post_weight is not None
    if has_post_weight:
        assert post_weight is not None
        assert post_weight.is_contiguous()
    if not rows:
        return AddNorm(h, y)
    pieces, padded = _pieces(width, rows, h.element_size(), rounding)
    warps = warps_for(triton.next_power_of_2(width), rows) // (2 if pieces > 1 else 1)
    # Without a bound ptxas aims at many programs per SM and loads the parts one by one.
    registers = min(128, REGISTERS // (32 * warps))
    if pieces > 1 and rows >= ROWS_BESIDE and parts <= PARTS_BESIDE:
        registers = REGISTERS_BESIDE
    add_norm_kernel[(rows,)](
        h,
        stored,
        scales,
        x,
        post_weight if has_post_weight else None,
        next_weight,
        width,
        h.stride(0),
        x.stride(0) if x.dim() == 3 else 0,
        x.stride(-2),
        eps,
        scale,
        PARTS=parts,
        HAS_POST_NORM=has_post_norm,
        HAS_POST_WEIGHT=has_post_weight,
        HAS_NEXT_NORM=next_weight is not None,
        ROUNDS=rounding is not None,
        GROUP=rounding.group if rounding is not None and rounding.kind == "group" else 0,
        LEAST=least_of(rounding),
        MOST=E4M3_MAX,
        PIECES=pieces,
        WIDTH=padded,
        num_warps=warps,
        maxnreg=registers,
        **dependent_launch(h),
    )
    return AddNorm(h, y)


def _pieces(width: int, rows: int, element_size: int, rounding: Rounding | None) -> tuple[int, int]:
    """Pieces of a row and their padded width: three quarters of a power of two where they hold the
    row and whole groups of it, and rows are few."""
    padded = max(2, triton.next_power_of_2(width))
    piece = padded // 4
    is_whole = rounding is None or rounding.kind != "group" or piece % rounding.group == 0
    fits = LEAST_IN_PIECES <= padded <= MOST_IN_PIECES and width <= 3 * piece and element_size == 2
    return (3, piece) if fits and is_whole and rows <= FEW_ROWS else (1, padded)


def warps_for(width: int, rows: int) -> int:
    """Warps of a program. With few rows a thread has 16 bytes of h (8 numbers of 16 bits), for the
    shortest latency; with many rows it has twice that, so that more rows share an SM.
    """
    return min(32, max(1, width // (256 if rows <= FEW_ROWS else 512)))
