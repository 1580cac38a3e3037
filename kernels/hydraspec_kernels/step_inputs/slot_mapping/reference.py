"""Where a token row's keys and values go in a paged cache.

Letters: T rows, B requests, P blocks in a table row.
"""

from __future__ import annotations

from torch import Tensor


def slot_mapping_reference(
    table: Tensor, request: Tensor, positions: Tensor, block_size: int, *, padded: bool = False
) -> Tensor:
    """table [B, P], request [T], positions p [T] -> table[request, p // size] * size + p % size.

    With `padded`, rows of request -1 give -1.
    """
    blocks = positions.div(block_size, rounding_mode="floor")
    entry = (request * table.shape[1]).add_(blocks)
    if padded:
        entry = entry.clamp_min_(0)
    rows = table.reshape(-1).index_select(0, entry).mul_(block_size)
    rows = rows.add_(positions).sub_(blocks.mul_(block_size))
    return rows.where(request >= 0, -1) if padded else rows
