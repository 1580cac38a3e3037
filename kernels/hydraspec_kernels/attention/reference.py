"""Specification of the attention kernels.

A row sees the keys at positions j with max(0, p - window + 1) <= j <= p, where p is its own
position, and yields softmax(scale q K^T) V over them. With `sees_until` (rows of an image in a
prompt) it sees keys up to that position too. Query head h reads KV head h // (Hq / Hkv).
The rows of a drafted block (RowMask "block", "causal_block") see the context from `window` keys
before the first of them on, and then all rows of the block, or those up to their own.
Gemma 4's scale is 1 (its query and key norms take that role), most others' 1/sqrt(H).

| kernel | specified by |
|---|---|
| paged | `paged_attention_reference`, or for a plan `planned_attention_reference` |
| prefill | `prefill_attention_reference` |
| latent | `latent_attention_reference` |
| qkv | `write_qkv_reference` |
| decode | `attend_projection_reference` |
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hydraspec_kernels.attention.e4m3 import read_kv, round_kv, store_rows, take_rows
from hydraspec_kernels.attention.plan import DevicePlan, Projection, QkvShape, RowMask
from hydraspec_kernels.norms.reference import rms_norm_reference
from hydraspec_kernels.quantised.reference import E4M3
from hydraspec_kernels.rope.reference import apply_rope_reference


def attend_request(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    window: int | None,
    scale: float,
    mask: RowMask = "causal",
    sees_until: Tensor | None = None,
) -> Tensor:
    """Attention of one request: query [R, Hq, H] of its last R tokens, keys [L, Hkv, H], values [L,
    Hkv, Hv], sees_until [R] -> [R, Hq, Hv]; computed in float64.
    """
    rows, length = len(query), len(keys)
    k, v = keys.double(), values.double()
    q = query.double().unflatten(1, (keys.shape[1], -1))  # [R, Hkv, G, H]
    j = torch.arange(length, device=query.device)
    p = j[length - rows :, None]
    until = None if sees_until is None else sees_until[:, None]
    visible = seen_keys(j, p, length, rows, window, mask, until)  # [R, L]
    scores = torch.einsum("rngd,jnd->ngrj", q, k) * scale
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    v = v.masked_fill(~visible.any(0)[:, None, None], 0)  # keys no row sees may be freed, and NaN
    return torch.einsum("ngrj,jnd->rngd", weights, v).flatten(1, 2).to(query.dtype)


def seen_keys(
    j: Tensor,
    p: Tensor,
    length: int | Tensor,
    rows: int | Tensor,
    window: int | None,
    mask: RowMask,
    until: Tensor | None = None,
) -> Tensor:
    """Returns which of the keys j are seen by the rows at positions p, the last `rows` of `length`
    tokens, and up to `until` where that is given; all arguments broadcast."""
    visible = (j < length) & (p >= 0) if mask == "block" else j <= p
    if until is not None:
        visible = visible | ((j <= until) & (p >= 0))
    if window is None:
        return visible
    return visible & (j > p - window if mask == "causal" else j >= length - rows - window)


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
    """Attention of query [T, Hq, H] over cache [rows, 2, Hkv, H] by block_table [B, P], positions
    and request_of_row [T] -> [T, Hq, H], row by row. The host reads values of the device.
    """
    out = torch.empty_like(query)
    rows = zip(positions.tolist(), request_of_row.tolist(), strict=True)
    for t, (p, b) in enumerate(rows):
        first = 0 if window is None else max(0, p - window + 1)
        j = torch.arange(first, p + 1, device=query.device)
        k, v = cache[block_table[b, j // block_size] * block_size + j % block_size].unbind(1)
        out[t] = attend_request(query[t : t + 1], k, v, None, scale)[0]
    return out


def _requests(plan: DevicePlan, num_rows: int) -> Iterator[tuple[slice, Tensor]]:
    """Rows [R] of each request, and the cache rows [L] of its keys; reads values on the host."""
    block_size, starts = plan.shape.block_size, plan.query_start_loc
    first = list(range(num_rows + 1)) if starts is None else starts.tolist()
    for b, length in enumerate(plan.seq_lens.tolist()):
        j = torch.arange(length, device=plan.block_table.device)
        at = plan.block_table[b, j // block_size] * block_size + j % block_size
        yield slice(first[b], first[b + 1]), at


def prefill_attention_reference(query: Tensor, cache: Tensor, plan: DevicePlan) -> Tensor:
    """Attention of query [T, Hq, H] over cache [rows, 2, Hkv, H] -> [T, Hq * H], by request.

    Rows of padding requests, and rows after the last request's, are zeros.
    """
    out = torch.zeros_like(query)
    for rows, at in _requests(plan, len(query)):
        if len(at):
            k, v = cache[at].unbind(1)
            shape = plan.shape
            until = None if plan.sees_until is None else plan.sees_until[rows]
            out[rows] = attend_request(
                query[rows], k, v, shape.window, shape.scale, shape.mask, until
            )
    return out.flatten(1)


def latent_attention_reference(query: Tensor, cache: Tensor, plan: DevicePlan) -> Tensor:
    """Attention of query [T, Hq, H] over a latent cache [rows, 1, H] -> [T, Hq * Hv], by request.

    In multi-head latent attention with absorbed projections (DeepSeek-V2, section 2.1) all heads
    share one key per token, whose first Hv = latent_dim numbers are also the value; the rest
    carries the rotary position. Padding rows are zeros, as in `prefill_attention_reference`.
    """
    shape = plan.shape
    assert shape.latent_dim is not None
    out = query.new_zeros(len(query), shape.num_heads, shape.latent_dim)
    for rows, at in _requests(plan, len(query)):
        if len(at):
            keys = cache[at]
            values = keys[..., : shape.latent_dim]
            out[rows] = attend_request(query[rows], keys, values, shape.window, shape.scale)
    return out.flatten(1)


def planned_attention_reference(
    query: Tensor, cache: Tensor, plan: DevicePlan, kv_scales: Tensor | None = None
) -> Tensor:
    """Attention of query [T, Hq, H] over cache [rows, 2, Hkv, H] or [rows, 1, H] -> [T, Hq * Hv].
    kv_scales [2, Hkv] are those of an e4m3 cache.

    The host reads no value of the device: every request is padded to max_rows rows and to all keys
    that its block table could name, which is slow and takes much memory.
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
    length = plan.seq_lens[:, None, None]
    padded = (starts[:-1, None] + r).clamp_max(max(len(query) - 1, 0))
    until = None if plan.sees_until is None else plan.sees_until[padded][..., None]
    visible = seen_keys(  # [B, R, L]
        key, position[..., None], length, count[..., None], shape.window, shape.mask, until
    )
    seen = visible.any(1).view(*at.shape, *(1,) * (cache.dim() - 1))
    kv = take_rows(cache, at)
    if cache.dtype is E4M3:
        assert kv_scales is not None
        kv = read_kv(kv, kv_scales, query.dtype)
    kv = kv.masked_fill(~seen, 0)  # hidden keys may be NaN
    if shape.latent_dim is None:
        k, v = kv.unbind(2)
    else:
        k, v = kv, kv[..., : shape.latent_dim]
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


