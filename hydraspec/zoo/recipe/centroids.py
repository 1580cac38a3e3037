"""Token clusters of the ordered-embedding head: equal in size, similar tokens together."""

from __future__ import annotations

import torch
from torch import Tensor

ITERATIONS = 30


def fit_ordering(table: Tensor, num_centroids: int) -> Tensor:
    """Balanced k-means over the rows of `table` [V, D]; returns `token_ordering` [V].

    Row c of `token_ordering.view(num_centroids, V // num_centroids)` lists the tokens of cluster c.
    Each round assigns (token, cluster) pairs best first until clusters are full.
    """
    points = torch.nn.functional.normalize(table.float(), dim=-1)
    size = len(points) // num_centroids
    if size * num_centroids != len(points):
        raise ValueError(f"num_centroids={num_centroids} must divide the vocabulary, {len(points)}")
    generator = torch.Generator().manual_seed(0)
    centres = points[torch.randperm(len(points), generator=generator)[:num_centroids]]
    members: list[list[int]] = []
    for _ in range(ITERATIONS):
        members = _assign(points @ centres.T, size)
        centres = torch.stack([points[rows].mean(0) for rows in members])
        centres = torch.nn.functional.normalize(centres, dim=-1)
    return torch.tensor([token for rows in members for token in sorted(rows)])


def _assign(similarity: Tensor, size: int) -> list[list[int]]:
    num_clusters = similarity.shape[1]
    members: list[list[int]] = [[] for _ in range(num_clusters)]
    placed = [False] * len(similarity)
    for pair in similarity.flatten().argsort(descending=True).tolist():
        token, cluster = divmod(pair, num_clusters)
        if not placed[token] and len(members[cluster]) < size:
            placed[token] = True
            members[cluster].append(token)
    return members


def cluster_targets(probabilities: Tensor, token_ordering: Tensor, num_centroids: int) -> Tensor:
    """Probability mass per cluster: [..., V] -> [..., num_centroids]."""
    ordered: Tensor = probabilities[..., token_ordering.long()]
    return ordered.reshape(*ordered.shape[:-1], num_centroids, -1).sum(-1)
