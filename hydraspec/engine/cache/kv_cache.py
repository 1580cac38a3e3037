"""Paged KV cache in groups: block tables and pools on the host, one cache tensor per owning layer
on the device.

Each group has its own pool (docs/adr/0002): layers of one attention type share a block table,
sliding groups give blocks back as the window moves. Block 0 of every pool is a null block: freed
table entries point at it, it stays zero.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy

import numpy as np
import torch
from torch import Tensor

from hydraspec.engine.cache.kv_budget import ceil_div
from hydraspec.engine.cache.kv_group import KVGroup
from hydraspec.engine.cache.prefix import PrefixKeys
from hydraspec.types import BlockTable, KVGroupSpec, PrefixCaching, Span

NEVER = sys.maxsize


class Lease:
    """Exclusive use of a cache, with all views of its blocks, by one run at a time.

    Attributes:
        filled: layers whose blocks hold random numbers, or what runs wrote after those.
    """

    def __init__(self) -> None:
        self._is_taken = False
        self.filled: set[int] = set()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Take the cache for the length of a run.

        Raises:
            RuntimeError: another run has the cache, and would read and write the same blocks.
        """
        if self._is_taken:
            raise RuntimeError(
                "another run uses this KV cache: finish or close the iterator of the engine's "
                "earlier run, or of the baseline's, which shares the cache"
            )
        self._is_taken = True
        try:
            yield
        finally:
            self._is_taken = False


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On a CPU memory is taken when it is first written to, which torch.zeros does at once:
    most runs need a small part of the cache."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    content = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(content).view(dtype).view(shape)


