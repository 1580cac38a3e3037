"""The blocks of one KV group: which are in use, by how many requests, and which hold content that a
later request can find by its key.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """Block ids 1, 2, ...; block 0 is the null block and is never handed out.

    A block is empty, in use, or kept: free, with content that its key finds. A block in use may
    have a key too; then further requests can share it, and no request writes it.

    Empty blocks are handed out first. Kept ones are evicted after them: first those that a window
    has passed and no request has ever shared, then all others, each in the order in which they
    became free.
    """

    def __init__(self, num_blocks: int) -> None:
        self.empty = list(range(num_blocks - 1, 0, -1))
        self._passed: OrderedDict[int, None] = OrderedDict()  # kept, evicted before the next ones
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._num_users = [0] * num_blocks
        self._key_of: dict[int, bytes] = {}
        self._blocks: dict[bytes, int] = {}  # by key
        self._was_shared: set[int] = set()  # blocks with a key that `share` was called for

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out: empty or kept."""
        return len(self.empty) + len(self._passed) + len(self._kept)

    def take(self, count: int) -> list[int]:
        """Hand out `count` empty or evicted blocks, at most num_free; returns their ids."""
        found = self.empty[: -count - 1 : -1]
        del self.empty[max(0, len(self.empty) - count) :]
        found.extend(self._evicted() for _ in range(count - len(found)))
        for block in found:
            self._num_users[block] = 1
        return found

    def find(self, key: bytes) -> int | None:
        """The block with the content of `key`; None: there is none."""
        return self._blocks.get(key)

    def share(self, blocks: Iterable[int]) -> None:
        """Add a user to each of the blocks, which `find` returned."""
        for block in blocks:
            if not self._num_users[block]:
                self._unlink(block)
            self._num_users[block] += 1
            self._was_shared.add(block)

    def publish(self, block: int, key: bytes) -> None:
        """Let later requests find a block in use by `key`, unless another block in use has that
        key; a kept block that has it becomes empty."""
        if block in self._key_of:
            return
        other = self._blocks.get(key)
        if other is not None:
            if self._num_users[other]:
                return
            self._unlink(other)
            self._forget(other)
            self.empty.append(other)
        self._blocks[key], self._key_of[block] = block, key

    def give_back(self, blocks: Sequence[int], *, passed: bool = False) -> None:
        """Remove one user of each block; `blocks` are in the order of positions. Among those that
        become kept, the last position is evicted first. passed: a window has passed them."""
        kept: list[int] = []
        for block in blocks:
            self._num_users[block] -= 1
            if not self._num_users[block]:
                (kept if block in self._key_of else self.empty).append(block)
        for block in reversed(kept):
            goes_first = passed and block not in self._was_shared
            (self._passed if goes_first else self._kept)[block] = None

    def _evicted(self) -> int:
        block, _ = (self._passed or self._kept).popitem(last=False)
        self._forget(block)
        return block

    def _unlink(self, block: int) -> None:
        del (self._passed if block in self._passed else self._kept)[block]

    def _forget(self, block: int) -> None:
        del self._blocks[self._key_of.pop(block)]
        self._was_shared.discard(block)
