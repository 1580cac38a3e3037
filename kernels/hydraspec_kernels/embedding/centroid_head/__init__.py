"""The centroid head: full-vocabulary logits, or the best token without ever leaving the
candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hydraspec_kernels.embedding.centroid_head.reference import (
    candidates_reference,
    centroid_greedy_reference,
    centroid_logits_reference,
)
from hydraspec_kernels.runtime.launch import runs_kernels

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
    if runs_kernels(d) and d.dtype is not torch.float64:
        # Triton is imported where kernels run only.
        from hydraspec_kernels.embedding.centroid_head.kernel import centroid_greedy_kernel

        return centroid_greedy_kernel(d, table, centroids, clusters, k, banned)
    return centroid_greedy_reference(d, table, centroids, clusters, k, banned)
