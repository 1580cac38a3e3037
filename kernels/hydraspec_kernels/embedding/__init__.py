"""Token embeddings, scaled, in one kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from hydraspec_kernels.embedding.reference import embed_beside_reference, embed_reference
from hydraspec_kernels.runtime.launch import runs_kernels

__all__ = ["embed", "embed_beside"]


def embed(token_ids: Tensor, table: Tensor, scale: float | None = None) -> Tensor:
    """Rows token_ids [...] of table [V, D] times scale -> [..., D], rounded once.

    Every id must be in the table. On CUDA, where a padding row may hold anything, one that is not
    reads row 0; elsewhere it raises IndexError.
    """
    if runs_kernels(table) and table.dtype is not torch.float64:
        from hydraspec_kernels.embedding.kernel import embed_cuda  # Triton, where there is a GPU

        return embed_cuda(token_ids, table, scale)
    return embed_reference(token_ids, table, scale)


def embed_beside(
    token_ids: Tensor,
    table: Tensor,
    scale: float | None,
    hidden: Tensor,
    rows: Tensor | None = None,
) -> Tensor:
    """`embed` of token_ids [B], and behind each its row of hidden [B, H], or of hidden [T, H] at
    rows [B] -> [B, D + H].
    """
    if runs_kernels(table) and table.dtype is not torch.float64:
        from hydraspec_kernels.embedding.kernel import embed_beside_cuda  # Triton, as above

        return embed_beside_cuda(token_ids, table, scale, hidden, rows)
    return embed_beside_reference(token_ids, table, scale, hidden, rows)
