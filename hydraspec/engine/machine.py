"""Settings that an engine makes before it decodes: device, CPU threads, longest sequence."""

from __future__ import annotations

import os

import torch

from hydraspec.config.engines import NATIVE
from hydraspec.config.messages import refusal
from hydraspec.config.schema import ParallelismConfig, RunConfig
from hydraspec.config.workloads import check_random_room
from hydraspec.models.registry import check_length

GIB = 1 << 30
# Below this width a CPU step is bound by dispatch, and a second thread only adds hand-over time.
SINGLE_THREAD_WIDTH = 512


def pick_device(config: RunConfig) -> torch.device:
    """The device of engine.device.

    Raises ConfigurationError if this machine has no such device, fewer devices than the ranks it
    runs, or a device with less memory than engine.kv_cache.memory_gib.
    """
    wanted = config.engine.device.value
    if wanted == "cuda" and not torch.cuda.is_available():
        raise refusal(
            "engine.device",
            wanted,
            "cannot be used: torch sees no CUDA device",
            allowed="auto, cpu",
            remedy="add engine.device=cpu, or run where there is one",
        )
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and config.engine.name == NATIVE:
        _check_count(config.parallelism)
    device = torch.device(wanted)
    _check_memory(config.engine.kv_cache.memory_gib, device)
    return device


def num_ranks_here(parallelism: ParallelismConfig) -> int:
    """Ranks of this run on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", parallelism.num_ranks))


def _check_count(parallelism: ParallelismConfig) -> None:
    """Refuse more ranks on this host than it has devices."""
    needed = num_ranks_here(parallelism)
    found = torch.cuda.device_count()
    if needed <= found:
        return
    raise refusal(
        *parallelism.largest_axis,
        f"needs {needed} CUDA devices, one a rank, and this machine has {found}",
        allowed=f"{found} ranks or fewer: parallelism.tensor x parallelism.pipeline x "
        "parallelism.data" + ("; parallelism=single is one" if found == 1 else ""),
        remedy="choose fewer, or add engine.device=cpu",
    )


def _check_memory(memory_gib: float | None, device: torch.device) -> None:
    """Refuse a cache larger than the whole memory; free memory is known only after loading."""
    if memory_gib is None:
        return
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
    else:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if memory_gib * GIB > total:
        raise refusal(
            "engine.kv_cache.memory_gib",
            memory_gib,
            f"is beyond the memory of this machine's {device.type}",
            allowed=f"above 0 and below {total / GIB:.1f}, or null",
            remedy="lower it, or leave the key out",
        )


def set_num_threads(num_threads: int | None, hidden_size: int) -> None:
    """Set torch's CPU threads; None: one for a target narrower than SINGLE_THREAD_WIDTH, else
    torch's default."""
    if num_threads is None and hidden_size < SINGLE_THREAD_WIDTH:
        num_threads = 1
    if num_threads is not None:
        torch.set_num_threads(num_threads)


def model_length(config: RunConfig, limit: int) -> int:
    """Longest sequence in tokens: target.max_model_len, or the checkpoint's `limit`.

    Raises ConfigurationError if it is beyond `limit`, or too short for workload=random.
    """
    check_length(config.target.max_model_len, limit)
    length = config.target.max_model_len or limit
    check_random_room(config, length)
    return length
