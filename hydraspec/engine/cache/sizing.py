"""Size of an engine's KV cache: the memory that is free, less what steps will take."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from hydraspec.config.messages import refusal
from hydraspec.config.schema import RunConfig
from hydraspec.engine.cache.kv_budget import (
    SMALLEST,
    CacheSize,
    bytes_of,
    bytes_wanted,
    longest_request,
    plan_num_blocks,
)
from hydraspec.engine.cache.kv_cache import KVCache
from hydraspec.engine.cache.prefix import root_key
from hydraspec.engine.machine import GIB, num_ranks_here
from hydraspec.models.base import TargetModel
from hydraspec.parallel.control import ALONE, Control
from hydraspec.parallel.stages import StageLink
from hydraspec.speculators.base import BaseSpeculator
from hydraspec.types import ConfigurationError, KVGroupSpec

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
        block_size = self.config.engine.kv_cache.block_size_of
        of_target = self.target.kv_groups(block_size)
        following = self.speculator.num_following_tokens
        return of_target + [
            replace(spec, num_following_tokens=following)
            for spec in self.speculator.kv_groups(block_size, self.target.num_layers)
        ]

    def cache_size(self) -> CacheSize:
        """Figures that decide how many blocks a group wants."""
        return CacheSize(
            max_num_seqs=self.config.engine.max_num_seqs,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=self.config.engine.max_num_batched_tokens,
            num_speculative_tokens=self.speculator.num_speculative_tokens,
            num_lookahead_tokens=self.speculator.num_lookahead_tokens,
            num_cached_seqs=self._num_cached_seqs(),
        )

    def _num_cached_seqs(self) -> float:
        """Most ended requests that the prefix cache keeps where memory is left: max_num_seqs, or
        any number if the configuration gives a memory budget."""
        engine = self.config.engine
        if not engine.prefix_caching:
            return 0
        given = engine.kv_cache.memory_gib, engine.kv_cache.memory_fraction
        return engine.max_num_seqs if given == (None, None) else math.inf


def smallest_cache(models: Models) -> KVCache:
    """A cache of the null block and one more in each group: enough to run batches of padding."""
    specs = models.kv_groups()
    return _cache(models, specs, [SMALLEST] * len(specs))


def check_block_sizes(models: Models) -> None:
    """Refuse a group of engine.kv_cache.block_sizes that target and drafter do not have."""
    known = [spec.name for spec in models.kv_groups()]
    for name, size in models.config.engine.kv_cache.block_sizes.items():
        if name not in known:
            raise refusal(
                f"engine.kv_cache.block_sizes.{name}",
                size,
                f"names no KV group of target={models.config.target.name} with "
                f"method={models.config.method.name}",
                allowed=", ".join(known),
                remedy="choose one of these, or leave the key out",
            )


def new_cache(models: Models, control: Control = ALONE, *, activation_bytes: int = 0) -> KVCache:
    """The cache for max_num_seqs requests, or as much of it as every rank has memory for.
    activation_bytes: device memory to leave free for steps.

    Raises:
        ConfigurationError: on every rank, if one has no memory for a block of each group.
    """
    specs, size, dtype = models.kv_groups(), models.cache_size(), models.target.dtype
    budget_bytes = _cache_budget_bytes(models.config, models.target.device, activation_bytes)
    num_blocks = plan_num_blocks(specs, size, dtype, budget_bytes)
    smallest_bytes = bytes_of(specs, [SMALLEST] * len(specs), dtype)
    one_request = bytes_wanted(specs, size, dtype, 1)
    *num_blocks, most, smallest, least = control.agree_least(
        [*num_blocks, -one_request, -smallest_bytes, budget_bytes]
    )
    if min(num_blocks) < SMALLEST:
        raise _too_small(models, least, -smallest, -most)
    return _cache(models, specs, num_blocks)


def size_warnings(models: Models, kv: KVCache) -> list[str]:
    """Warnings: one if the cache holds no request of max_model_len tokens, else none."""
    size, dtype = models.cache_size(), models.target.dtype
    longest = longest_request(kv.specs, kv.num_blocks, size)
    if longest >= models.max_model_len:
        return []
    return [
        f"the KV cache holds one request of {longest} tokens, and one of "
        f"max_model_len={models.max_model_len} takes "
        f"{_gib(bytes_wanted(kv.specs, size, dtype, 1))} GiB; raise "
        f"{_budget_key(models.config)} or lower target.max_model_len"
    ]


def _too_small(
    models: Models, budget_bytes: int, smallest: int, one_request: int
) -> ConfigurationError:
    config, groups = models.config, models.kv_groups()
    key = _budget_key(config)
    value = getattr(config.engine.kv_cache, key.rsplit(".", 1)[1])
    blocks = ", ".join(f"{spec.name} of {spec.block_size} tokens" for spec in groups)
    return refusal(
        key,
        value,
        f"gives the KV cache {max(0, budget_bytes) / GIB:.3g} GiB, which does not hold a block of "
        f"each of its groups ({blocks}) beside its null block",
        allowed=f"what gives it {_gib(smallest)} GiB or more; {_gib(one_request)} GiB hold one "
        f"request of max_model_len={models.max_model_len} tokens",
        remedy="raise it" if value is not None else "free memory of the device, or set the key",
    )


def _budget_key(config: RunConfig) -> str:
    by_share = config.engine.kv_cache.memory_fraction is not None
    return "engine.kv_cache." + ("memory_fraction" if by_share else "memory_gib")


def _gib(num_bytes: int) -> str:
    """Number of GiB in three digits, rounded up so that it suffices."""
    unit = 10.0 ** (math.floor(math.log10(max(1, num_bytes) / GIB)) - 2)
    return f"{math.ceil(num_bytes / GIB / unit) * unit:.3g}"


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
        prefix_root=_prefix_root(models.config),
    )


def _prefix_root(config: RunConfig) -> bytes | None:
    """The start of keys of cached blocks; None: engine.prefix_caching is false."""
    if not config.engine.prefix_caching:
        return None
    target = config.target
    return root_key(target.checkpoint, target.weights.value, target.dtype.value)


def _cache_budget_bytes(config: RunConfig, device: torch.device, activation_bytes: int) -> int:
    """Bytes of one rank's cache: engine.kv_cache.memory_gib, or memory_fraction of the memory that
    is free beside the weights. The default is DEVICE_SHARE of a CUDA device's free memory; on a CPU
    it is half of the host's, which its ranks share, and at most 4 GiB."""
    kv_cache = config.engine.kv_cache
    if kv_cache.memory_gib is not None:
        return int(kv_cache.memory_gib * GIB)
    share = kv_cache.memory_fraction
    if device.type == "cuda":
        free_bytes = torch.cuda.mem_get_info(device)[0]
        return int(free_bytes * (share or DEVICE_SHARE)) - activation_bytes
    free_bytes = _available_bytes() // num_ranks_here(config.parallelism)
    if share is not None:
        return int(free_bytes * share)
    return min(4 * GIB, free_bytes // 2)


def _available_bytes() -> int:
    """Memory available without swapping, as Linux counts it; elsewhere half of the machine's."""
    with suppress(OSError), open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    with suppress(ValueError, OSError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return 4 * GIB
