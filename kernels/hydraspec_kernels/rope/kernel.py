"""The rotary table, and the rotation of heads in place, one launch each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hydraspec_kernels.runtime.launch_kernel import dependent_launch, start_next, wait_for_inputs

TABLE_TILE = 256  # angles of a program of `rope_table`
HEADS_TILE = 1024  # numbers of a program of `apply_rope`


@triton.jit(do_not_specialize=["num_rows"])
def rope_table_kernel(
    # [num_rows, 2 * half]
    cos_ptr,
    # [num_rows, 2 * half]
    sin_ptr,
    # [num_rows]
    positions_ptr,
    # [half] float32
    theta_ptr,
    num_rows,
    half,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    """Cosines and signed sines of positions times frequencies, each half written twice."""
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    i = tl.zeros((ROWS, HALF), tl.int32) + tl.arange(0, HALF)[None, :]
    theta = tl.load(theta_ptr + i, mask=i < half, other=0.0)
    wait_for_inputs(PDL)
    position = tl.load(positions_ptr + row, mask=row < num_rows, other=0).to(tl.float32)
    angle = position * theta
    # Fast approximations do not suffice: large positions need an exact range reduction.
    cos, sin = tl.cos(angle), tl.sin(angle)
    inside = (row < num_rows) & (i < half)
    at = row * (2 * half) + i
    tl.store(cos_ptr + at, cos.to(cos_ptr.dtype.element_ty), mask=inside)
    tl.store(cos_ptr + at + half, cos.to(cos_ptr.dtype.element_ty), mask=inside)
    tl.store(sin_ptr + at, (-sin).to(sin_ptr.dtype.element_ty), mask=inside)
    tl.store(sin_ptr + at + half, sin.to(sin_ptr.dtype.element_ty), mask=inside)


@triton.jit
def rotate_halves(a, b, cos_a, cos_b, sin_a, sin_b, dtype: tl.constexpr):
    """Rotated halves, in dtype, of float32 heads with halves a and b; x * cos is rounded first."""
    rotated_a = (a * cos_a).to(dtype).to(tl.float32) + b * sin_a
    rotated_b = (b * cos_b).to(dtype).to(tl.float32) + a * sin_b
    return rotated_a.to(dtype), rotated_b.to(dtype)


@triton.jit
def apply_rope_kernel(
    # [T, heads, 2 * HALF] in strides, read and written
    x_ptr,
    # [T, 2 * HALF]
    cos_ptr,
    # [T, 2 * HALF]
    sin_ptr,
    heads,
    x_row_stride,
    x_head_stride,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rotates the heads of a row in place."""
    start_next(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    i = tl.arange(0, PADDED_HALF)[None, :]
    inside = (head < heads) & (i < HALF)
    at = row * (2 * HALF) + i
    cos_a = tl.load(cos_ptr + at, mask=i < HALF, other=0.0).to(tl.float32)
    cos_b = tl.load(cos_ptr + at + HALF, mask=i < HALF, other=0.0).to(tl.float32)
    sin_a = tl.load(sin_ptr + at, mask=i < HALF, other=0.0).to(tl.float32)
    sin_b = tl.load(sin_ptr + at + HALF, mask=i < HALF, other=0.0).to(tl.float32)
    x_at = x_ptr + row * x_row_stride + head * x_head_stride + i
    a = tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x_at + HALF, mask=inside, other=0.0).to(tl.float32)
    dtype = x_ptr.dtype.element_ty
    a, b = rotate_halves(a, b, cos_a, cos_b, sin_a, sin_b, dtype)
    tl.store(x_at, a, mask=inside)
    tl.store(x_at + HALF, b, mask=inside)


def rope_table_cuda(positions: Tensor, theta: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines [T, 1, H], in dtype, of positions [T] and theta [H/2] float32."""
    rows, half = positions.shape[0], theta.shape[0]
    assert theta.dtype == torch.float32
    assert theta.stride(0) == 1
    positions = positions.contiguous()
    cos, sin = torch.empty(2, rows, 1, 2 * half, dtype=dtype, device=positions.device).unbind()
    if not rows:
        return cos, sin
    padded = triton.next_power_of_2(half)
    per_program = max(1, TABLE_TILE // padded)
    rope_table_kernel[(triton.cdiv(rows, per_program),)](
        cos,
        sin,
        positions,
        theta,
        rows,
        half,
        ROWS=per_program,
        HALF=padded,
        num_warps=4,
        **dependent_launch(positions),
    )
    return cos, sin


def apply_rope_cuda(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `hydraspec_kernels.rope.apply_rope`; a head is contiguous, other strides are free."""
    rows, heads, size = x.shape
    assert x.stride(2) == 1
    assert cos.shape == sin.shape == (rows, 1, size)
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    if not x.numel():
        return x
    half = triton.next_power_of_2(size // 2)
    tile = max(1, HEADS_TILE // (2 * half))
    apply_rope_kernel[(rows, triton.cdiv(heads, tile))](
        x,
        cos,
        sin,
        heads,
        x.stride(0),
        x.stride(1),
        HEADS=tile,
        HALF=size // 2,
        PADDED_HALF=half,
        num_warps=2,
        **dependent_launch(x),
    )
    return x
