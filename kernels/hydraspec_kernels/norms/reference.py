"""RMSNorm (Zhang and Sennrich 2019, equation 4), with the weight used as it is: w, not 1 + w; and
the residual sum between two blocks of a decoder layer with the norms around it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hydraspec_kernels.norms.records import AddNorm


def rms_norm_reference(x: Tensor, w: Tensor | None, eps: float) -> Tensor:
    """RMSNorm x [..., H] / sqrt(mean(x^2) + eps) times w [H]; computed in float32 or wider."""
    a = x.to(torch.promote_types(x.dtype, torch.float32))
    y = a * torch.pow(a.pow(2).mean(-1, keepdim=True) + eps, -0.5)
    return (y if w is None else y * w.to(y.dtype)).to(x.dtype)


def add_norm_reference(
    h: Tensor,
    x: Tensor,
    *,
    post_weight: Tensor | None,
    next_weight: Tensor | None,
    eps: float,
    scale: float | None = None,
    has_post_norm: bool = True,
) -> AddNorm:
    """See `hydraspec_kernels.norms.add_norm`. Every step rounds to h's dtype."""
    if x.dim() == 3:
        x = (x[0] if x.shape[0] == 1 else x.sum(0)).to(h.dtype)
    h.add_(rms_norm_reference(x, post_weight, eps) if has_post_norm else x)
    if scale is not None:
        h.mul_(scale)
    return AddNorm(h, None if next_weight is None else rms_norm_reference(h, next_weight, eps))
