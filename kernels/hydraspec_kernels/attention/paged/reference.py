"""Attention over a paged cache, one request at a time, as its definition says.

softmax(scale q K^T) V over the keys a row may see: positions j with max(0, p - window + 1) <= j
<= p, where p is the row's own position. Gemma 4's scale is 1 (its query and key norms take that
role), most others' 1/sqrt(H).
"""

from __future__ import annotations

import torch
from torch import Tensor

from hydraspec_kernels.attention.paged.plan import DevicePlan


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


def planned_attention_reference(query: Tensor, cache: Tensor, plan: DevicePlan) -> Tensor:
    """query [T, Hq, H] over cache [rows, 2, Hkv, H] or [rows, 1, H] -> [T, Hq * Hv].

    What the kernels do, in plain torch and without asking the device: every request is padded to
    max_rows rows and to all the keys its block table could name. Slow and large.
    """
    shape, rows = plan.shape, plan.max_rows
    group, device = shape.num_heads // shape.num_kv_heads, query.device
    starts = plan.query_start_loc
    if starts is None:
        starts = torch.arange(plan.num_requests + 1, device=device)
    t, r = torch.arange(len(query), device=device), torch.arange(rows, device=device)
    key = torch.arange(plan.block_table.shape[1] * shape.block_size, device=device)
    at = plan.block_table[:, key // shape.block_size] * shape.block_size + key % shape.block_size
    count = starts.diff()[:, None]  # [B, 1]
    position = torch.where(r < count, plan.seq_lens[:, None] - count + r, -1)  # [B, R]
    visible = key <= position[..., None]  # [B, R, L]
    if shape.window is not None:
        visible &= key > position[..., None] - shape.window
    seen = visible.any(1).view(*at.shape, *(1,) * (cache.dim() - 1))
    kv = cache[at].masked_fill(~seen, 0)  # hidden: maybe NaN
    if shape.latent_dim is None:
        k, v = kv.unbind(2)
    else:
        k, v = kv, kv[..., : shape.latent_dim]
    padded = (starts[:-1, None] + r).clamp_max(max(len(query) - 1, 0))
    q = query[padded].unflatten(2, (shape.num_kv_heads, group))  # [B, R, Hkv, G, H]
    scores = torch.einsum("brngd,blnd->bngrl", q, k) * shape.scale
    hidden = ~visible[:, None, None]
    weights = scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(-1)
    out = torch.einsum("bngrl,blnd->brngd", weights.masked_fill(hidden, 0), v)
    request = torch.searchsorted(starts, t, right=True).sub_(1)
    inside = request < plan.num_requests
    request.clamp_max_(plan.num_requests - 1)
    row = (t - starts[request]).clamp_max(rows - 1)
    return (out[request, row] * inside[:, None, None, None]).flatten(1)
