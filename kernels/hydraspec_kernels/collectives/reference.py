"""Results of collectives, from every rank's argument at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hydraspec_kernels.norms.reference import AddNorm, add_norm_reference


def all_reduce_reference(ranks: Sequence[Tensor]) -> Tensor:
    """The sum, in float32 or wider, in the order of ranks, rounded once to the ranks' dtype."""
    wide = torch.promote_types(ranks[0].dtype, torch.float32)
    total = ranks[0].to(wide)
    for x in ranks[1:]:
        total = total + x.to(wide)
    return total.to(ranks[0].dtype)


def add_norm_over_ranks_reference(
    h: Tensor,
    ranks: Sequence[Tensor],
    *,
    post_weight: Tensor | None,
    next_weight: Tensor | None,
    eps: float,
    scale: float | None = None,
    has_post_norm: bool = True,
) -> AddNorm:
    """See `hydraspec_kernels.collectives.add_norm_over_ranks`; ranks: each rank's x."""
    sent = [(x.sum(0) if x.dim() == 3 else x).to(h.dtype) for x in ranks]
    return add_norm_reference(
        h,
        all_reduce_reference(sent),
        post_weight=post_weight,
        next_weight=next_weight,
        eps=eps,
        scale=scale,
        has_post_norm=has_post_norm,
    )
