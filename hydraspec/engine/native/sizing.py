"""How large the KV cache of an engine may be: what is free, less what steps will take."""

from __future__ import annotations

import os
from contextlib import suppress

import torch

from hydraspec.config.schema import RunConfig
from hydraspec.engine.native.kv_cache import CacheSize, KVCache, plan_num_blocks
from hydraspec.models.base import TargetModel
from hydraspec.speculators.base import BaseSpeculator
from hydraspec.types import KVGroupSpec

GIB = 1 << 30
DEVICE_SHARE = 0.85  # of free device memory; the rest is for graphs and fragments


def cache_specs(
    config: RunConfig, target: TargetModel, speculator: BaseSpeculator
) -> list[KVGroupSpec]:
    """The target's groups and, behind them, those the drafter owns."""
    block_size = config.engine.kv_cache.block_size
    return target.kv_groups(block_size) + speculator.kv_groups(block_size, target.num_layers)


def cache_size(config: RunConfig, speculator: BaseSpeculator, max_model_len: int) -> CacheSize:
    """What decides how many blocks a group wants."""
    return CacheSize(
        max_num_seqs=config.engine.max_num_seqs,
        max_model_len=max_model_len,
        max_num_batched_tokens=config.engine.max_num_batched_tokens,
        num_speculative_tokens=speculator.num_speculative_tokens,
        num_lookahead_tokens=speculator.num_lookahead_tokens,
    )


def smallest_cache(
    config: RunConfig, target: TargetModel, speculator: BaseSpeculator, max_model_len: int
) -> KVCache:
    """Null blocks and one more a group: enough to run batches of padding."""
    specs = cache_specs(config, target, speculator)
    return _cache(config, target, speculator, max_model_len, specs, [2] * len(specs))


def new_cache(
    config: RunConfig,
    target: TargetModel,
    speculator: BaseSpeculator,
    max_model_len: int,
    warnings: list[str],
    *,
    activation_bytes: int = 0,
) -> KVCache:
    """The cache for max_num_seqs requests, or as much of it as there is memory for."""
    specs = cache_specs(config, target, speculator)
    size = cache_size(config, speculator, max_model_len)
    budget_bytes = _cache_budget_bytes(config, target.device, activation_bytes)
    num_blocks = plan_num_blocks(specs, size, target.dtype, budget_bytes)
    for spec, count in zip(specs, num_blocks, strict=True):
        if count < size.blocks_wanted(spec, 1):
            warnings.append(
                f"the {spec.name} KV cache holds {(count - 1) * spec.block_size} tokens, less than "
                f"one request of max_model_len={max_model_len}; raise engine.kv_cache.memory_gib "
                "or lower target.max_model_len"
            )
    return _cache(config, target, speculator, max_model_len, specs, num_blocks)


def _cache(
    config: RunConfig,
    target: TargetModel,
    speculator: BaseSpeculator,
    max_model_len: int,
    specs: list[KVGroupSpec],
    num_blocks: list[int],
) -> KVCache:
    return KVCache(
        specs,
        num_blocks,
        num_slots=config.engine.max_num_seqs,
        max_tokens=cache_size(config, speculator, max_model_len).max_tokens,
        num_layers=max(
            [target.num_layers, *(layer + 1 for spec in specs for layer in spec.layers)]
        ),
        dtype=target.dtype,
        device=target.device,
    )


def _cache_budget_bytes(config: RunConfig, device: torch.device, activation_bytes: int) -> int:
    """engine.kv_cache.memory_gib, or most of the free device memory, or a careful share of the
    host's."""
    memory_gib = config.engine.kv_cache.memory_gib
    if memory_gib is not None:
        return int(memory_gib * GIB)
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * DEVICE_SHARE) - activation_bytes
    return min(4 * GIB, _available_bytes() // 2)


def _available_bytes() -> int:
    """Memory to be had without swapping, as Linux counts it; elsewhere half of what there is."""
    with suppress(OSError), open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    with suppress(ValueError, OSError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return 4 * GIB
