"""KV groups and caches on the CPU in plain numbers, whatever a test leaves out filled in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hydraspec.engine.cache.kv_cache import KVCache
from hydraspec.types import GroupShape, KVGroupSpec


def kv_group(
    name: str,
    layers: tuple[int, ...],
    block_size: int,
    window: int | None = None,
    *,
    heads: int = 1,  # of queries and of KV
    head_dim: int = 1,
    latent_dim: int | None = None,
    num_following_tokens: int = 0,
) -> KVGroupSpec:
    shape = GroupShape(
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        block_size=block_size,
        window=window,
        latent_dim=latent_dim,
    )
    return KVGroupSpec(
        name=name, layers=layers, shape=shape, num_following_tokens=num_following_tokens
    )


def kv_cache(
    specs: Sequence[KVGroupSpec],
    num_blocks: Sequence[int],
    num_slots: int,
    max_tokens: int,
    kind: type[KVCache] = KVCache,
    **given: Any,
) -> KVCache:
    """A cache of the groups' layers, in float32."""
    fields: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
    fields["num_layers"] = 1 + max(layer for spec in specs for layer in spec.layers)
    return kind(specs, num_blocks, num_slots=num_slots, max_tokens=max_tokens, **fields | given)
