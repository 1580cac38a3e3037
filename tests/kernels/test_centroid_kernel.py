"""The centroid head's greedy kernel against its reference and its definition."""

from __future__ import annotations

import pytest
import torch
from hydraspec_kernels.embedding.centroid_kernel import centroid_greedy_kernel
from hydraspec_kernels.embedding.reference import centroid_greedy_reference
from kernel_places import DEVICES
from torch import Tensor

# bf16 inputs, float32 sums over a width of 256 in another order; scores are of size 16.
BF16_SUM_ERROR = 1e-3


def head(
    rows: int, width: int, clusters: int, size: int, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """d, table, centroids and clusters of a head whose clusters hold scattered ids."""
    draw = torch.Generator().manual_seed(seed)
    vocab = clusters * size
    d = torch.randn(rows, width, generator=draw)
    table = torch.randn(vocab, width, generator=draw)
    centroids = torch.randn(clusters, width, generator=draw).t()  # as a linear's weight lies
    return d, table, centroids, torch.randperm(vocab, generator=draw).view(clusters, size)


def to(device: str, *tensors: Tensor) -> list[Tensor]:
    return [x.to(device) for x in tensors]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("rows", "width", "clusters", "size", "k"),
    [(1, 8, 10, 4, 3), (6, 24, 37, 5, 7), (5, 16, 20, 6, 20), (18, 256, 40, 130, 2)],
)
def test_the_best_token_of_the_best_clusters(
    rows: int, width: int, clusters: int, size: int, k: int, device: str
) -> None:
    """Odd widths, sizes and counts; one part and two; every cluster chosen; more rows than a dot
    takes at once."""
    parts = head(rows, width, clusters, size)
    wanted = centroid_greedy_reference(*parts, k, None)
    assert centroid_greedy_kernel(*to(device, *parts), k, None).cpu().equal(wanted)
    banned = torch.zeros(clusters * size, dtype=torch.bool)
    banned[wanted] = True
    banned[::5] = True
    wanted = centroid_greedy_reference(*parts, k, banned)
    got = centroid_greedy_kernel(*to(device, *parts), k, banned.to(device))
    assert got.cpu().equal(wanted)


@pytest.mark.parametrize("device", DEVICES)
def test_equal_tokens_and_equal_clusters(device: str) -> None:
    """Equal tokens: the lowest id of the chosen clusters. Equal clusters: the lower number."""
    d, table, centroids, clusters = to(device, *head(3, 8, 10, 4))
    same = torch.ones_like(table)
    chosen = clusters[(d @ centroids).topk(3, dim=-1).indices].flatten(1)
    got = centroid_greedy_kernel(d, same, centroids, clusters, 3, None)
    assert got.equal(chosen.amin(-1))
    level = torch.zeros_like(centroids)
    got = centroid_greedy_kernel(d, same, level, clusters, 3, None)
    assert got.tolist() == [int(clusters[:3].min())] * 3


@pytest.mark.parametrize("device", DEVICES)
def test_odd_numbers_give_legal_ids(device: str) -> None:
    """NaN states; and where every candidate is banned, some candidate."""
    d, table, centroids, clusters = to(device, *head(2, 8, 10, 4))
    everything = torch.ones(40, dtype=torch.bool, device=device)
    for greedy in (centroid_greedy_kernel, centroid_greedy_reference):
        got = greedy(d, table, centroids, clusters, 3, everything)
        assert ((got >= 0) & (got < 40)).all()
        got = greedy(d * torch.nan, table, centroids, clusters, 3, None)
        assert ((got >= 0) & (got < 40)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4, 5, 32])
def test_the_published_head_on_the_device(rows: int) -> None:
    """Gemma 4 E in bf16: the chosen token's score is the best of the candidates up to rounding."""
    parts = head(rows, 256, 2048, 128)
    d, table, centroids, clusters = (
        x.bfloat16().cuda() if x.is_floating_point() else x.cuda() for x in parts
    )
    got = centroid_greedy_kernel(d, table, centroids, clusters, 32, None)
    again = centroid_greedy_kernel(d, table, centroids, clusters, 32, None)
    assert got.equal(again)
    best = (d.float() @ centroids.float()).topk(32, dim=-1).indices
    ids = clusters[best].flatten(1)
    scores = torch.bmm(table.float()[ids], d.float()[:, :, None]).squeeze(-1)
    ours = (table.float()[got] * d.float()).sum(-1)
    assert ours.sub(scores.amax(-1)).abs().max() < BF16_SUM_ERROR
