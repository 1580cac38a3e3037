"""The residual sum and its norms: a row stays in registers from partial sums to the next norm."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hydraspec_kernels.norms.records import MAX_WIDTH, AddNorm
from hydraspec_kernels.norms.rms_norm_kernel import inverse_rms
from hydraspec_kernels.quantised.e4m3_kernel import NEXT_GROUP, rounded_row
from hydraspec_kernels.quantised.records import RoundedRows, Rounding
from hydraspec_kernels.quantised.reference import E4M3_MAX
from hydraspec_kernels.quantised.round_kernel import empty_rounded, least_of
from hydraspec_kernels.runtime.launch_kernel import dependent_launch, start_next, wait_for_inputs

REGISTERS = 65536  # of an SM
FEW_ROWS = 512


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
    scale,
    PARTS: tl.constexpr,
    HAS_POST_NORM: tl.constexpr,
    HAS_POST_WEIGHT: tl.constexpr,
    HAS_NEXT_NORM: tl.constexpr,
    ROUNDS: tl.constexpr,  # y to e4m3
    GROUP: tl.constexpr,  # numbers of y that share a scale; WIDTH: a row's do
    LEAST: tl.constexpr,  # of a group's largest magnitude, of a row's scale
    MOST: tl.constexpr,  # the largest e4m3 number
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Adds the norm of the summed parts of x to h in place, and writes the next norm of h to y."""
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < width
    dtype = h_ptr.dtype.element_ty
    if HAS_POST_WEIGHT:
        post_weight = tl.load(post_weight_ptr + column, mask=inside, other=0.0)
    if HAS_NEXT_NORM:
        next_weight = tl.load(next_weight_ptr + column, mask=inside, other=0.0)
    wait_for_inputs(PDL)
    h_at = h_ptr + row * h_stride + column
    h = tl.load(h_at, mask=inside, other=0.0)
    tl.debug_barrier()  # else ptxas moves this load after the sums, which exposes its latency
    x_at = x_ptr + row * x_row_stride + column
    x = tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
    for _ in tl.static_range(1, PARTS):
        x_at += x_part_stride
        x += tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
    x = x.to(dtype).to(tl.float32)
    if HAS_POST_NORM:
        x *= inverse_rms(x, width, eps)
        if HAS_POST_WEIGHT:
            x *= post_weight.to(tl.float32)
        x = x.to(dtype).to(tl.float32)
    h = (h.to(tl.float32) + x).to(dtype)
    h = (h.to(tl.float32) * scale).to(dtype)  # by 1 it is exact
    tl.store(h_at, h, mask=inside)
    if HAS_NEXT_NORM:
        wide = h.to(tl.float32)
        y = wide * inverse_rms(wide, width, eps) * next_weight.to(tl.float32)
        y = y.to(dtype)
        if ROUNDS:
            y, scale = rounded_row(y.to(tl.float32), GROUP, LEAST, MOST, WIDTH)
            group = tl.arange(0, WIDTH // GROUP)
            groups = tl.cdiv(width, GROUP)
            tl.store(scales_ptr + group * NEXT_GROUP + row, scale, mask=group < groups)
        tl.store(y_ptr + row * width + column, y.to(y_ptr.dtype.element_ty), mask=inside)


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
    padded = triton.next_power_of_2(width)
    warps = warps_for(padded, rows)
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
        1.0 if scale is None else scale,
        PARTS=parts,
        HAS_POST_NORM=has_post_norm,
        HAS_POST_WEIGHT=has_post_weight,
        HAS_NEXT_NORM=next_weight is not None,
        ROUNDS=rounding is not None,
        GROUP=rounding.group if rounding is not None and rounding.kind == "group" else padded,
        LEAST=least_of(rounding),
        MOST=E4M3_MAX,
        WIDTH=padded,
        num_warps=warps,
        # Without a bound ptxas aims at many programs per SM and loads the parts one by one.
        maxnreg=min(128, REGISTERS // (32 * warps)),
        **dependent_launch(h),
    )
    return AddNorm(h, y)


def warps_for(width: int, rows: int) -> int:
    """Warps of a program. With few rows a thread has 16 bytes of h (8 numbers of 16 bits), for the
    shortest latency; with many rows it has twice that, so that more rows share an SM.
    """
    return min(32, max(1, width // (256 if rows <= FEW_ROWS else 512)))
