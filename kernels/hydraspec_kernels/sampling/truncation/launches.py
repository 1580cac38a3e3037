"""The launches of `kernel.py` in their order, and the tensors between them."""

from __future__ import annotations

import torch
from torch import Tensor

from hydraspec_kernels.runtime.launch import check_contiguous
from hydraspec_kernels.runtime.launch_kernel import dependent_launch
from hydraspec_kernels.sampling.records import SlotSampling, VerifiedBatch
from hydraspec_kernels.sampling.truncation.kernel import cut_rows, find_cuts, group_statistics

GROUP = 64  # tokens of a group
GROUPS = 64  # groups that one program reads or writes
BLOCK = 512  # tokens that a program holds at once while it searches a list of tokens
WIDE = 8192  # tokens that a program holds at once while it searches a list of groups
MAX_LISTED = 8192  # candidates of a row that are listed one by one; if more, groups are searched
# Low bits of a float32 that are 0 in every number of the type.
UNUSED_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}


def truncate_launches(logits: Tensor, batch: VerifiedBatch, state: SlotSampling) -> None:
    """See `truncation.truncate_`."""
    verify_rows = batch.verify_rows
    about = (
        verify_rows, batch.num_drafts, batch.samples.view(torch.int8), batch.slots,
        state.temperature, state.top_k, state.top_p, state.min_p,
    )  # fmt: skip
    check_contiguous(*about)
    assert logits.stride(1) == 1, logits.stride()
    (b, width), vocab_size = verify_rows.shape, logits.shape[1]
    groups = -(-vocab_size // GROUP)

    def ints(size: int) -> Tensor:
        return torch.empty(b, width, size, dtype=torch.int32, device=logits.device)

    least, greatest, last = ints(1), ints(1), ints(1)
    keys, listed = ints(groups), ints(groups + MAX_LISTED)
    masses = torch.empty(b, width, groups, dtype=torch.float32, device=logits.device)
    sizes = (logits.stride(0), vocab_size, groups)
    launch = {"SHIFT": UNUSED_BITS[logits.dtype], **dependent_launch(logits)}
    grid = (-(-groups // GROUPS), b * width)
    group_statistics[grid](
        keys, masses, logits, *about, *sizes,
        K=width - 1, GROUPS=GROUPS, GROUP=GROUP, num_warps=8, **launch,
    )  # fmt: skip
    # A sum of products over a few groups adds each thread's product to another thread's. A fused
    # multiply-add rounds only the other's product, so threads would hold sums that differ by a bit
    # and diverge in the searches.
    find_cuts[(b * width,)](
        least, greatest, last, listed, keys, masses, logits, *about, *sizes,
        K=width - 1, LISTED=MAX_LISTED, GROUP=GROUP,
        ALL_GROUPS=1 << (groups - 1).bit_length(), BLOCK=BLOCK, WIDE=WIDE, num_warps=8,
        enable_fp_fusion=False, **launch,
    )  # fmt: skip
    cut_rows[grid](
        logits, least, greatest, last, keys, verify_rows, *sizes,
        GROUPS=GROUPS, GROUP=GROUP, num_warps=4, **launch,
    )  # fmt: skip
