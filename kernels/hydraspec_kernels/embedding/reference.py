"""Token embeddings times a constant (Vaswani et al. 2017, section 3.4)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def embed_reference(token_ids: Tensor, table: Tensor, scale: float | None) -> Tensor:
    """table [V, D] at token_ids [...], times scale -> [..., D]."""
    x = F.embedding(token_ids, table)
    return x if scale is None else x.mul_(scale)


def embed_beside_reference(
    token_ids: Tensor, table: Tensor, scale: float | None, hidden: Tensor, rows: Tensor | None
) -> Tensor:
    """[embedding of token_ids [B]; hidden [B, H], or hidden [T, H] at rows [B]] -> [B, D + H]."""
    beside = hidden if rows is None else hidden.index_select(0, rows)
    return torch.cat((embed_reference(token_ids, table, scale), beside), -1)
