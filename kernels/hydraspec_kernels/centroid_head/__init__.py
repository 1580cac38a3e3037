"""The centroid head: full-vocabulary logits, or the best token without ever leaving the
candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hydraspec_kernels.centroid_head.reference import (
    candidates_reference,
    centroid_logits_reference,
)

__all__ = ["centroid_greedy", "centroid_head"]


def centroid_head(d: Tensor, table: Tensor, centroids: Tensor, clusters: Tensor, k: int) -> Tensor:
    """d [B, H], table [V, H], centroids [H, C], clusters [C, c] -> logits [B, V].

    Tokens outside the k best clusters get the dtype's finite minimum: no probability, and no NaN.
    """
    ids = candidates_reference(d, centroids, clusters, k)
    scores = centroid_logits_reference(d, table, ids)
    logits = d.new_full((d.shape[0], table.shape[0]), torch.finfo(d.dtype).min)
    return logits.scatter_(1, ids, scores)


def centroid_greedy(
    d: Tensor, table: Tensor, centroids: Tensor, clusters: Tensor, k: int, banned: Tensor | None
) -> Tensor:
    """The best candidate's token id [B]; equal scores go to the lowest id. banned [V] bool is
    never chosen.
    """
    ids = candidates_reference(d, centroids, clusters, k)
    scores = centroid_logits_reference(d, table, ids)
    if banned is not None:
        scores = scores.masked_fill(banned[ids], torch.finfo(d.dtype).min)
    tied = scores == scores.amax(-1, keepdim=True)
    return torch.where(tied, ids, table.shape[0]).amin(-1)
