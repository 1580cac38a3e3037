"""Programmatic dependent launch: a kernel may start while the one in front of it still runs.

Every kernel of ours is launched with `**dependent_launch(x)` and does the following with its
constexpr PDL: `start_next` first of all (the kernel behind may be brought up as soon as this one
is resident), then what needs constants only (prefetching weights), then `wait_for_inputs`, and
only behind that any load of an input and any store. A kernel that waits ends after all kernels in
front of it have ended, so waiting for one's neighbour is waiting for everybody.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hydraspec_kernels.launch import supports_dependent_launch


@triton.jit
def start_next(PDL: tl.constexpr):
    """Let the kernel behind this one start."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Return once all kernels in front have ended and their writes can be read."""
    if PDL:
        tl.extra.cuda.gdc_wait()


def check_contiguous(*tensors: Tensor) -> None:
    """For kernels that index a whole tensor by one stride."""
    for tensor in tensors:
        assert tensor.is_contiguous(), tensor.stride()


def dependent_launch(x: Tensor) -> dict[str, bool]:
    """Launch options for a kernel over `x`: its constexpr PDL, and Triton's launch attribute."""
    if supports_dependent_launch(x.device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}
