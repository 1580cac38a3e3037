"""Token embeddings, the per-layer inputs of Gemma 4's E models, and the centroid head of Gemma 4's
assistants, which scores the tokens of the best clusters only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hydraspec_kernels.embedding import reference
from hydraspec_kernels.runtime.launch import runs_kernels

__all__ = [
    "centroid_greedy",
    "centroid_head",
    "embed",
    "embed_beside",
    "embed_part",
    "ple_inputs",
]


def embed(token_ids: Tensor, table: Tensor, scale: float | None = None) -> Tensor:
    """Rows token_ids [...] of table [V, D] times scale -> [..., D], rounded once.

    Every id must be in the table. On CUDA, where a padding row may hold any id, an id outside the
    table reads row 0; elsewhere it raises IndexError.
    """
    if runs_kernels(table) and table.dtype is not torch.float64:
        from hydraspec_kernels.embedding.kernel import embed_cuda  # Triton, where there is a GPU

        return embed_cuda(token_ids, table, scale)
    return reference.embed_reference(token_ids, table, scale)


def embed_part(
    token_ids: Tensor, table: Tensor, first: int, num_tokens: int, scale: float | None = None
) -> Tensor:
    """Embeddings [..., D] of the num_tokens tokens from `first` on, whose rows are the first ones
    of table [.., D]; zeros for other tokens. Parts of a vocabulary add up to `embed` of the whole
    table.
    """
    if runs_kernels(table) and table.dtype is not torch.float64:
        from hydraspec_kernels.embedding.kernel import embed_part_cuda  # Triton, as above

        return embed_part_cuda(token_ids, table, first, num_tokens, scale)
    return reference.embed_part_reference(token_ids, table, first, num_tokens, scale)


def embed_beside(
    token_ids: Tensor,
    table: Tensor,
    scale: float | None,
    hidden: Tensor,
    rows: Tensor | None = None,
) -> Tensor:
    """Embeddings of token_ids [B], concatenated with hidden [B, H], or with hidden [T, H] at rows
    [B] -> [B, D + H].
    """
    if runs_kernels(table) and table.dtype is not torch.float64:
        from hydraspec_kernels.embedding.kernel import embed_beside_cuda  # Triton, as above

        return embed_beside_cuda(token_ids, table, scale, hidden, rows)
    return reference.embed_beside_reference(token_ids, table, scale, hidden, rows)


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
    """Per-layer inputs (table[id] * table_scale + norm(projected * projection_scale)) / sqrt(2)
    [T, L, W].

    token_ids [T] (ids outside the table read row 0), table [V, L * W], projected [T, L * W],
    norm_weight [W]: the norm runs over each layer's W numbers.
    """
    scales = {"table_scale": table_scale, "projection_scale": projection_scale, "eps": eps}
    if runs_kernels(table) and table.dtype is not torch.float64:
        from hydraspec_kernels.embedding.ple_kernel import ple_inputs_cuda  # Triton, as above

        return ple_inputs_cuda(token_ids, table, projected, norm_weight, **scales)
    return reference.ple_inputs_reference(token_ids, table, projected, norm_weight, **scales)


def centroid_head(d: Tensor, table: Tensor, centroids: Tensor, clusters: Tensor, k: int) -> Tensor:
    """Logits [B, V] of d [B, H] by table [V, H], centroids [H, C] and clusters [C, c].

    Tokens outside the k best clusters get the dtype's finite minimum, which is probability 0 and
    never gives NaN.
    """
    ids = reference.candidates_reference(d, centroids, clusters, k)
    scores = reference.centroid_logits_reference(d, table, ids)
    logits = d.new_full((d.shape[0], table.shape[0]), torch.finfo(d.dtype).min)
    return logits.scatter_(1, ids, scores)


def centroid_greedy(
    d: Tensor, table: Tensor, centroids: Tensor, clusters: Tensor, k: int, banned: Tensor | None
) -> Tensor:
    """The argmax [B] of `centroid_head` without its [B, V] logits; equal scores go to the lowest
    id. Tokens of banned [V] bool are never chosen.
    """
    if runs_kernels(d) and d.dtype is not torch.float64:
        from hydraspec_kernels.embedding.centroid_kernel import centroid_greedy_kernel  # as above

        return centroid_greedy_kernel(d, table, centroids, clusters, k, banned)
    return reference.centroid_greedy_reference(d, table, centroids, clusters, k, banned)
