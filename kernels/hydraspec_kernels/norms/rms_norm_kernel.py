"""RMSNorm over the last dimension: rows are held in registers, several per program if short."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hydraspec_kernels.norms.records import MAX_WIDTH
from hydraspec_kernels.runtime.launch_kernel import dependent_launch, start_next, wait_for_inputs

MIN_TILE = 1024  # least count of numbers of a program: two warps with 16 of them a thread


@triton.jit
def inverse_rms(x, width, eps):
    """Factor 1 / sqrt(mean(x^2) + eps) [.., 1] of float32 x [.., WIDTH], zero after `width`."""
    return tl.rsqrt(tl.sum(x * x, axis=-1, keep_dims=True) / width + eps)


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    # [num_rows, width]
    y_ptr,
    # row r at (r // inner) * outer_stride + (r % inner) * inner_stride
    x_ptr,
    # [width]
    weight_ptr,
    num_rows,
    width,
    inner,
    outer_stride,
    inner_stride,
    eps,
    HAS_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """RMSNorm of ROWS rows a program, with or without a weight."""
    start_next(PDL)
    # A full tile, so that the weight needs no broadcast between threads.
    column = tl.zeros((ROWS, WIDTH), tl.int32) + tl.arange(0, WIDTH)[None, :]
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    inside = (row < num_rows) & (column < width)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    start = (row // inner) * outer_stride + (row % inner) * inner_stride
    x = tl.load(x_ptr + start + column, mask=inside, other=0.0).to(tl.float32)
    y = x * inverse_rms(x, width, eps)
    if HAS_WEIGHT:
        y *= weight
    tl.store(y_ptr + row * width + column, y.to(y_ptr.dtype.element_ty), mask=inside)


def row_strides(x: Tensor) -> tuple[int, int, int] | None:
    """Inner size, outer stride and inner stride of rows of x [..., H]; None: x has to be copied."""
    if x.is_contiguous():
        return 1, x.shape[-1], 0
    if x.stride(-1) != 1 or x.dim() not in (2, 3):
        return None
    return (x.shape[1], x.stride(0), x.stride(1)) if x.dim() == 3 else (1, x.stride(0), 0)


def rms_norm_cuda(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """See `hydraspec_kernels.norms.rms_norm`; x's last dimension is at most MAX_WIDTH."""
    width = x.shape[-1]
    assert width <= MAX_WIDTH, f"rows of {width} numbers"
    assert weight is None or (weight.shape == (width,) and weight.is_contiguous())
    strides = row_strides(x)
    if strides is None:
        x, strides = x.contiguous(), (1, width, 0)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_rows = x.numel() // width if width else 0
    if not num_rows:
        return y
    padded = triton.next_power_of_2(width)
    rows = max(1, MIN_TILE // padded)
    rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
        y,
        x,
        weight,
        num_rows,
        width,
        *strides,
        eps,
        HAS_WEIGHT=weight is not None,
        ROWS=rows,
        WIDTH=padded,
        num_warps=warps_for(rows * padded),
        **dependent_launch(x),
    )
    return y


def warps_for(numbers: int) -> int:
    """Warps for a tile of 16-bit numbers, 16 of them per thread; 2 to 16."""
    return min(16, max(2, numbers // 512))
