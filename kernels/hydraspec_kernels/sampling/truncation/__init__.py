"""top_k, top_p and min_p without sorting a vocabulary and without tensors of probabilities.

The reference cuts rows on their own; the kernels cut, in place, the rows that a step verifies.
"""

from __future__ import annotations

from torch import Tensor

from hydraspec_kernels.sampling.truncation.reference import (
    kth_largest,
    truncate_reference,
    truncate_top_k_top_p,
)

__all__ = ["kth_largest", "truncate_", "truncate_reference", "truncate_top_k_top_p"]


def truncate_(
    logits: Tensor,  # [N, V]
    verify_rows: Tensor,  # [B, K+1] rows of N
    num_drafts: Tensor,  # [B]
    samples: Tensor,  # [B] bool
    slots: Tensor,  # [B]
    temperature: Tensor,  # [S]
    top_k: Tensor,  # [S]
    top_p: Tensor,  # [S]
    min_p: Tensor,  # [S]
) -> None:
    """Write -inf over what is cut off of the rows that requests need: a sampling request's first
    num_drafts + 1. Other rows stay as they are, and so do those of temperature 0.

    Only where kernels run. Masses are summed in another order than the reference's: where the mass
    of a set of tokens is top_p up to rounding (of float32, 1e-5 of the whole at most), the kernels
    may keep one token more or fewer.
    """
    # Triton is imported where kernels run only.
    from hydraspec_kernels.sampling.truncation.launches import truncate_launches

    truncate_launches(
        logits, verify_rows, num_drafts, samples, slots, temperature, top_k, top_p, min_p
    )
