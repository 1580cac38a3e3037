"""What the layers of one KV group share in one forward pass.

On the CPU: which cache rows to gather, and who may see them. On CUDA only where things stand: the
kernels find rows and visible keys themselves, so nothing of a plan depends on sequence lengths.

Letters: b requests, R rows a request, L gathered entries a request, P blocks of a table row. All
shapes come from host numbers; everything that depends on sequence lengths is computed on the
device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hydraspec_kernels.runtime.launch import runs_kernels

# Scores of one tile at most; long prefills are cut into tiles of query rows so that memory stays
# flat.
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
    """What a KV group's attention looks like. window None: a row sees everything up to itself.

    scale multiplies the scores: 1 for Gemma 4, 1/sqrt(head_dim) for most others. With latent_dim
    the cache holds one key a row, [rows, 1, H], whose first latent_dim numbers are also the value
    (DeepSeek's compressed cache); there is one KV head then.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    window: int | None
    scale: float = 1.0
    latent_dim: int | None = None

    @property
    def head_rows(self) -> int:
        """Rows one token takes of the cache seen as [rows, H]."""
        return 1 if self.latent_dim is not None else 2 * self.num_kv_heads


@dataclass(slots=True)
class Tile:
    """Rows row_start..row_stop of every request of a segment, against L gathered entries each."""

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
    """Tiles of one KV group. They cover the rows of the segments once, in order."""

    shape: GroupShape
    num_rows: int  # T
    tiles: list[Tile]


@dataclass(slots=True)
class DevicePlan:
    """What the kernels read. All numbers of the host are bounds that a CUDA graph may freeze.

    A request of sequence length 0 is padding: its rows come out as zeros, like rows behind
    query_start_loc[B].
    """

    shape: GroupShape
    query_start_loc: Tensor | None  # [B+1] first row of each request; None: row b is request b
    seq_lens: Tensor  # [B], this step's rows counted
    block_table: Tensor  # [B, P]
    num_rows: int  # T
    num_requests: int  # B
    max_rows: int  # rows of the request with the most


AttentionPlan = TiledPlan | DevicePlan


def plan_attention(
    shape: GroupShape,
    segments: Sequence[Segment],
    block_table: Tensor,
    seq_lens: Tensor,
    positions: Tensor,
    dtype: torch.dtype,
    query_start_loc: Tensor | None = None,
) -> AttentionPlan:
    """block_table [B, P], seq_lens [B] with this step's rows counted, positions [T],
    query_start_loc [B+1] -> the group's plan.

    Row r of a request with R rows stands at position seq_len - R + r. Entries that no row may see
    are gathered from cache row 0: block 0 is reserved and stays zero, so that whatever freed
    blocks hold cannot leak. Only CUDA reads query_start_loc; None there means a row a request.
    """
    if runs_kernels(seq_lens):
        return device_plan(shape, segments, block_table, seq_lens, query_start_loc)
    return _tiled_plan(shape, segments, block_table, seq_lens, positions, dtype)


def device_plan(
    shape: GroupShape,
    segments: Sequence[Segment],
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor | None,
) -> DevicePlan:
    """The plan the kernels read; see `plan_attention`. Makes no tensor and launches nothing."""
    num_rows = num_requests = max_rows = 0
    for segment in segments:
        num_requests += segment.num_requests
        num_rows += segment.num_requests * segment.rows_per_request
        max_rows = max(max_rows, segment.rows_per_request)
    if query_start_loc is None and max_rows != 1:
        raise ValueError(
            f"query_start_loc is None with {max_rows} rows a request: only segments of one row a "
            "request go without it"
        )
    return DevicePlan(
        shape, query_start_loc, seq_lens, block_table, num_rows, num_requests, max_rows
    )


def _tiled_plan(
    shape: GroupShape,
    segments: Sequence[Segment],
    block_table: Tensor,
    seq_lens: Tensor,
    positions: Tensor,
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
        step = _rows_per_tile(shape, segment)
        for start in range(0, segment.rows_per_request, step):
            stop = min(start + step, segment.rows_per_request)
            tiles.append(_plan_tile(shape, segment, start, stop, table, lens, positions, dtype))
    return TiledPlan(shape, num_rows, tiles)


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
    after = all_rows - stop
    num_keys = max(segment.max_seq_len - after, rows)
    end = lens[:, None] if after == 0 else (lens - after)[:, None]
    if shape.window is not None and num_keys > shape.window + rows - 1:
        num_keys = shape.window + rows - 1
        key = (end - num_keys).clamp_min_(0) + torch.arange(num_keys, device=end.device)
        base = _looked_up_rows(shape, table, key)
    else:
        key = torch.arange(num_keys, device=end.device)[None]
        base = _leading_rows(shape, table, num_keys)
    exists = key < end  # [b, L]
    if rows == 1:  # a single row sees exactly the gathered entries that exist
        hidden = exists.logical_not()[:, None]
    else:
        where = positions[segment.first_row : segment.first_row + b * all_rows]
        ahead = where.view(b, all_rows, 1)[:, start:stop] - key[:, None]  # [b, R, L]
        hidden = ahead < 0
        if shape.window is not None:
            hidden = hidden.logical_or_(ahead >= shape.window)
    index = _head_rows(shape, base.mul_(exists))
    mask = _mask(shape, hidden, dtype)
    return Tile(segment.first_row, b, all_rows, start, stop, num_keys, index, mask)


# Rows are counted with the cache seen as [rows * 2 * Hkv, H], so that one gather yields
# contiguous heads.


def _leading_rows(shape: GroupShape, table: Tensor, num_keys: int) -> Tensor:
    """First head row of positions 0..L, [b, L]. Positions past the table repeat its last entry."""
    per_block = shape.block_size * shape.head_rows
    num_blocks = -(-num_keys // shape.block_size)
    inside = torch.arange(0, per_block, shape.head_rows, device=table.device)
    rows = ((table[:, :num_blocks] * per_block)[:, :, None] + inside).view(table.shape[0], -1)
    if num_blocks > table.shape[1]:  # max_seq_len is an upper bound and may pass the table
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
    """hidden [b, R, L] -> what to add to the scores; a dimension of 1 is left to broadcast."""
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
