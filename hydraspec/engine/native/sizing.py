"""How large the KV cache of an engine may be: what is free, less what steps will take."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass

import torch

from hydraspec.config.schema import RunConfig
from hydraspec.distributed.control import ALONE, Control
from hydraspec.distributed.stages import StageLink
from hydraspec.engine.machine import GIB, num_ranks_here
from hydraspec.engine.native.kv_budget import CacheSize, plan_num_blocks
from hydraspec.engine.native.kv_cache import KVCache
from hydraspec.models.base import TargetModel
from hydraspec.speculators.base import BaseSpeculator
from hydraspec.types import KVGroupSpec

DEVICE_SHARE = 0.85  # of free device memory; the rest is for graphs and fragments


@dataclass(slots=True, frozen=True, kw_only=True)
class Models:
    """A target and its drafter, loaded, and the configuration they run with."""

    config: RunConfig
    target: TargetModel
    speculator: BaseSpeculator
    max_model_len: int
    link: StageLink | None = None  # of a pipeline stage

    def kv_groups(self) -> list[KVGroupSpec]:
        """The target's groups, then those the drafter owns."""
        block_size = self.config.engine.kv_cache.block_size
        of_target = self.target.kv_groups(block_size)
        return of_target + self.speculator.kv_groups(block_size, self.target.num_layers)

    def cache_size(self) -> CacheSize:
        """What decides how many blocks a group wants."""
        return CacheSize(
            max_num_seqs=self.config.engine.max_num_seqs,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=self.config.engine.max_num_batched_tokens,
            num_speculative_tokens=self.speculator.num_speculative_tokens,
            num_lookahead_tokens=self.speculator.num_lookahead_tokens,
        )


def smallest_cache(models: Models) -> KVCache:
    """The null block and one more in each group: enough to run batches of padding."""
    specs = models.kv_groups()
    return _cache(models, specs, [2] * len(specs))


def new_cache(models: Models, control: Control = ALONE, *, activation_bytes: int = 0) -> KVCache:
    """The cache for max_num_seqs requests, or as much of it as every rank has memory for."""
    specs, target = models.kv_groups(), models.target
    budget_bytes = _cache_budget_bytes(models.config, target.device, activation_bytes)
    num_blocks = plan_num_blocks(specs, models.cache_size(), target.dtype, budget_bytes)
    return _cache(models, specs, control.agree_least(num_blocks))


def size_warnings(models: Models, kv: KVCache) -> list[str]:
    """Groups of a cache that cannot hold one request of full length."""
    size = models.cache_size()
    return [
        f"the {spec.name} KV cache holds {(count - 1) * spec.block_size} tokens, less than "
        f"one request of max_model_len={models.max_model_len}; raise engine.kv_cache.memory_gib "
        "or lower target.max_model_len"
        for spec, count in zip(kv.specs, kv.num_blocks, strict=True)
        if count < size.blocks_wanted(spec, 1)
    ]


def _cache(models: Models, specs: list[KVGroupSpec], num_blocks: list[int]) -> KVCache:
    target = models.target
    layers = [layer for spec in specs for layer in spec.layers]
    return KVCache(
        specs,
        num_blocks,
        num_slots=models.config.engine.max_num_seqs,
        max_tokens=models.cache_size().max_tokens,
        num_layers=max([target.num_layers, *(layer + 1 for layer in layers)]),
        dtype=target.dtype,
        device=target.device,
    )


def _cache_budget_bytes(config: RunConfig, device: torch.device, activation_bytes: int) -> int:
    """Of one rank: engine.kv_cache.memory_gib, or most of the free device memory, or half of the
    host's, which its ranks share, at most 4 GiB."""
    memory_gib = config.engine.kv_cache.memory_gib
    if memory_gib is not None:
        return int(memory_gib * GIB)
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * DEVICE_SHARE) - activation_bytes
    return min(4 * GIB, _available_bytes() // 2 // num_ranks_here(config.parallelism))


def _available_bytes() -> int:
    """Memory available without swapping, as Linux counts it; elsewhere half of the machine's."""
    with suppress(OSError), open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    with suppress(ValueError, OSError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return 4 * GIB
