"""The convolutions of DFlash2's layers in one pass over memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hydraspec_kernels.runtime.launch_kernel import dependent_launch, start_next, wait_for_inputs

BLOCK = 1024  # columns of a program


@triton.jit
def block_convolution_kernel(
    # [T, D]
    out_ptr,
    # [T, D] in rows of x_stride
    x_ptr,
    # [T, TAPS, groups] in rows of delta_stride
    delta_ptr,
    # [TAPS, D]
    base_ptr,
    columns,
    groups,
    x_stride,
    delta_stride,
    rows_per_block,
    TAPS: tl.constexpr,
    GROUP: tl.constexpr,  # columns that share a tap of a row
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One block of a row's columns a program."""
    start_next(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    place = row % rows_per_block
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    x_at = x_ptr + row.to(tl.int64) * x_stride + column
    delta_at = delta_ptr + row.to(tl.int64) * delta_stride + column // GROUP
    out = tl.zeros((BLOCK,), tl.float32)
    for tap in tl.static_range(TAPS):
        reads = inside & (place >= tap)
        x = tl.load(x_at - tap * x_stride, mask=reads, other=0.0).to(tl.float32)
        delta = tl.load(delta_at + tap * groups, mask=reads, other=0.0).to(tl.float32)
        base = tl.load(base_ptr + tap * columns + column, mask=reads, other=0.0).to(tl.float32)
        out += (base + delta) * x
    out_at = out_ptr + row.to(tl.int64) * columns + column
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=inside)


def block_convolution_cuda(x: Tensor, delta: Tensor, base: Tensor, rows_per_block: int) -> Tensor:
    """See `hydraspec_kernels.convolution.block_convolution`."""
    (rows, columns), (_, taps, groups) = x.shape, delta.shape
    assert x.stride(1) == delta.stride(2) == 1
    assert delta.stride(1) == groups
    assert base.is_contiguous()
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    if not rows:
        return out
    block_convolution_kernel[(rows, triton.cdiv(columns, BLOCK))](
        out,
        x,
        delta,
        base,
        columns,
        groups,
        x.stride(0),
        delta.stride(0),
        rows_per_block,
        TAPS=taps,
        GROUP=columns // groups,
        BLOCK=BLOCK,
        num_warps=4,
        **dependent_launch(x),
    )
    return out
