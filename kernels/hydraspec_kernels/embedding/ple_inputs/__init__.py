"""The per-layer inputs of Gemma 4's E models, in one kernel behind their projection."""

from __future__ import annotations

import torch
from torch import Tensor

from hydraspec_kernels.embedding.ple_inputs.reference import ple_inputs_reference
from hydraspec_kernels.runtime.launch import runs_kernels

__all__ = ["ple_inputs"]


def ple_inputs(
    token_ids: Tensor,
    table: Tensor,
    projected: Tensor,
    norm_weight: Tensor,
    *,
    table_scale: float,
    projection_scale: float,
    eps: float,
) -> Tensor:
    """(table[id] * table_scale + norm(projected * projection_scale)) / sqrt(2), [T, L, W].

    token_ids [T] (those the table lacks read row 0), table [V, L * W], projected [T, L * W],
    norm_weight [W]: the norm runs over each layer's W numbers.
    """
    run = ple_inputs_reference
    if runs_kernels(table) and table.dtype is not torch.float64:
        from hydraspec_kernels.embedding.ple_inputs.kernel import ple_inputs_cuda as run  # Triton
    return run(
        token_ids,
        table,
        projected,
        norm_weight,
        table_scale=table_scale,
        projection_scale=projection_scale,
        eps=eps,
    )
