"""A head that scores only the tokens of the best clusters (Gemma 4 assistants, "ordered
embeddings").

Letters: B rows, H head width, C clusters, c = V / C tokens a cluster, k clusters scored.
"""

from __future__ import annotations

import torch
from torch import Tensor


def candidates_reference(d: Tensor, centroids: Tensor, clusters: Tensor, k: int) -> Tensor:
    """d [B, H], centroids [H, C], clusters [C, c] token ids -> ids of the k best clusters, [B, k
    * c].
    """
    best = torch.topk(torch.mm(d, centroids), k, dim=-1).indices
    return clusters[best].flatten(1)


def centroid_logits_reference(d: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    """Scores of the candidates: d [B, H], table [V, H], ids [B, n] -> [B, n]."""
    return torch.bmm(table[ids], d[:, :, None]).squeeze(-1)


def centroid_greedy_reference(
    d: Tensor, table: Tensor, centroids: Tensor, clusters: Tensor, k: int, banned: Tensor | None
) -> Tensor:
    """See `centroid_head.centroid_greedy`."""
    ids = candidates_reference(d, centroids, clusters, k)
    scores = centroid_logits_reference(d, table, ids)
    if banned is not None:
        scores = scores.masked_fill(banned[ids], torch.finfo(d.dtype).min)
    tied = scores == scores.amax(-1, keepdim=True)
    return torch.where(tied, ids, table.shape[0]).amin(-1)
