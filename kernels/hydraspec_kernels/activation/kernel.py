"""The gated activations in one pass over memory, for more rows than the gated linears take."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

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
    # [rows, inner]
    out_ptr,
    # [rows, 2 * inner] in rows of gate_up_stride
    gate_up_ptr,
    inner,
    gate_up_stride,
    USES_SILU: tl.constexpr,
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
    dtype = out_ptr.dtype.element_ty
    activated = silu(gate) if USES_SILU else gelu_tanh(gate)
    out = activated.to(dtype).to(tl.float32) * up  # rounded in between, like two operators
    tl.store(out_ptr + row * inner + column, out.to(dtype), mask=inside)


def gated_activation_cuda(gate_up: Tensor, activation: str) -> Tensor:
    """See `hydraspec_kernels.activation.gated_activation`."""
    inner = gate_up.shape[-1] // 2
    assert gate_up.shape[-1] == 2 * inner
    if gate_up.stride(-1) != 1 or (gate_up.dim() != 2 and not gate_up.is_contiguous()):
        gate_up = gate_up.contiguous()
    out = torch.empty(*gate_up.shape[:-1], inner, dtype=gate_up.dtype, device=gate_up.device)
    if not out.numel():
        return out
    stride = gate_up.stride(0) if gate_up.dim() == 2 else 2 * inner
    gated_activation_kernel[(out.numel() // inner, triton.cdiv(inner, BLOCK))](
        out,
        gate_up,
        inner,
        stride,
        USES_SILU=activation == "silu",
        BLOCK=BLOCK,
        num_warps=4,
        **dependent_launch(gate_up),
    )
    return out
