"""Words between pinned host memory and a device's own, by a kernel.

Between two graphs a kernel starts some microseconds sooner than a copy engine does, and one that
reads host memory may do so while the kernel before it still runs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hydraspec_kernels.runtime.launch import check_contiguous
from hydraspec_kernels.runtime.launch_kernel import (
    dependent_launch,
    start_next,
    wait_for_inputs,
)

BLOCK = 512  # words of a program


# Without knowing alignment a thread has one word at a time, so that a warp's are one transfer; and
# there is one kernel, wherever a step's second part begins.
@triton.jit(
    do_not_specialize=["count", "width", "stride"],
    do_not_specialize_on_alignment=["to_ptr", "from_ptr"],
)
def _copy_host_words(
    to_ptr,  # [count]
    from_ptr,  # rows of `width` words, `stride` apart
    count,
    width,
    stride,
    FROM_HOST: tl.constexpr,  # which wrote them before the launch
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    source = from_ptr + at // width * stride + at % width
    if FROM_HOST:
        words = tl.load(source, mask=inside, other=0, volatile=True)  # and not from a cache
    wait_for_inputs(PDL)
    if not FROM_HOST:
        words = tl.load(source, mask=inside, other=0)
    tl.store(to_ptr + at, words, mask=inside)


def copy_words_kernel(to: Tensor, words: Tensor, *, from_host: bool) -> None:
    """See `step_inputs.copy_words`."""
    check_contiguous(to)
    assert words.dim() <= 2, tuple(words.shape)
    assert words.stride(-1) == 1, words.stride()
    assert to.shape == words.shape, f"{tuple(words.shape)} to {tuple(to.shape)}"
    assert to.dtype is words.dtype, f"{words.dtype} to {to.dtype}"
    count = words.numel()
    if count:
        _copy_host_words[(triton.cdiv(count, BLOCK),)](
            to,
            words,
            count,
            words.shape[-1],
            words.stride(0) if words.dim() == 2 else 0,
            FROM_HOST=from_host,
            BLOCK=BLOCK,
            **dependent_launch(to if to.is_cuda else words),
        )
