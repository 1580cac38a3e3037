"""Pools and block tables: nothing leaks, windows slide, budgets are kept."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from caches import kv_cache, kv_group

from hydraspec.engine.cache.kv_budget import row_bytes
from hydraspec.engine.cache.kv_cache import KVCache

FULL = kv_group("full", (1,), 4, head_dim=8)
SLIDING = kv_group("sliding", (0, 2), 2, 5, heads=2, head_dim=4)


def make_cache(num_blocks: tuple[int, int] = (9, 9), num_slots: int = 3) -> KVCache:
    return kv_cache([FULL, SLIDING], num_blocks, num_slots, 32, num_layers=4)


def test_only_owning_layers_have_a_cache() -> None:
    cache = make_cache()
    assert cache.caches[3] is None
    assert cache.caches[1] is not None
    assert cache.caches[1].shape == (36, 2, 1, 8)
    assert cache.caches[0] is not None
    assert cache.caches[0].shape == (18, 2, 2, 4)


def test_allocation_is_all_or_nothing() -> None:
    """A group that runs out must not leave blocks taken in the other."""
    cache = make_cache(num_blocks=(9, 4))
    assert not cache.allocate(0, 8)  # sliding has 3 blocks of 2
    assert cache.usage == 0.0
    assert cache.allocate(0, 6)
    assert cache.tokens_that_fit(0) == 6
    cache.release(0)
    assert cache.usage == 0.0


def test_block_tables_name_distinct_blocks_and_never_the_null_block() -> None:
    cache = make_cache()
    assert cache.allocate(0, 7)
    assert cache.allocate(2, 5)
    full, sliding = (t.dense() for t in cache.block_tables(np.array([0, 2]), max_seq_len=7))
    assert full.shape == (2, 2)
    assert sliding.shape == (2, 4)
    used = [*full[0], *full[1]]
    assert 0 not in used
    assert len(set(used)) == 4


@pytest.mark.parametrize("num_computed", range(20))
def test_a_slid_block_is_out_of_every_later_window(num_computed: int) -> None:
    """Freed exactly when the next query, at num_computed, cannot see any of its positions."""
    cache = make_cache(num_blocks=(9, 12))
    assert cache.allocate(0, 20)
    cache.slide(0, num_computed)
    sliding = cache.block_tables(np.array([0]), max_seq_len=20)[1].dense()
    oldest_visible = max(0, num_computed - 5 + 1)
    for column in range(10):
        last_position = column * 2 + 1
        assert (sliding[0, column] == 0) == (last_position < oldest_visible)


def test_freed_blocks_serve_others_and_come_back_once() -> None:
    cache = make_cache(num_blocks=(9, 9))
    for round_number in range(50):
        slot = round_number % 3
        assert cache.allocate(slot, 12)
        cache.slide(slot, 11)
        cache.slide(slot, 12)
        cache.release(slot)
    assert cache.usage == 0.0


def test_a_latent_row_is_counted_and_allocated_by_its_shape() -> None:
    """A compressed cache holds one vector a token, not keys and values."""
    latent = kv_group("latent", (0, 1), 4, head_dim=24, latent_dim=16)
    assert row_bytes(latent, torch.float32) == 2 * 24 * 4
    cache = kv_cache([latent], [5], 1, 16)
    assert cache.caches[1] is not None
    assert cache.caches[1].shape == (20, 1, 24)
