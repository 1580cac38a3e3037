"""Time and memory that parts of an engine take to load, and one message where a device has too
little."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from hydraspec.config.messages import refusal
from hydraspec.config.schema import RunConfig
from hydraspec.engine.machine import GIB
from hydraspec.engine.splits import empty_target
from hydraspec.models.parts import Weights, held
from hydraspec.models.stages import Stage
from hydraspec.parallel.group import TensorGroup

log = logging.getLogger(__name__)

REMEDY = (
    "raise parallelism.tensor or parallelism.pipeline, give a release in a narrower format, or "
    "free memory of the device"
)


@contextmanager
def timed(part: str, device: torch.device) -> Iterator[None]:
    """Logs how long a part of loading takes on CUDA, and the memory that it adds and needs."""
    start, on_cuda = time.perf_counter(), device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if on_cuda else 0
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    yield
    if on_cuda:
        torch.cuda.synchronize(device)
        seconds = time.perf_counter() - start
        added = torch.cuda.memory_allocated(device) - before
        most = torch.cuda.max_memory_allocated(device) - before
        sizes = (size / (1 << 30) for size in (added, most))
        log.info("%s: %.1f s, %.2f GiB, at most %.2f GiB on the way", part, seconds, *sizes)


@contextmanager
def room_for(
    part: str,
    key: str,
    value: object,
    device: torch.device,
    num_bytes: Callable[[], int | None] | None,
) -> Iterator[None]:
    """Context that loads `part`, which `key` names. Raises ConfigurationError if the device runs
    out of memory; `num_bytes` then counts the bytes of the part's weights."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    try:
        yield
    except torch.OutOfMemoryError:
        needed = None if num_bytes is None else num_bytes()
    else:
        return
    takes = "more" if needed is None else f"{needed / GIB:.1f} GiB on each rank"
    raise refusal(
        key,
        value,
        f"has no room on {device}, where {free / GIB:.1f} GiB were free: {part} take {takes}, and "
        "a layer's more while they are filled",
        allowed="weights that fit beside the KV cache and the steps",
        remedy=REMEDY,
    )


def target_bytes(config: RunConfig, group: TensorGroup, stage: Stage) -> int | None:
    """Bytes of the target's weights on this rank; None for a target of a plugin."""
    target = empty_target(config, group, stage)
    if target is None:
        return None
    assert isinstance(target, Weights)
    return sum(held(weight).nbytes for weight in target.tensors().values())