class KVCache:
    """Block tables, pools and cache tensors of all groups.

    `caches[layer]` is [num_blocks * block_size, *page_row] (see GroupShape) for a layer that owns
    KV, else None.
    """

    def __init__(
        self,
        specs: Sequence[KVGroupSpec],
        num_blocks: Sequence[int],
        *,
        num_layers: int,
        num_slots: int,
        max_tokens: int,
        dtype: torch.dtype,  # of groups that name none
        device: torch.device,
        prefix_root: bytes | None = None,
    ) -> None:
        """prefix_root: start of the keys of cached blocks; None: no blocks are cached."""
        self.specs = list(specs)
        self.lease = Lease()
        self._prefix_root = prefix_root
        self._groups = [
            KVGroup(spec, count, num_slots, ceil_div(max_tokens, spec.block_size) + 1)
            for spec, count in zip(specs, num_blocks, strict=True)
        ]
        self._start_over(num_slots)
        self.caches: list[Tensor | None] = [None] * num_layers
        for group in self._groups:
            spec = group.spec
            shape = (group.num_blocks * spec.block_size, *spec.shape.page_row)
            for layer in spec.layers:
                self.caches[layer] = _zeros(shape, spec.dtype or dtype, device)

    def _start_over(self, num_slots: int) -> None:
        self._room = [0] * num_slots  # [S] tokens that a slot's blocks hold, in every group
        first = NEVER if self._prefix_root is None else 0
        self._publish_from = [first] * num_slots  # [S] final rows at which a block may get its key

    def leading(self, num_groups: int) -> KVCache:
        """A view of the first `num_groups` groups, over the same blocks, tensors and lease."""
        view = copy(self)
        view.specs, view._groups = self.specs[:num_groups], self._groups[:num_groups]
        view._start_over(len(self._room))
        return view

    @property
    def alignment(self) -> int:
        """Least common multiple of the block sizes: prefix hits are multiples of it, in tokens."""
        return math.lcm(*(group.spec.block_size for group in self._groups))

    @property
    def num_blocks(self) -> list[int]:
        """Blocks of each group, the null block included."""
        return [group.num_blocks for group in self._groups]

    @property
    def num_bytes(self) -> int:
        return sum(cache.nbytes for cache in self.caches if cache is not None)

    @property
    def usage(self) -> float:
        """Share of blocks in use, 0..1, over all groups."""
        total = sum(group.num_blocks - 1 for group in self._groups)
        return 1.0 - sum(group.pool.num_free for group in self._groups) / total

    @property
    def usage_per_group(self) -> dict[str, float]:
        """Share of blocks in use, 0..1, by name of the group."""
        return {
            group.spec.name: 1.0 - group.pool.num_free / (group.num_blocks - 1)
            for group in self._groups
        }

    def can_ever_hold(self, num_tokens: int, num_lookahead_tokens: int = 0) -> bool:
        """Returns whether a request of `num_tokens` fits into an otherwise empty cache, row by row
        if need be, beside what a drafter writes after each row."""
        return self.most_requests(num_tokens, num_lookahead_tokens) > 0

    def longest_prompt(self, max_model_len: int, num_lookahead_tokens: int) -> int:
        """Tokens of the longest prompt that there is room for beside one more token."""

        def is_too_long(num_tokens: int) -> bool:
            return not self.can_ever_hold(num_tokens + 1, num_lookahead_tokens)

        return max(0, bisect_left(range(max_model_len), True, key=is_too_long) - 1)

    def tokens_that_fit(self, slot: int) -> int:
        """Tokens to which the request in `slot` can grow with the blocks that are free now."""
        return min(group.tokens_that_fit(slot) for group in self._groups)

    def allocate(self, slot: int, num_tokens: int) -> bool:
        """Allocate blocks for positions below `num_tokens`, in every group or in none; returns
        whether there were enough."""
        if num_tokens <= self._room[slot]:
            return True
        missing = [group.missing(slot, num_tokens) for group in self._groups]
        if any(
            count > group.pool.num_free for count, group in zip(missing, self._groups, strict=True)
        ):
            return False
        for count, group in zip(missing, self._groups, strict=True):
            if count:
                group.grow(slot, count)
        self._room[slot] = min(group.reach(slot) for group in self._groups)
        return True

    def slide(self, slot: int, num_computed: int) -> None:
        """Free sliding blocks that no query at position `num_computed` or later can see.

        A drafter that reads the target's KV at position num_computed - 1 has been launched before
        the next step is scheduled, and the device works in order.
        """
        for group in self._groups:
            if group.spec.window is not None:
                group.release_before(slot, num_computed - group.spec.window + 1)

    def release(self, slot: int) -> None:
        for group in self._groups:
            group.release(slot)
        self._room[slot] = 0
        self._publish_from[slot] = NEVER if self._prefix_root is None else 0

    def clear(self) -> None:
        """Give back every block of every slot, and forget what was cached."""
        for group in self._groups:
            group.clear()
        self._start_over(len(self._room))

    def most_requests(self, num_tokens: int, num_lookahead_tokens: int = 0) -> int:
        """Number of requests of `num_tokens` that an otherwise empty cache holds at once."""
        return min(
            (group.num_blocks - 1) // group.blocks_of(num_tokens, num_lookahead_tokens)
            for group in self._groups
        )

    # ------------------------------------------------------------------ prefixes

    @property
    def prefix_caching(self) -> PrefixCaching | None:
        """Limits of prefix hits; None: no blocks are cached."""
        if self._prefix_root is None:
            return None
        has_draft_kv = any(spec.num_following_tokens for spec in self.specs)
        return PrefixCaching(block_size=self.alignment, has_draft_kv=has_draft_kv)

    def keys_of(
        self, token_ids: Sequence[int], spans: Sequence[Span] = (), num_filled: int = 0
    ) -> PrefixKeys:
        """Keys for `find_prefix`, `take_prefix` and `publish` of a request whose `token_ids` may
        grow and whose prompt has `spans`. With `num_filled` (see Request) its prefix has so many
        tokens, in blocks that no other request finds."""
        unit = math.gcd(*(group.spec.block_size for group in self._groups))
        return PrefixKeys(token_ids, unit, self._prefix_root or b"", spans, num_filled)

    def next_key(self, keys: PrefixKeys, count: int, most: int) -> bytes | None:
        """Key of all tokens up to the next possible end of a hit after `count` tokens; None: that
        end is after `most` tokens, or no blocks are cached."""
        end = count - count % self.alignment + self.alignment
        if self._prefix_root is None or keys.num_filled or end > most:
            return None
        return keys.key(end, 0)

    def find_prefix(self, keys: PrefixKeys, most: int) -> int:
        """Number of leading tokens, at most `most`, whose KV is in cached blocks of every group: a
        multiple of all block sizes. `most` is below the number of tokens: a row is left to compute,
        and the following tokens that keys of blocks depend on are known."""
        if keys.num_filled:
            return keys.num_filled
        if self._prefix_root is None:
            return 0
        alignment = self.alignment
        end = most - most % alignment
        # Without a window a shorter prefix of a hit is a hit too; blocks of a window are looked up
        # again at each length.
        for group in self._groups:
            if group.spec.window is None:
                end = group.longest_hit(keys, end, alignment)
        sliding = [group for group in self._groups if group.spec.window is not None]
        before = -1
        while end != before:
            before = end
            for group in sliding:
                end = group.longest_hit(keys, end, alignment)
        return end

    def take_prefix(self, slot: int, keys: PrefixKeys, count: int) -> None:
        """Let a free slot begin with the blocks of a prefix of `count` tokens that was just found.

        These blocks are shared and never written: the slot's own rows begin with its own blocks.
        """
        if not count:
            return
        if keys.num_filled:
            for group in self._groups:
                group.skip(slot, count)
            self._publish_from[slot] = NEVER
            return
        for group in self._groups:
            group.take_hit(slot, keys, count)
        self._room[slot] = self._publish_from[slot] = count

    def publish(self, slot: int, keys: PrefixKeys, num_final: int) -> None:
        """Let later requests find the slot's full blocks of rows below `num_final`, which are
        computed, or launched and certain to stay."""
        if num_final < self._publish_from[slot]:
            return
        alignment = self.alignment
        self._publish_from[slot] = min(
            group.publish(slot, keys, num_final, alignment) for group in self._groups
        )

    @property
    def table_widths(self) -> tuple[int, ...]:
        """P of each group: entries of a row of its block table."""
        return tuple(group.width for group in self._groups)

    def block_tables(self, slots: np.ndarray, max_seq_len: int) -> list[BlockTable]:
        """Block tables of `slots`, one per group, wide enough for `max_seq_len` tokens. Later
        allocations and releases do not change them."""
        places = slots.tolist()
        return [
            BlockTable(
                [group.rows[slot] for slot in places],
                group.live[slots],
                min(group.width, ceil_div(max_seq_len, group.spec.block_size)),
            )
            for group in self._groups
        ]
