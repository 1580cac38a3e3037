"""Block tables of a KV group on the host: which blocks the positions of a slot have, and which
blocks of earlier requests a prompt can start with.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np

from hydraspec.engine.cache.block_pool import BlockPool
from hydraspec.engine.cache.kv_budget import ceil_div
from hydraspec.engine.cache.prefix import PrefixKeys
from hydraspec.types import KVGroupSpec

OWNER, FIRST, END = range(3)  # columns of BlockTable.live
NO_ROW = np.empty(0, dtype=np.int64)
_owners = itertools.count(1)  # numbers of the owners of rows, unique over all caches


@dataclass(slots=True)
class KVGroup:
    """The blocks of S slots. Entries of a slot's row from `first_live` to `num_allocated` are in
    use; earlier ones were given back or, after a prefix hit, never needed."""

    spec: KVGroupSpec
    num_blocks: int
    num_slots: int
    width: int  # P
    pool: BlockPool = field(init=False)
    # S times [P] block ids. An entry is never written twice, and each owner of a slot has a new
    # row: block tables that were handed out stay valid.
    rows: list[np.ndarray] = field(init=False)
    live: np.ndarray = field(init=False)  # [S, 3], see BlockTable
    num_allocated: list[int] = field(init=False)  # [S]
    first_live: list[int] = field(init=False)  # [S]
    num_published: list[int] = field(init=False)  # [S] leading entries that have keys or need none

    def __post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.pool = BlockPool(self.num_blocks)
        self.rows = [NO_ROW] * self.num_slots
        self.live = np.zeros((self.num_slots, 3), dtype=np.int64)
        self.num_allocated = [0] * self.num_slots
        self.first_live = [0] * self.num_slots
        self.num_published = [0] * self.num_slots

    @property
    def num_window_blocks(self) -> int | None:
        """Earlier blocks that a query at a block's first position can see; None: all."""
        window = self.spec.window
        return None if window is None else ceil_div(window - 1, self.spec.block_size)

    def blocks_of(self, num_tokens: int, num_lookahead_tokens: int) -> int:
        """Blocks that a request of `num_tokens` needs, row by row if need be, beside those that a
        drafter writes after each row."""
        if self.spec.window is not None:
            num_tokens = min(num_tokens, self.spec.window + self.spec.block_size)
        return ceil_div(num_tokens + num_lookahead_tokens, self.spec.block_size)

    def missing(self, slot: int, num_tokens: int) -> int:
        """Blocks that the slot lacks for positions below `num_tokens`."""
        return max(0, ceil_div(num_tokens, self.spec.block_size) - self.num_allocated[slot])

    def reach(self, slot: int) -> int:
        """First position of the slot for which no block was allocated yet."""
        return self.num_allocated[slot] * self.spec.block_size

    def tokens_that_fit(self, slot: int) -> int:
        return self.reach(slot) + self.pool.num_free * self.spec.block_size

    def grow(self, slot: int, count: int) -> None:
        """Give the slot `count` more blocks; as many must be free."""
        start = self.num_allocated[slot]
        if start == 0:
            self._begin(slot)
        self.rows[slot][start : start + count] = self.pool.take(count)
        self.num_allocated[slot] = self.live[slot, END] = start + count

    def _begin(self, slot: int) -> None:
        self.rows[slot] = np.empty(self.width, dtype=np.int64)
        self.live[slot, OWNER] = next(_owners)

    def release_before(self, slot: int, first_position: int) -> None:
        """Give back blocks that hold only positions below `first_position`, which a window has
        passed."""
        end = min(first_position // self.spec.block_size, self.num_allocated[slot])
        if end > self.first_live[slot]:
            self._give_back(slot, end, passed=True)

    def release(self, slot: int) -> None:
        self._give_back(slot, self.num_allocated[slot], passed=False)
        self.num_allocated[slot] = self.first_live[slot] = self.num_published[slot] = 0
        self.rows[slot] = NO_ROW
        self.live[slot] = 0

    def _give_back(self, slot: int, end: int, *, passed: bool) -> None:
        start = self.first_live[slot]
        self.pool.give_back(self.rows[slot][start:end].tolist(), passed=passed)
        self.first_live[slot] = self.live[slot, FIRST] = end

    # ------------------------------------------------------------------ prefixes

    def longest_hit(self, keys: PrefixKeys, end: int, alignment: int) -> int:
        """Length in tokens of the longest prefix whose blocks are cached: all of them, or with a
        window those that it covers. `end`, the most, and the result are multiples of `alignment`.
        """
        if self.spec.window is None:
            blocks = self._needed(end)
            missing = next((b for b in blocks if self._find(keys, b) is None), blocks.stop)
            found = missing * self.spec.block_size
            return found - found % alignment
        while end:
            needed = reversed(self._needed(end))
            gap = next((b for b in needed if self._find(keys, b) is None), None)
            if gap is None:
                break
            end = gap * self.spec.block_size  # any longer hit needs the missing block
            end -= end % alignment
        return end

    def take_hit(self, slot: int, keys: PrefixKeys, count: int) -> None:
        """Begin a slot's row with the blocks that a hit of `count` tokens needs."""
        needed = self._needed(count)
        blocks = [self._find(keys, block) for block in needed]
        assert None not in blocks, "take a prefix right after it was found"
        self.pool.share(block for block in blocks if block is not None)
        self._begin(slot)
        self.rows[slot][needed.start : needed.stop] = blocks
        self.live[slot, FIRST], self.live[slot, END] = needed.start, needed.stop
        self.first_live[slot] = needed.start
        self.num_allocated[slot] = self.num_published[slot] = needed.stop

    def skip(self, slot: int, count: int) -> None:
        """Begin a slot's row with the first block that queries at position `count` can see."""
        first = self._needed(count).start
        self._begin(slot)
        self.live[slot, FIRST] = self.live[slot, END] = first
        self.first_live[slot] = self.num_allocated[slot] = first

    def publish(self, slot: int, keys: PrefixKeys, num_final: int, alignment: int) -> int:
        """Give keys to the slot's blocks of rows below `num_final` whose following tokens are
        known. Returns the number of final rows at which the next block can get its key."""
        size, following = self.spec.block_size, self.spec.num_following_tokens
        start = max(self.num_published[slot], self.first_live[slot])
        end = min(num_final, len(keys.token_ids) - following) // size
        for block in range(start, end):
            if self._can_serve(block, alignment):
                key = keys.key((block + 1) * size, following)
                self.pool.publish(int(self.rows[slot][block]), key)
        self.num_published[slot] = max(start, end)
        return (self.num_published[slot] + 1) * size

    def _find(self, keys: PrefixKeys, block: int) -> int | None:
        end = (block + 1) * self.spec.block_size
        return self.pool.find(keys.key(end, self.spec.num_following_tokens))

    def _needed(self, end: int) -> range:
        """Blocks before position `end` that queries at `end` or later can see."""
        last, window = end // self.spec.block_size, self.num_window_blocks
        return range(0 if window is None else max(0, last - window), last)

    def _can_serve(self, block: int, alignment: int) -> bool:
        """Returns whether any aligned hit needs this block of a sequence."""
        end = (block + 1) * self.spec.block_size
        return block in self._needed(end + -end % alignment)