def write_qkv_reference(projection: Projection, cache: Tensor | None, shape: QkvShape) -> Tensor:
    """See `attention.write_qkv`. The norm, and each step of the rotation, round to qkv's dtype."""
    n, kv, qkv, to = shape.num_heads, shape.num_kv_heads, projection.qkv, projection.cache_rows
    heads = qkv.view(qkv.shape[0], -1, shape.head_dim)
    q = _rotated(heads[:, :n], projection, shape.q_weight, shape.eps)
    if cache is None:
        return q
    raw = heads[:, n : n + kv]
    k = _rotated(raw, projection, shape.k_weight, shape.eps)
    v = raw if shape.k_eq_v else heads[:, n + kv :]
    if shape.value_norm:
        v = rms_norm_reference(v, None, shape.eps)
    both = torch.stack((k, v), 1)
    if cache.dtype is E4M3:
        assert shape.kv_scales is not None
        both = round_kv(both, shape.kv_scales)
    # Padding rows write back what cache row 0 holds: no other row writes there.
    padding = (to < 0)[:, None, None, None]
    store_rows(cache, to.clamp(min=0), torch.where(padding, cache[:1], both))
    return q


def _rotated(x: Tensor, projection: Projection, weight: Tensor | None, eps: float) -> Tensor:
    """A rotated copy of heads x [T, heads, H], normed first if there is a weight [H]."""
    normed = x.clone() if weight is None else rms_norm_reference(x, weight, eps)
    return apply_rope_reference(normed.contiguous(), projection.cos, projection.sin)


def attend_projection_reference(
    projection: Projection, cache: Tensor, plan: DevicePlan, shape: QkvShape, *, writes: bool
) -> Tensor:
    """See `attention.attend_projection`: heads, cache write, then attention over the cache."""
    query = write_qkv_reference(projection, cache if writes else None, shape)
    return planned_attention_reference(query, cache, plan, shape.kv_scales)
