"""Paged KV cache in groups: block tables and pools on the host, one cache tensor per owning layer
on the device.

Each group has its own pool (docs/adr/0002): layers of one attention type share a block table,
sliding groups give blocks back as the window moves. Block 0 of every pool is a null block: freed
table entries point at it, it stays zero.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from hydraspec.types import BlockTable, KVGroupSpec

OWNER, FIRST, END = range(3)  # columns of BlockTable.live
NO_ROW = np.empty(0, dtype=np.int64)
_owners = itertools.count(1)  # of rows, in every cache: no two are ever the same


def _ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


@dataclass(slots=True)
class _Group:
    spec: KVGroupSpec
    num_blocks: int
    num_slots: int
    width: int  # P
    # S times [P] block ids. An entry is never written twice, and each owner of a slot has a new
    # row: block tables that were handed out stay valid.
    rows: list[np.ndarray] = field(init=False)
    live: np.ndarray = field(init=False)  # [S, 3], see BlockTable
    free_blocks: list[int] = field(init=False)
    num_allocated: list[int] = field(init=False)  # [S] leading table entries ever filled
    first_live: list[int] = field(init=False)  # [S] leading entries already given back

    def __post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.rows = [NO_ROW] * self.num_slots
        self.live = np.zeros((self.num_slots, 3), dtype=np.int64)
        self.free_blocks = list(range(self.num_blocks - 1, 0, -1))
        self.num_allocated = [0] * self.num_slots
        self.first_live = [0] * self.num_slots

    def missing(self, slot: int, num_tokens: int) -> int:
        return max(0, _ceil_div(num_tokens, self.spec.block_size) - self.num_allocated[slot])

    def reach(self, slot: int) -> int:
        """Positions below this one have, or had, a block."""
        return self.num_allocated[slot] * self.spec.block_size

    def tokens_that_fit(self, slot: int) -> int:
        return self.reach(slot) + len(self.free_blocks) * self.spec.block_size

    def grow(self, slot: int, count: int) -> None:
        start = self.num_allocated[slot]
        if start == 0:
            self.rows[slot] = np.empty(self.width, dtype=np.int64)
            self.live[slot, OWNER] = next(_owners)
        self.rows[slot][start : start + count] = self.free_blocks[: -count - 1 : -1]
        del self.free_blocks[-count:]
        self.num_allocated[slot] = self.live[slot, END] = start + count

    def release_before(self, slot: int, first_position: int) -> None:
        """Give back blocks that hold only positions below `first_position`."""
        start = self.first_live[slot]
        end = min(first_position // self.spec.block_size, self.num_allocated[slot])
        if end <= start:
            return
        self.free_blocks.extend(self.rows[slot][start:end].tolist())
        self.first_live[slot] = self.live[slot, FIRST] = end

    def release(self, slot: int) -> None:
        self.release_before(slot, self.reach(slot))
        self.num_allocated[slot] = self.first_live[slot] = 0
        self.rows[slot] = NO_ROW
        self.live[slot] = 0


class Lease:
    """Which run uses a cache: at most one, over all views of its blocks."""

    def __init__(self) -> None:
        self._is_taken = False

    @contextmanager
    def taken(self) -> Iterator[None]:
        """For the length of a run.

        Raises:
            RuntimeError: another run has it, which would read and write the same blocks.
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
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.specs = list(specs)
        self.lease = Lease()
        self._groups = [
            _Group(spec, count, num_slots, _ceil_div(max_tokens, spec.block_size) + 1)
            for spec, count in zip(specs, num_blocks, strict=True)
        ]
        self._room = [0] * num_slots  # [S] tokens that a slot's blocks hold, in every group
        self.caches: list[Tensor | None] = [None] * num_layers
        for group in self._groups:
            spec = group.spec
            shape = (group.num_blocks * spec.block_size, *spec.shape.page_row)
            for layer in spec.layers:
                self.caches[layer] = torch.zeros(shape, dtype=dtype, device=device)

    def leading(self, num_groups: int) -> KVCache:
        """The first groups alone, over the same blocks, tensors and lease."""
        view = copy(self)
        view.specs, view._groups = self.specs[:num_groups], self._groups[:num_groups]
        view._room = [0] * len(self._room)
        return view

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
        return 1.0 - sum(len(group.free_blocks) for group in self._groups) / total

    @property
    def usage_per_group(self) -> dict[str, float]:
        """The same of each group, by its name."""
        return {
            group.spec.name: 1.0 - len(group.free_blocks) / (group.num_blocks - 1)
            for group in self._groups
        }

    def can_ever_hold(self, num_tokens: int, num_lookahead_tokens: int = 0) -> bool:
        """Whether a request of `num_tokens` fits into an otherwise empty cache, row by row if need
        be, beside what a drafter writes after each row."""
        for group in self._groups:
            spec = group.spec
            tokens = num_tokens
            if spec.window is not None:
                tokens = min(num_tokens, spec.window + spec.block_size)
            if _ceil_div(tokens + num_lookahead_tokens, spec.block_size) > group.num_blocks - 1:
                return False
        return True

    def tokens_that_fit(self, slot: int) -> int:
        """How long the request in `slot` can become with the blocks that are free now."""
        return min(group.tokens_that_fit(slot) for group in self._groups)

    def allocate(self, slot: int, num_tokens: int) -> bool:
        """Allocate blocks for positions below `num_tokens`, in every group or in none."""
        if num_tokens <= self._room[slot]:
            return True
        missing = [group.missing(slot, num_tokens) for group in self._groups]
        if any(
            count > len(group.free_blocks)
            for count, group in zip(missing, self._groups, strict=True)
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

    def clear(self) -> None:
        """Give back every block of every slot."""
        for group in self._groups:
            group.clear()
        self._room = [0] * len(self._room)

    @property
    def table_widths(self) -> tuple[int, ...]:
        """Per group, P: entries of a row."""
        return tuple(group.width for group in self._groups)

    def block_tables(self, slots: np.ndarray, max_seq_len: int) -> list[BlockTable]:
        """Per group the blocks of `slots`, wide enough for `max_seq_len` tokens. Later
        allocations and releases do not change them."""
        places = slots.tolist()
        return [
            BlockTable(
                [group.rows[slot] for slot in places],
                group.live[slots],
                min(group.width, _ceil_div(max_seq_len, group.spec.block_size)),
            )
            for group in self._groups
        ]
