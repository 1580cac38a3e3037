"""Properties of a device that the kernels rely on. Triton is not imported, as it may be missing
where no kernel can run."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

# Streaming multiprocessors of an H100 or H200. A constant even on other devices, so that work is
# divided, and sums are ordered, alike everywhere.
NUM_SMS = 132
HOPPER_SHARED_BYTES = 227 << 10


def runs_kernels(x: Tensor) -> bool:
    """Returns whether `x` is on a device that runs the Triton kernels; elsewhere the reference
    runs."""
    return x.is_cuda


def check_contiguous(*tensors: Tensor) -> None:
    """Asserts that tensors are contiguous, for kernels that index a whole tensor by one stride."""
    for tensor in tensors:
        assert tensor.is_contiguous(), tensor.stride()


@cache
def supports_dependent_launch(device: torch.device) -> bool:
    """Returns whether a kernel may start before the previous one has ended (sm_90 and later)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def is_hopper(device: torch.device) -> bool:
    """Returns whether the device is a Hopper GPU; later ones lack the wgmma of Gluon kernels."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@cache
def shared_bytes(device: torch.device) -> int:
    """Bytes of shared memory that one program may have; off a GPU those of an H100."""
    if device.type != "cuda":
        return HOPPER_SHARED_BYTES
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", HOPPER_SHARED_BYTES))
