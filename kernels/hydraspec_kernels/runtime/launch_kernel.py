"""Programmatic dependent launch: a kernel may start while the previous one is still running.

Every kernel here is launched with `**dependent_launch(x)`. With its constexpr PDL it calls
`start_next` first (the next kernel may be scheduled as soon as this one is resident), then does
what needs constants only (prefetching weights), then calls `wait_for_inputs`, and only then loads
inputs or stores anything. A kernel that waits ends after all earlier kernels have ended, so
waiting for the previous kernel is waiting for all of them.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from hydraspec_kernels.runtime.compilation import build_launchers_without_optimisation
from hydraspec_kernels.runtime.launch import supports_dependent_launch


@triton.jit
def start_next(PDL: tl.constexpr):
    """Lets the next kernel start."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Waits until all earlier kernels have ended and their writes can be read."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch_l2(at):
    """Brings the 128 bytes at each address into the L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [at],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch_l2_where(at, wanted):
    """Brings the 128 bytes at each wanted address into the L2."""
    tl.inline_asm_elementwise(
        "{.reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0;}",
        "=r,l,r",
        [at, wanted.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def dependent_launch(x: Tensor) -> dict[str, bool]:
    """Launch options for a kernel over `x`: its constexpr PDL, and Triton's launch attribute."""
    return launch_options(x.device)


@cache
def launch_options(device: torch.device) -> dict[str, bool]:
    """See `dependent_launch`. The first launch on a device also sets up Triton."""
    build_launchers_without_optimisation()
    if supports_dependent_launch(device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}
