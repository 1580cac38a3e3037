"""Per-layer inputs of Gemma 3n and Gemma 4's E models, from their table and their projection."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hydraspec_kernels.norms.reference import rms_norm_reference


def ple_inputs_reference(
    token_ids: Tensor,
    table: Tensor,
    projected: Tensor,
    norm_weight: Tensor,
    *,
    table_scale: float,
    projection_scale: float,
    eps: float,
) -> Tensor:
    """See `embedding.ple_inputs.ple_inputs`. Every step rounds to the table's dtype."""
    shape = (token_ids.shape[0], -1, norm_weight.shape[0])
    ids = torch.where((token_ids >= 0) & (token_ids < table.shape[0]), token_ids, 0)
    looked_up = F.embedding(ids, table) * table_scale
    normed = rms_norm_reference((projected * projection_scale).view(shape), norm_weight, eps)
    return (normed + looked_up.view(shape)) * 2.0**-0.5
