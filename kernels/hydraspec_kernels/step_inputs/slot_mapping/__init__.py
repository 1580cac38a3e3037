"""From positions to cache rows."""

from __future__ import annotations

from torch import Tensor

from hydraspec_kernels.runtime.launch import runs_kernels
from hydraspec_kernels.step_inputs.slot_mapping.reference import slot_mapping_reference

__all__ = ["slot_mapping"]


def slot_mapping(table: Tensor, request: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """The cache row [T] of each token row: table [B, P] block ids, request and positions [T].

    On a device that runs kernels, rows of request -1 give -1: nothing is written for them.
    """
    if runs_kernels(positions):
        # Triton is imported where kernels run only.
        from hydraspec_kernels.step_inputs.slot_mapping.kernel import slot_mapping_kernel

        return slot_mapping_kernel(table, request, positions, block_size)
    return slot_mapping_reference(table, request, positions, block_size)
