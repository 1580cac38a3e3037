"""Rules of engine.kv_cache, which hold for our own engine."""

from __future__ import annotations

import math
from dataclasses import replace

from hydraspec.config.engines import NATIVE
from hydraspec.config.rules import Rule

MAX_BLOCK_SIZE = 1024  # a block is the unit of waste: half of one per request and KV group


def _is_block_size(size: int) -> bool:
    return 1 <= size <= MAX_BLOCK_SIZE and not size & (size - 1)


_RULES = (
    Rule(
        "engine.kv_cache.block_size",
        lambda size, c: _is_block_size(size),
        f"1, 2, 4, … {MAX_BLOCK_SIZE}",
        "is no power of two in range",
        "16 suits most runs",
    ),
    Rule(  # whether target and drafter have such groups is checked when they are read
        "engine.kv_cache.block_sizes",
        lambda sizes, c: all(map(_is_block_size, sizes.values())),
        f"a mapping of KV groups to 1, 2, 4, … {MAX_BLOCK_SIZE}",
        "holds what is no power of two in range",
        "16 suits most runs: leave the key out",
    ),
    Rule(
        "engine.kv_cache.memory_gib",
        lambda size, c: size is None or 0 < size < math.inf,
        "above 0, or null",
    ),
    Rule(
        "engine.kv_cache.memory_fraction",
        lambda share, c: share is None or 0 < share < 1,
        "above 0 and below 1, or null",
    ),
    Rule(
        "engine.kv_cache.memory_fraction",
        lambda share, c: share is None or c.engine.kv_cache.memory_gib is None,
        "null with engine.kv_cache.memory_gib={c.engine.kv_cache.memory_gib:g}",
        "is given beside engine.kv_cache.memory_gib",
        "leave one of the two out",
    ),
)
KV_CACHE_RULES = tuple(replace(rule, when=lambda c: c.engine.name == NATIVE) for rule in _RULES)
