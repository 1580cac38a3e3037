"""What the layers of one KV group share in one forward pass: which cache rows to gather, and who may see them.

Letters: b requests, R rows a request, L gathered entries a request, P blocks of a table row.
All shapes come from host numbers; everything that depends on sequence lengths is computed on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

# Scores of one tile at most; long prefills are cut into tiles of query rows so that memory stays flat.
MAX_TILE_SCORES = 1 << 23


class Segment(Protocol):
    """A run of requests with equally many rows."""

    @property
    def first_row(self) -> int: ...
    @property
    def first_request(self) -> int: ...
    @property
    def num_requests(self) -> int: ...
    @property
    def rows_per_request(self) -> int: ...
    @property
    def max_seq_len(self) -> int: ...


@dataclass(slots=True, frozen=True, kw_only=True)
class GroupShape:
    """What a KV group's attention looks like. window None: a row sees everything up to itself."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    window: int | None


@dataclass(slots=True)
class Tile:
    """Rows row_start..row_stop of every request of a segment, against L gathered entries each."""

    first_row: int  # of the segment
    num_requests: int  # b
    rows_per_request: int  # of the segment
    row_start: int
    row_stop: int
    num_keys: int  # L
    kv_index: Tensor  # [2 * b * Hkv * L] rows of the cache seen as [rows * 2 * Hkv, H]: all keys, then all values
    mask: Tensor  # [b * Hkv, R * Hq/Hkv, L] added to the scores


@dataclass(slots=True)
class AttentionPlan:
    """Tiles of one KV group. They cover the rows of the segments once, in order."""

    shape: GroupShape
    num_rows: int  # T
    tiles: list[Tile]


def plan_attention(
    shape: GroupShape,
    segments: Sequence[Segment],
    block_table: Tensor,
    seq_lens: Tensor,
    positions: Tensor,
    dtype: torch.dtype,
) -> AttentionPlan:
    """block_table [B, P], seq_lens [B] with this step's rows counted, positions [T] -> the group's plan.

    Row r of a request with R rows stands at position seq_len - R + r. Entries that no row may see are gathered
    from cache row 0: block 0 is reserved and stays zero, so that whatever freed blocks hold cannot leak.
    """
    tiles: list[Tile] = []
    num_rows = 0
    for segment in segments:
        num_rows += segment.num_requests * segment.rows_per_request
        last = segment.first_request + segment.num_requests
        whole = len(segments) == 1 and segment.num_requests == len(seq_lens)
        lens = seq_lens if whole else seq_lens[segment.first_request : last]
        table = block_table if whole else block_table[segment.first_request : last]
        step = _rows_per_tile(shape, segment)
        for start in range(0, segment.rows_per_request, step):
            stop = min(start + step, segment.rows_per_request)
            tiles.append(_plan_tile(shape, segment, start, stop, table, lens, positions, dtype))
    return AttentionPlan(shape, num_rows, tiles)


def _rows_per_tile(shape: GroupShape, segment: Segment) -> int:
    rows = segment.rows_per_request
    keys = segment.max_seq_len
    if shape.window is not None:
        keys = min(keys, 2 * shape.window)
        if rows > shape.window:
            rows = shape.window  # then a tile gathers two windows, not the whole prompt
    return max(1, min(rows, MAX_TILE_SCORES // (segment.num_requests * shape.num_heads * keys)))


def _plan_tile(
    shape: GroupShape,
    segment: Segment,
    start: int,
    stop: int,
    table: Tensor,  # [b, P]
    lens: Tensor,  # [b]
    positions: Tensor,  # [T]
    dtype: torch.dtype,
) -> Tile:
    b, all_rows, rows = segment.num_requests, segment.rows_per_request, stop - start
    if stop < all_rows:
        lens = lens - (all_rows - stop)
    num_keys = max(segment.max_seq_len - (all_rows - stop), rows)
    entry = torch.arange(num_keys, device=lens.device)
    end = lens[:, None]
    key: Tensor = entry[None]  # [b or 1, L] positions
    if shape.window is not None and num_keys > shape.window + rows - 1:
        num_keys = shape.window + rows - 1
        key = (end - num_keys).clamp_min_(0) + entry[:num_keys]
    if rows == 1:  # a single row sees exactly the gathered entries that exist
        exists = key < end
        visible = exists[:, None]
    else:
        exists = key < end
        where = positions[segment.first_row : segment.first_row + b * all_rows]
        ahead = where.view(b, all_rows, 1)[:, start:stop] - key[:, None]  # [b, R, L]
        visible = ahead >= 0
        if shape.window is not None:
            visible = visible.logical_and_(ahead < shape.window)
    kv_index = _cache_rows(shape, table, key, exists)
    return Tile(
        segment.first_row,
        b,
        all_rows,
        start,
        stop,
        num_keys,
        kv_index,
        _mask(shape, visible, dtype),
    )


def _cache_rows(shape: GroupShape, table: Tensor, key: Tensor, exists: Tensor) -> Tensor:
    size, heads = shape.block_size, shape.num_kv_heads
    block = torch.div(key, size, rounding_mode="floor")
    if key.shape[1] > table.shape[1] * size:  # max_seq_len is an upper bound and may pass the table
        block = block.clamp_max_(table.shape[1] - 1)
    if block.shape[0] == 1:
        slot = table.index_select(1, block.view(-1)) * size + key % size
    else:
        slot = table.gather(1, block) * size + key % size
    slot = slot * exists
    part = torch.arange(2 * heads, device=key.device).view(2, 1, heads, 1)
    index = (slot * (2 * heads)).unsqueeze_(1) + part  # [2, b, Hkv, L]
    return index.view(-1)


def _mask(shape: GroupShape, visible: Tensor, dtype: torch.dtype) -> Tensor:
    b, rows, keys = visible.shape
    heads, group = shape.num_kv_heads, shape.num_heads // shape.num_kv_heads
    # Half the smallest number: adding a score cannot overflow to -inf, whose softmax would be NaN.
    mask = (~visible).to(dtype).mul_(torch.finfo(dtype).min / 2)
    full = mask[:, None, :, None].expand(b, heads, rows, group, keys)
    return full.reshape(b * heads, rows * group, keys)
