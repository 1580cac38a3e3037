"""The gated activations in one pass over memory, for more rows than the gated linears take."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hydraspec_kernels.quantised.e4m3_kernel import NEXT_GROUP, rounded_row
from hydraspec_kernels.quantised.records import RoundedRows, Rounding
from hydraspec_kernels.quantised.reference import E4M3_MAX
from hydraspec_kernels.quantised.round_kernel import (
    MOST_OF_ROW,
    empty_rounded,
    least_of,
    rounded,
)
from hydraspec_kernels.runtime.launch_kernel import dependent_launch, start_next, wait_for_inputs

BLOCK = 1024  # columns of a program: 16 bytes per thread of four warps


@triton.jit
def silu(x):
    """SiLU x * sigmoid(x) of float32 x; at x << 0, where exp overflows, the result is -0."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def gelu_tanh(x):
    """GELU 0.5 x (1 + tanh(u)) as x * sigmoid(2 u), which keeps its digits for tanh(u) near -1."""
    u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x / (1.0 + tl.exp(-2.0 * u))


@triton.jit
def gated_activation_kernel(
    # [rows, inner]; e4m3 where GROUP is not 0
    out_ptr,
    # [groups, NEXT_GROUP] float32; not written where GROUP is 0
    scales_ptr,
    # [rows, 2 * inner] in rows of gate_up_stride
    gate_up_ptr,
    inner,
    gate_up_stride,
    USES_SILU: tl.constexpr,
    GROUP: tl.constexpr,  # numbers of the output that share a scale; 0: it is not rounded to e4m3
    LEAST: tl.constexpr,  # see `least_of`
    MOST: tl.constexpr,  # the largest e4m3 number
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The activated gate half times the up half, one block of a row a program."""
    start_next(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    start = gate_up_ptr + row * gate_up_stride
    gate = tl.load(start + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(start + inner + column, mask=inside, other=0.0).to(tl.float32)
    dtype = gate_up_ptr.dtype.element_ty
    activated = silu(gate) if USES_SILU else gelu_tanh(gate)
    out = activated.to(dtype).to(tl.float32) * up  # rounded in between, like two operators
    out = out.to(dtype)
    if GROUP:
        out, scale = rounded_row(out.to(tl.float32), GROUP, LEAST, MOST, BLOCK)
        group = tl.program_id(1) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
        groups = tl.cdiv(inner, GROUP)
        tl.store(scales_ptr + group * NEXT_GROUP + row, scale, mask=group < groups)
    tl.store(out_ptr + row * inner + column, out.to(out_ptr.dtype.element_ty), mask=inside)


def gated_activation_cuda(gate_up: Tensor, activation: str) -> Tensor:
    """See `hydraspec_kernels.activation.gated_activation`."""
    inner = gate_up.shape[-1] // 2
    if gate_up.stride(-1) != 1 or (gate_up.dim() != 2 and not gate_up.is_contiguous()):
        gate_up = gate_up.contiguous()
    out = torch.empty(*gate_up.shape[:-1], inner, dtype=gate_up.dtype, device=gate_up.device)
    _launch(out, None, gate_up, activation, None)
    return out


def rounded_activation_cuda(gate_up: Tensor, activation: str, rounding: Rounding) -> RoundedRows:
    """See `hydraspec_kernels.activation.rounded_activation`."""
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    if rounding.kind == "token" and inner > MOST_OF_ROW:
        return rounded(gated_activation_cuda(gate_up, activation), rounding, None)
    out = empty_rounded(rows, inner, rounding, gate_up)
    _launch(out.padded, out.by_group, gate_up, activation, rounding)
    return out


def _launch(
    out: Tensor,
    scales: Tensor | None,
    gate_up: Tensor,
    activation: str,
    rounding: Rounding | None,
) -> None:
    """Fills out [..., I], and scales, for gate_up [..., 2I]."""
    inner = gate_up.shape[-1] // 2
    assert gate_up.shape[-1] == 2 * inner
    assert gate_up.stride(-1) == 1
    if not gate_up.numel():
        return
    stride = gate_up.stride(0) if gate_up.dim() == 2 else 2 * inner
    by_row = rounding is not None and rounding.kind == "token"
    block = triton.next_power_of_2(inner) if by_row else BLOCK
    group = 0 if rounding is None else block if by_row else rounding.group
    gated_activation_kernel[(gate_up.numel() // (2 * inner), triton.cdiv(inner, block))](
        out,
        scales,
        gate_up,
        inner,
        stride,
        USES_SILU=activation == "silu",
        GROUP=group,
        LEAST=least_of(rounding),
        MOST=E4M3_MAX,
        BLOCK=block,
        num_warps=max(4, min(32, block // 1024)),
        **dependent_launch(gate_up),
    )
