"""Attention over a paged cache, one request at a time, as its definition says.

softmax(scale q K^T) V over the keys a row may see: positions j with max(0, p - window + 1) <= j
<= p, where p is the row's own position. Gemma 4's scale is 1 (its query and key norms take that
role), most others' 1/sqrt(H).
"""

from __future__ import annotations

import torch
from torch import Tensor


def paged_attention_reference(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    positions: Tensor,
    request_of_row: Tensor,
    block_size: int,
    window: int | None,
    scale: float = 1.0,
) -> Tensor:
    """query [T, Hq, H], cache [rows, 2, Hkv, H], block_table [B, P], positions and request_of_row
    [T] -> [T, Hq, H].

    Query head h reads KV head h // (Hq / Hkv). Reads values on the host: a specification, not for
    the engine.
    """
    out = torch.empty_like(query)
    group = query.shape[1] // cache.shape[2]
    rows = zip(positions.tolist(), request_of_row.tolist(), strict=True)
    for t, (p, b) in enumerate(rows):
        first = 0 if window is None else max(0, p - window + 1)
        j = torch.arange(first, p + 1, device=query.device)
        entries = cache[block_table[b, j // block_size] * block_size + j % block_size]
        k, v = entries.repeat_interleave(group, dim=2).unbind(1)  # [j, Hq, H]
        s = torch.einsum("hd,jhd->hj", query[t].double(), k.double()) * scale
        out[t] = torch.einsum("hj,jhd->hd", s.softmax(-1), v.double()).to(query.dtype)
    return out
