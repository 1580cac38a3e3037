"""Programmatic dependent launch: a kernel may start while the one in front of it still runs.

Every kernel of ours is launched with `**dependent_launch(x)` and does the following with its
constexpr PDL: `start_next` first of all (the kernel behind may be brought up as soon as this one
is resident), then what needs constants only (prefetching weights), then `wait_for_inputs`, and
only behind that any load of an input and any store. A kernel that waits ends after all kernels in
front of it have ended, so waiting for one's neighbour is waiting for everybody.
"""

from __future__ import annotations

from inspect import signature

import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.runtime import build

from hydraspec_kernels.launch import supports_dependent_launch


def build_unoptimised(
    name: str,
    src: str,
    srcdir: str,
    library_dirs: list[str],
    include_dirs: list[str],
    libraries: list[str],
    /,
) -> str:
    """Triton's own build of a kernel's host-side launcher, but with -O0.

    Every signature gets a launcher, and a cold start some forty: optimising them takes the compiler
    four times as long, and a launcher only unpacks its arguments.
    """
    knobs.build.impl = None
    try:
        return build._build(name, src, srcdir, library_dirs, include_dirs, libraries, ["-O0"])
    finally:
        knobs.build.impl = build_unoptimised


# Somebody may have chosen another build; and Tritons that build other languages, too, compile no
# launchers.
if knobs.build.impl is None and "language" not in signature(build._build).parameters:
    knobs.build.impl = build_unoptimised


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
