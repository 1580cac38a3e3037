"""Numbers of blocks that KV groups get of one memory budget: as many as requests need, and more
for the prefix cache where memory is left (docs/adr/0031)."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from hydraspec.types import KVGroupSpec

SMALLEST = 2  # blocks of a group: the null block, and one more


def ceil_div(numerator: int, denominator: int) -> int:
    """The quotient, rounded up."""
    return -(-numerator // denominator)


@dataclass(slots=True, kw_only=True)
class CacheSize:
    """Figures that decide how many blocks a group wants."""

    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    num_speculative_tokens: int
    num_lookahead_tokens: int = 0  # positions after the rows that a drafter writes
    num_cached_seqs: float = 0  # most ended requests that the prefix cache keeps

    @property
    def max_tokens(self) -> int:
        """Positions a block table must be able to name."""
        return self.max_model_len + self.num_speculative_tokens + self.num_lookahead_tokens + 1

    def blocks_wanted(self, spec: KVGroupSpec, num_seqs: int) -> int:
        """Blocks that serve `num_seqs` requests of full length at once, the null block included."""
        whole = ceil_div(self.max_tokens, spec.block_size)
        if spec.window is None:
            return num_seqs * whole + 1
        # A window, unaligned at both ends, per request; the rows of one step on top, shared by all
        # requests.
        beyond = self.max_tokens - self.max_model_len
        window = ceil_div(spec.window + beyond, spec.block_size) + 1
        step = ceil_div(self.max_num_batched_tokens, spec.block_size) + num_seqs
        return min(num_seqs * window + step, num_seqs * whole) + 1

    def blocks_cached(self, spec: KVGroupSpec) -> int:
        """Blocks that keep one request of full length for the prefix cache, once it has ended."""
        tokens = self.max_model_len
        if spec.window is not None:
            tokens = min(tokens, spec.window - 1 + spec.block_size)  # unaligned at both ends
        return ceil_div(tokens, spec.block_size)


def row_bytes(spec: KVGroupSpec, dtype: torch.dtype) -> int:
    """Bytes one token takes in one group, over all its layers; dtype is the target's."""
    return len(spec.layers) * math.prod(spec.shape.page_row) * (spec.dtype or dtype).itemsize


def plan_num_blocks(
    specs: Sequence[KVGroupSpec], size: CacheSize, dtype: torch.dtype, budget_bytes: int
) -> list[int]:
    """Blocks per group, within `budget_bytes`: enough for max_num_seqs requests of full length, or
    for as many as the budget holds; if it holds none, for the longest one that it holds, or
    SMALLEST in every group.

    The rest serves the prefix cache, up to size.num_cached_seqs requests of full length. All counts
    are 0 if the budget does not hold SMALLEST blocks of each group.
    """
    num_seqs = size.max_num_seqs
    while num_seqs > 1 and bytes_wanted(specs, size, dtype, num_seqs) > budget_bytes:
        num_seqs -= 1
    left = budget_bytes - bytes_wanted(specs, size, dtype, num_seqs)
    if left >= 0:
        wanted = [size.blocks_wanted(spec, num_seqs) for spec in specs]
        cached = [size.blocks_cached(spec) for spec in specs]
        share = min(size.num_cached_seqs, left / max(1, bytes_of(specs, cached, dtype)))
        return [count + int(share * more) for count, more in zip(wanted, cached, strict=True)]

    def is_too_long(num_tokens: int) -> bool:
        shorter = replace(size, max_model_len=num_tokens)
        return bytes_wanted(specs, shorter, dtype, 1) > budget_bytes

    longest = bisect_left(range(size.max_model_len), True, key=is_too_long) - 1
    if longest > 0:
        shorter = replace(size, max_model_len=longest)
        return [shorter.blocks_wanted(spec, 1) for spec in specs]
    smallest = [SMALLEST] * len(specs)
    return smallest if bytes_of(specs, smallest, dtype) <= budget_bytes else [0] * len(specs)


def bytes_of(specs: Sequence[KVGroupSpec], num_blocks: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of a cache with `num_blocks` blocks, one number per group."""
    return sum(
        count * spec.block_size * row_bytes(spec, dtype)
        for spec, count in zip(specs, num_blocks, strict=True)
    )


def bytes_wanted(
    specs: Sequence[KVGroupSpec], size: CacheSize, dtype: torch.dtype, num_seqs: int
) -> int:
    """Bytes that serve `num_seqs` requests of full length at once."""
    return bytes_of(specs, [size.blocks_wanted(spec, num_seqs) for spec in specs], dtype)


def longest_request(
    specs: Sequence[KVGroupSpec], num_blocks: Sequence[int], size: CacheSize
) -> int:
    """Tokens of the longest request that `num_blocks` per group hold, at most max_model_len."""

    def is_too_long(num_tokens: int) -> bool:
        shorter = replace(size, max_model_len=num_tokens)
        return any(
            count < shorter.blocks_wanted(spec, 1)
            for spec, count in zip(specs, num_blocks, strict=True)
        )

    return max(0, bisect_left(range(size.max_model_len + 1), True, key=is_too_long) - 1)
