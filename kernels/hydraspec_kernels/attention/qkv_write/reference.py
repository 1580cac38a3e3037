"""From a layer's qkv projection to rotated queries and a written cache, step by step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hydraspec_kernels.norms.rms_norm.reference import rms_norm_reference
from hydraspec_kernels.rope.reference import apply_rope_reference


@dataclass(slots=True, frozen=True, kw_only=True)
class QkvShape:
    """One layer's heads. In the projection: query heads, then key heads, then value heads."""

    num_heads: int
    num_kv_heads: int  # of the keys and values written; not read where there is no cache
    head_dim: int
    eps: float
    q_weight: Tensor | None = None  # [H], the norm of every query head; None: no norm
    k_weight: Tensor | None = None  # [H], the norm of every key head; None: no norm
    value_norm: bool = False  # values are normed, without weight
    k_eq_v: bool = False  # no value heads: values are the key heads, neither weighted nor rotated


def write_qkv_reference(
    qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, cache: Tensor | None, shape: QkvShape
) -> Tensor:
    """See `attention.qkv_write.write_qkv`. The norm, and each step of the rotation, round to qkv's
    dtype.
    """
    n, kv = shape.num_heads, shape.num_kv_heads
    heads = qkv.view(qkv.shape[0], -1, shape.head_dim)
    q = _rotated(heads[:, :n], cos, sin, shape.q_weight, shape.eps)
    if cache is None:
        return q
    raw = heads[:, n : n + kv]
    k = _rotated(raw, cos, sin, shape.k_weight, shape.eps)
    v = raw if shape.k_eq_v else heads[:, n + kv :]
    if shape.value_norm:
        v = rms_norm_reference(v, None, shape.eps)
    both = torch.stack((k, v), 1)
    # Padding rows write back what cache row 0 holds: nobody else writes there.
    padding = (slots < 0)[:, None, None, None]
    cache.index_copy_(0, slots.clamp(min=0), torch.where(padding, cache[:1], both))
    return q


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """A rotated copy of heads x [T, heads, H], normed first if there is a weight [H]."""
    normed = x.clone() if weight is None else rms_norm_reference(x, weight, eps)
    return apply_rope_reference(normed.contiguous(), cos, sin)
