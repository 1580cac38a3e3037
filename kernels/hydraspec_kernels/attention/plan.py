"""Attention plans: inputs that the layers of a KV group share in one forward pass.

On the CPU a plan names the cache rows to gather and masks them. On CUDA it only holds the batch's
tensors: the kernels find rows and visible keys themselves.

Letters: b requests, R rows per request, L gathered entries per request, P blocks of a table row.
All shapes come from host numbers; everything that depends on sequence lengths is computed on the
device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from hydraspec_kernels.norms.cpu import NormGain
from hydraspec_kernels.quantised.reference import E4M3
from hydraspec_kernels.runtime.launch import runs_kernels

# Most scores of a tile; long prefills are cut into tiles of query rows to bound the memory.
MAX_TILE_SCORES = 1 << 23


# Keys that a row sees, of a request whose R rows are the last of its L tokens:
# causal: up to its own position p, from p - window + 1 on.
# block: up to L - 1, from L - R - window on; the rows see each other and the same context.
# causal_block: up to its own position, from L - R - window on.
# Rows of a causal plan with `sees_until` see up to that position, where it is beyond their own.
RowMask: TypeAlias = Literal["causal", "block", "causal_block"]


@dataclass(slots=True, frozen=True)
class RowSegment:
    """Consecutive requests with equally many rows, in host numbers: no shape depends on data."""

    first_row: int
    first_request: int
    num_requests: int
    rows_per_request: int
    max_seq_len: int  # upper bound of the segment's sequence lengths
    num_busy: int = 0  # of the requests, likely to have keys, the others none; 0: all of them


@dataclass(slots=True, frozen=True, kw_only=True)
class GroupShape:
    """Heads, cache blocks and mask of a KV group. window None: no key is too far back to be seen.

    scale multiplies the scores: 1 for Gemma 4, 1/sqrt(head_dim) for most others. With latent_dim
    the cache holds one key per row, [rows, 1, H], whose first latent_dim numbers are also the value
    (DeepSeek's compressed cache); there is one KV head then.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    window: int | None
    scale: float = 1.0
    latent_dim: int | None = None
    mask: RowMask = "causal"

    @property
    def page_row(self) -> tuple[int, ...]:
        """Shape of a token's keys, then values, in the cache of one layer: (2, Hkv, H), or (1, H)
        with latent_dim.
        """
        if self.latent_dim is not None:
            return 1, self.head_dim
        return 2, self.num_kv_heads, self.head_dim

    @property
    def head_rows(self) -> int:
        """Number of rows that a token takes in the cache seen as [rows, H]."""
        return 1 if self.latent_dim is not None else 2 * self.num_kv_heads


@dataclass(slots=True, frozen=True, kw_only=True)
class QkvShape:
    """A layer's heads. A projection holds query heads, then key heads, then value heads."""

    num_heads: int
    num_kv_heads: int  # of the keys and values written; unused without a cache
    head_dim: int
    eps: float
    q_weight: Tensor | None = None  # [H], the norm of every query head; None: no norm
    k_weight: Tensor | None = None  # [H], the norm of every key head; None: no norm
    value_norm: bool = False  # values are normed, without weight
    k_eq_v: bool = False  # no value heads: values are the key heads, neither weighted nor rotated
    # Norm weights of all normed heads, [heads, H], which `write_qkv_cpu` reads. None: the reference
    # runs on the CPU, in the order of rounding that narrow types need.
    gain: NormGain | None = None
    # [2, Hkv] float32, scales of keys, then values, in an e4m3 cache; unread with other caches.
    kv_scales: Tensor | None = None

    @property
    def has_norms(self) -> bool:
        """Returns whether any head is normed."""
        return self.value_norm or self.q_weight is not None or self.k_weight is not None

    def projected_heads(self, *, writes: bool) -> int:
        """Number of heads of the projection; without `writes` it has query heads only."""
        kinds = 0 if not writes else 1 if self.k_eq_v else 2
        return self.num_heads + kinds * self.num_kv_heads


@dataclass(slots=True)
class Projection:
    """A layer's projected rows, with their rotary table (`rope_table`) and their cache rows."""

    qkv: Tensor  # [T, heads * H]
    cos: Tensor  # [T, 1, H] in qkv's dtype
    sin: Tensor  # [T, 1, H]
    cache_rows: Tensor  # [T] to write, -1 for padding; unread by a layer that writes none
    has_padding: bool = True  # False: no cache row is -1, and `qkv` may be overwritten

    def check(self, shape: QkvShape, cache: Tensor | None, *, writes: bool) -> None:
        """Asserts shapes, strides and dtypes that the kernels need; cache [rows, 2, Hkv, H]."""
        rows, size = self.qkv.shape[0], shape.head_dim
        heads = shape.projected_heads(writes=writes)
        assert self.qkv.shape[1] == heads * size, f"{self.qkv.shape[1]} columns for {heads} heads"
        assert self.qkv.stride(1) == 1
        assert self.cos.shape == self.sin.shape == (rows, 1, size)
        assert self.cos.is_contiguous()
        assert self.sin.is_contiguous()
        for weight in (shape.q_weight, shape.k_weight):
            assert weight is None or (weight.shape == (size,) and weight.is_contiguous())
        if cache is not None:
            assert cache.is_contiguous(), "tokens of the cache are contiguous"
            assert cache.dtype is (self.qkv.dtype if shape.kv_scales is None else E4M3)
            scales = shape.kv_scales
            assert scales is None or (scales.numel() % 2 == 0 and scales.is_contiguous())
        if writes:
            assert cache is not None
            assert cache.shape[1:] == (2, shape.num_kv_heads, size), cache.shape
            assert self.cache_rows.shape == (rows,)


@dataclass(slots=True)
class Tile:
    """Rows row_start..row_stop of every request of a segment, with L gathered entries each."""

    first_row: int  # of the segment
    num_requests: int  # b
    rows_per_request: int  # of the segment
    row_start: int
    row_stop: int
    num_keys: int  # L
    # [2 * b * Hkv * L] rows of the cache seen as [rows * 2 * Hkv, H]: all keys, then all values;
    # of a latent cache [b * L]
    kv_index: Tensor
    mask: Tensor  # [b * Hkv or 1, R * Hq/Hkv or 1, L], added to the scores


@dataclass(slots=True)
class TiledPlan:
    """The CPU's plan: tiles that cover the rows of the segments once, in order."""

    shape: GroupShape
    num_rows: int  # T
    tiles: list[Tile]
    held: list[tuple[Tensor, Tensor]] | None = None  # keys and values of each tile (`hold_kv`)


@dataclass(slots=True)
class DevicePlan:
    """The kernels' plan. Its host numbers are upper bounds that a CUDA graph may freeze.

    A request of sequence length 0 is padding: its rows come out as zeros, like the rows from
    query_start_loc[B] on.
    """

    shape: GroupShape
    query_start_loc: Tensor | None  # [B+1] first row of each request; None: row b is request b
    seq_lens: Tensor  # [B], with this step's rows
    block_table: Tensor  # [B, P]
    num_rows: int  # T
    num_requests: int  # B
    max_rows: int  # rows of the request with the most
    sees_until: Tensor | None = None  # [T] last position a row sees, if beyond its own; None: never
    num_busy: int = 0  # requests that are likely to have keys, for which work is cut; 0: all
    min_rows: int = 0  # rows of the request with the fewest; results do not depend on it

    @property
    def starts(self) -> Tensor:
        """The kernels' query_start_loc; a tensor that is not read if each request has one row."""
        return self.seq_lens if self.query_start_loc is None else self.query_start_loc

    def check(self, query: Tensor, cache: Tensor) -> None:
        """Asserts shapes, strides and dtypes of query [T, Hq, H] and cache that kernels need."""
        shape = self.shape
        assert cache.dtype in (query.dtype, E4M3)
        assert query.shape[1:] == (shape.num_heads, shape.head_dim), query.shape
        assert query.stride()[1:] == (shape.head_dim, 1), "a row's heads are contiguous"
        self.check_cache(cache, query.shape[0])

    def check_cache(self, cache: Tensor, num_rows: int) -> None:
        """Asserts the shapes and strides of cache and block table that the kernels need."""
        assert cache.is_contiguous(), "tokens of the cache are contiguous"
        assert cache.shape[1:].numel() == self.shape.head_rows * self.shape.head_dim, cache.shape
        assert self.block_table.stride(1) == 1, "rows of the block table are contiguous"
        if self.query_start_loc is None:
            assert num_rows == self.num_requests, "without query_start_loc a row is a request"


AttentionPlan = TiledPlan | DevicePlan


def plan_attention(
    shape: GroupShape,
    segments: Sequence[RowSegment],
    block_table: Tensor,
    seq_lens: Tensor,
    positions: Tensor,
    dtype: torch.dtype,
    query_start_loc: Tensor | None = None,
    sees_until: Tensor | None = None,
) -> AttentionPlan:
    """The group's plan from block_table [B, P], seq_lens [B] with this step's rows, positions [T]
    and query_start_loc [B+1].

    Row r of a request with R rows is at position seq_len - R + r. Entries that no row may see are
    gathered from cache row 0: block 0 is reserved and stays zero, so that the contents of freed
    blocks cannot leak. Only CUDA reads query_start_loc; None there means one row per request.

    sees_until [T]: a row of a causal group sees the keys up to this position too, if it is beyond
    its own; it is less than the request's seq_len.
    """
    assert sees_until is None or shape.mask == "causal"
    if runs_kernels(seq_lens):
        return device_plan(shape, segments, block_table, seq_lens, query_start_loc, sees_until)
    last = positions if sees_until is None else torch.maximum(positions, sees_until)
    seen = _SeenRows(positions, last, sees_until is not None)
    return _tiled_plan(shape, segments, block_table, seq_lens, seen, dtype)


@dataclass(slots=True, frozen=True)
class _SeenRows:
    """Positions of rows, and the last position that each sees."""

    own: Tensor  # [T]
    last: Tensor  # [T]
    is_ahead: bool  # some row may see beyond its own position


def device_plan(
    shape: GroupShape,
    segments: Sequence[RowSegment],
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor | None,
    sees_until: Tensor | None = None,
) -> DevicePlan:
    """The kernels' plan; see `plan_attention`. No tensor is made and nothing is launched."""
    num_rows = num_requests = max_rows = num_busy = 0
    for segment in segments:
        num_requests += segment.num_requests
        num_busy += segment.num_busy or segment.num_requests
        num_rows += segment.num_requests * segment.rows_per_request
        max_rows = max(max_rows, segment.rows_per_request)
    min_rows = min((segment.rows_per_request for segment in segments), default=0)
    if query_start_loc is None and max_rows != 1:
        raise ValueError(
            f"query_start_loc is None with {max_rows} rows a request: only segments of one row a "
            "request go without it"
        )
    return DevicePlan(
        *(shape, query_start_loc, seq_lens, block_table, num_rows, num_requests, max_rows),
        *(sees_until, num_busy, min_rows),
    )


def _tiled_plan(
    shape: GroupShape,
    segments: Sequence[RowSegment],
    block_table: Tensor,
    seq_lens: Tensor,
    seen: _SeenRows,
    dtype: torch.dtype,
) -> TiledPlan:
    tiles: list[Tile] = []
    num_rows = 0
    for segment in segments:
        num_rows += segment.num_requests * segment.rows_per_request
        last = segment.first_request + segment.num_requests
        whole = len(segments) == 1 and segment.num_requests == len(seq_lens)
        lens = seq_lens if whole else seq_lens[segment.first_request : last]
        table = block_table if whole else block_table[segment.first_request : last]
        step = _rows_per_tile(shape, segment, seen.is_ahead)
        for start in range(0, segment.rows_per_request, step):
            stop = min(start + step, segment.rows_per_request)
            tiles.append(_plan_tile(shape, segment, start, stop, table, lens, seen, dtype))
    return TiledPlan(shape, num_rows, tiles)


def _rows_per_tile(shape: GroupShape, segment: RowSegment, is_ahead: bool) -> int:
    rows = segment.rows_per_request
    keys = segment.max_seq_len
    if shape.window is not None:
        is_block = is_ahead or shape.mask != "causal"
        keys = min(keys, shape.window + (rows if is_block else shape.window))
        if rows > shape.window and not is_block:
            rows = shape.window  # so that a tile gathers two windows, not the whole prompt
    return max(1, min(rows, MAX_TILE_SCORES // (segment.num_requests * shape.num_heads * keys)))


def _plan_tile(
    shape: GroupShape,
    segment: RowSegment,
    start: int,
    stop: int,
    table: Tensor,  # [b, P]
    lens: Tensor,  # [b]
    seen: _SeenRows,
    dtype: torch.dtype,
) -> Tile:
    b, all_rows, rows = segment.num_requests, segment.rows_per_request, stop - start
    is_block = shape.mask != "causal"
    after = 0 if is_block or seen.is_ahead else all_rows - stop
    num_keys = max(segment.max_seq_len - after, rows)
    end = lens[:, None] if after == 0 else (lens - after)[:, None]
    more = all_rows if is_block else all_rows - start - 1 if seen.is_ahead else rows - 1
    most = None if shape.window is None else shape.window + more
    if most is not None and num_keys > most:
        num_keys = most
        key = (end - num_keys).clamp_min_(0) + torch.arange(num_keys, device=end.device)
        base = _looked_up_rows(shape, table, key)
    else:
        key = torch.arange(num_keys, device=end.device)[None]
        base = _leading_rows(shape, table, num_keys)
    exists = key < end  # [b, L]
    one_row = rows == 1 and not is_block and not seen.is_ahead
    if shape.mask == "block" or all_rows == 1 or one_row:
        # A row sees exactly the gathered entries that exist.
        hidden = exists.logical_not()[:, None].expand(b, rows, -1)
    else:
        mine = slice(segment.first_row, segment.first_row + b * all_rows)
        last = seen.last[mine].view(b, all_rows, 1)[:, start:stop]
        hidden = last < key[:, None]  # [b, R, L]
        if shape.window is not None and not is_block:
            own = seen.own[mine].view(b, all_rows, 1)[:, start:stop]
            hidden = hidden.logical_or_(own - key[:, None] >= shape.window)
    index = _head_rows(shape, base.mul_(exists))
    mask = _mask(shape, hidden, dtype)
    return Tile(segment.first_row, b, all_rows, start, stop, num_keys, index, mask)


# The following functions count rows of the cache seen as [rows * 2 * Hkv, H]: one gather then
# yields contiguous heads.


def _leading_rows(shape: GroupShape, table: Tensor, num_keys: int) -> Tensor:
    """First head row of positions 0..L, [b, L]. Positions past the table have row 0."""
    per_block = shape.block_size * shape.head_rows
    num_blocks = -(-num_keys // shape.block_size)
    inside = torch.arange(0, per_block, shape.head_rows, device=table.device)
    rows = ((table[:, :num_blocks] * per_block)[:, :, None] + inside).view(table.shape[0], -1)
    if num_blocks > table.shape[1]:  # max_seq_len is an upper bound and may exceed the table
        return torch.nn.functional.pad(rows, (0, num_keys - rows.shape[1]))
    return rows if rows.shape[1] == num_keys else rows[:, :num_keys]


def _looked_up_rows(shape: GroupShape, table: Tensor, key: Tensor) -> Tensor:
    """First head row of positions key [b, L]."""
    block = torch.div(key, shape.block_size, rounding_mode="floor")
    block.clamp_max_(table.shape[1] - 1)
    slot = table.gather(1, block).sub_(block).mul_(shape.block_size).add_(key)
    return slot.mul_(shape.head_rows)


def _head_rows(shape: GroupShape, base: Tensor) -> Tensor:
    """Rows of all keys, then all values: [2 * b * Hkv * L] from base [b, L] (latent: [b * L])."""
    if shape.latent_dim is not None:
        return base.reshape(-1)
    heads = shape.num_kv_heads
    if heads == 1:
        return torch.stack((base, base + 1)).view(-1)
    part = torch.arange(2 * heads, device=base.device).view(2, 1, heads, 1)
    return (base[:, None] + part).view(-1)


def _mask(shape: GroupShape, hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Summand of the scores from hidden [b, R, L]; dimensions of size 1 broadcast."""
    b, rows, keys = hidden.shape
    heads, group = shape.num_kv_heads, shape.num_heads // shape.num_kv_heads
    # Half the smallest number: adding a score cannot overflow to -inf, whose softmax would be NaN.
    mask = hidden.to(dtype).mul_(torch.finfo(dtype).min / 2)
    if rows == 1:
        if heads == 1 or b == 1:
            return mask
        return mask.expand(b, heads, keys).reshape(b * heads, 1, keys)
    heads = 1 if b == 1 else heads
    full = mask[:, None, :, None].expand(b, heads, rows, group, keys)
    return full.reshape(b * heads, rows * group, keys)
