"""Soft cap of logits in one pass over memory, for the products that do not end with it."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hydraspec_kernels.runtime.launch import check_contiguous
from hydraspec_kernels.runtime.launch_kernel import dependent_launch, start_next, wait_for_inputs

BLOCK = 4096  # columns of a program: twice 16 bytes for each thread of eight warps


@triton.jit
def soft_capped(x, softcap):
    """softcap * tanh(x / softcap) of float32 x, by tanh(u) = 2 / (1 + exp(-2u)) - 1.

    Where exp overflows or vanishes it is -softcap or softcap, as for infinite x; NaN stays NaN.
    """
    return softcap * (2.0 / (1.0 + tl.exp(x * (-2.0 / softcap))) - 1.0)


@triton.jit
def soft_cap_kernel(
    # [T, N], capped in place
    logits_ptr,
    N,
    softcap,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Caps one block of a row a program; consecutive programs take consecutive memory."""
    start_next(PDL)
    wait_for_inputs(PDL)
    blocks = tl.cdiv(N, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    at = logits_ptr + row * N + column
    x = tl.load(at, mask=column < N, other=0.0).to(tl.float32)
    tl.store(at, soft_capped(x, softcap).to(logits_ptr.dtype.element_ty), mask=column < N)


def soft_cap_cuda_(logits: Tensor, softcap: float) -> Tensor:
    """See `hydraspec_kernels.activation.soft_cap_`."""
    check_contiguous(logits)
    if logits.numel():
        columns = logits.shape[-1]
        soft_cap_kernel[(logits.numel() // columns * triton.cdiv(columns, BLOCK),)](
            logits, columns, softcap, BLOCK=BLOCK, num_warps=8, **dependent_launch(logits)
        )
    return logits
