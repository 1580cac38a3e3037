"""Counters by which programs that share a result find out which of them ends last."""

from __future__ import annotations

import torch
from torch import Tensor

# At least the number of shared results: fewer than the programs that fill a device.
COUNTERS = 1024

_counters: dict[torch.device, Tensor] = {}


def zero_counters(device: torch.device) -> Tensor:
    """Counters [COUNTERS] int32, all zero; the same tensor every time.

    The kernels of a device run one after another, and each leaves the counters zero. They must
    outlive any graph's memory, so the first call must not be captured.
    """
    counters = _counters.get(device)
    if counters is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("attention must run once before its first capture")
        counters = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
        _counters[device] = counters
    return counters
