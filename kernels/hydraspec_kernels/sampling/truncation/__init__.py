"""The distributions that rows sample from: temperature, then top_k, top_p and min_p.

The reference sorts rows; the kernels cut the rows of a step in place, without sorting them.
"""

from __future__ import annotations

from torch import Tensor

from hydraspec_kernels.sampling.records import SlotSampling, VerifiedBatch
from hydraspec_kernels.sampling.truncation.reference import (
    kth_largest,
    target_probs,
    truncate_reference,
)

__all__ = ["kth_largest", "target_probs", "truncate_", "truncate_reference"]


def truncate_(logits: Tensor, batch: VerifiedBatch, state: SlotSampling) -> None:
    """Writes -inf over tokens that are cut off in the rows of logits [N, V] that requests need: the
    first num_drafts + 1 of each request that samples. Rows of temperature 0 stay as they are.

    It needs a device that runs kernels. Masses are summed in another order than the reference's:
    where the mass of a set of tokens is top_p up to rounding (of float32, 1e-5 of the whole at
    most), the kernels may keep one token more or fewer.
    """
    # Triton is imported only where kernels run.
    from hydraspec_kernels.sampling.truncation.launches import truncate_launches

    truncate_launches(logits, batch, state)
