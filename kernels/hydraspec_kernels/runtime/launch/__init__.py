"""How our kernels are launched: whether a tensor's kernels can run here, compiling them ahead of
their first launch, and dependent launches."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from hydraspec_kernels.runtime.launch.ahead import can_compile_ahead, compiled_ahead

__all__ = [
    "can_compile_ahead",
    "compiled_ahead",
    "num_compiled",
    "runs_kernels",
    "supports_dependent_launch",
]


def runs_kernels(x: Tensor) -> bool:
    """Whether `x` is on a device that runs the Triton kernels; elsewhere the reference runs."""
    return x.is_cuda


def num_compiled(device: torch.device) -> int:
    """Kernels that this process has compiled, or read from Triton's cache on the disk, since the
    first call."""
    if device.type != "cuda":
        return 0
    from hydraspec_kernels.runtime.launch.kernel import count_compiled  # Triton

    return count_compiled()


@cache
def supports_dependent_launch(device: torch.device) -> bool:
    """Whether a kernel may start before the one in front of it has ended (sm_90 and later)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
