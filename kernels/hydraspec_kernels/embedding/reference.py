"""Token embeddings (Vaswani et al. 2017, section 3.4), the per-layer inputs of Gemma 3n and Gemma
4's E models, and the head of Gemma 4's assistants, which scores the tokens of the best clusters.

Letters of the head: B rows, H head width, C clusters, c = V / C tokens of a cluster, k clusters
scored.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hydraspec_kernels.norms.reference import rms_norm_reference


def embed_reference(token_ids: Tensor, table: Tensor, scale: float | None) -> Tensor:
    """Rows token_ids [...] of table [V, D] times scale -> [..., D]."""
    x = F.embedding(token_ids, table)
    return x if scale is None else x.mul_(scale)


def embed_part_reference(
    token_ids: Tensor, table: Tensor, first: int, num_tokens: int, scale: float | None
) -> Tensor:
    """See `embedding.embed_part`."""
    rows = token_ids - first
    is_elsewhere = (rows < 0) | (rows >= num_tokens)
    found = embed_reference(rows.masked_fill_(is_elsewhere, 0), table, scale)
    return found.masked_fill_(is_elsewhere.unsqueeze(-1), 0.0)


def embed_beside_reference(
    token_ids: Tensor, table: Tensor, scale: float | None, hidden: Tensor, rows: Tensor | None
) -> Tensor:
    """See `embedding.embed_beside`."""
    beside = hidden if rows is None else hidden.index_select(0, rows)
    return torch.cat((embed_reference(token_ids, table, scale), beside), -1)


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
    """See `embedding.ple_inputs`. Every step rounds to the table's dtype."""
    shape = (token_ids.shape[0], -1, norm_weight.shape[0])
    ids = torch.where((token_ids >= 0) & (token_ids < table.shape[0]), token_ids, 0)
    looked_up = F.embedding(ids, table) * table_scale
    normed = rms_norm_reference((projected * projection_scale).view(shape), norm_weight, eps)
    return (normed + looked_up.view(shape)) * 2.0**-0.5


def candidates_reference(d: Tensor, centroids: Tensor, clusters: Tensor, k: int) -> Tensor:
    """Token ids [B, k * c] of the k best clusters for d [B, H], by centroids [H, C] and clusters
    [C, c] of token ids.
    """
    best = torch.topk(torch.mm(d, centroids), k, dim=-1).indices
    return clusters[best].flatten(1)


def centroid_logits_reference(d: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    """Scores of the candidates: d [B, H], table [V, H], ids [B, n] -> [B, n]."""
    return torch.bmm(table[ids], d[:, :, None]).squeeze(-1)


def centroid_greedy_reference(
    d: Tensor, table: Tensor, centroids: Tensor, clusters: Tensor, k: int, banned: Tensor | None
) -> Tensor:
    """See `embedding.centroid_greedy`."""
    ids = candidates_reference(d, centroids, clusters, k)
    scores = centroid_logits_reference(d, table, ids)
    if banned is not None:
        scores = scores.masked_fill(banned[ids], torch.finfo(d.dtype).min)
    scores = scores.masked_fill(scores.isnan(), float("inf"))  # the largest, as in an argmax
    tied = scores == scores.amax(-1, keepdim=True)
    return torch.where(tied, ids, table.shape[0]).amin(-1)
