"""How many blocks each KV group gets of one budget of memory: what requests need at most."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hydraspec.types import KVGroupSpec


def ceil_div(numerator: int, denominator: int) -> int:
    """The quotient, rounded up."""
    return -(-numerator // denominator)


@dataclass(slots=True, kw_only=True)
class CacheSize:
    """What decides how many blocks a group wants."""

    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    num_speculative_tokens: int
    num_lookahead_tokens: int = 0  # positions after the rows that a drafter writes

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


def row_bytes(spec: KVGroupSpec, dtype: torch.dtype) -> int:
    """Bytes one token takes in one group, over all its layers."""
    return len(spec.layers) * math.prod(spec.shape.page_row) * dtype.itemsize


def plan_num_blocks(
    specs: Sequence[KVGroupSpec], size: CacheSize, dtype: torch.dtype, budget_bytes: int
) -> list[int]:
    """Blocks per group: enough for max_num_seqs full requests, or for as many as `budget_bytes`
    holds.

    Below one full request the blocks shrink in proportion; requests that then cannot fit end with
    an error.
    """

    def total(num_seqs: int) -> int:
        return sum(
            size.blocks_wanted(spec, num_seqs) * spec.block_size * row_bytes(spec, dtype)
            for spec in specs
        )

    num_seqs = size.max_num_seqs
    while num_seqs > 1 and total(num_seqs) > budget_bytes:
        num_seqs -= 1
    share = min(1.0, budget_bytes / total(num_seqs))
    return [max(2, int(size.blocks_wanted(spec, num_seqs) * share)) for spec in specs]
