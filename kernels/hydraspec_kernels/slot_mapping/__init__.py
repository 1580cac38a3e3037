"""From positions to cache rows."""

from __future__ import annotations

from torch import Tensor

from hydraspec_kernels.slot_mapping.reference import slot_mapping_reference

__all__ = ["slot_mapping"]


def slot_mapping(table: Tensor, request: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """The cache row [T] of each token row: table [B, P] block ids, request and positions [T]."""
    return slot_mapping_reference(table, request, positions, block_size)
