"""Counters in which programs that share a result say that theirs is there."""

from __future__ import annotations

import torch
from torch import Tensor

# Results that are shared are fewer than the programs that fill a device.
COUNTERS = 1024

_counters: dict[torch.device, Tensor] = {}


def zero_counters(device: torch.device) -> Tensor:
    """[COUNTERS] int32 zeros, the same tensor every time.

    Kernels of one device follow one another, and each leaves the counters as it found them. They
    must outlive any graph's memory, so the first call is no part of a capture.
    """
    counters = _counters.get(device)
    if counters is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("attention must run once before its first capture")
        counters = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
        _counters[device] = counters
    return counters
