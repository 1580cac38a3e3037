"""Short causal convolutions inside blocks of rows, whose taps partly follow from the rows."""

from __future__ import annotations

import torch
from torch import Tensor

from hydraspec_kernels.convolution.reference import block_convolution_reference
from hydraspec_kernels.runtime.launch import runs_kernels

__all__ = ["block_convolution"]


def block_convolution(x: Tensor, delta: Tensor, base: Tensor, rows_per_block: int) -> Tensor:
    """Sums of the last rows of x [T, D], of each row's own block alone, in a new tensor [T, D].

    out[i, c] = sum over t of (base[t, c] + delta[i, t, c // (D / G)]) * x[i - t, c], where i - t is
    in the block of i. base [taps, D]; delta [T, taps, G], each row contiguous, any distance apart;
    T is a whole number of blocks. Sums are float32 or wider, rounded once.
    """
    assert x.shape[0] % rows_per_block == 0
    assert base.shape == (delta.shape[1], x.shape[1])
    assert x.shape[1] % delta.shape[2] == 0
    if runs_kernels(x) and x.dtype is not torch.float64:
        from hydraspec_kernels.convolution.kernel import block_convolution_cuda  # Triton

        return block_convolution_cuda(x, delta, base, rows_per_block)
    return block_convolution_reference(x, delta, base, rows_per_block)
