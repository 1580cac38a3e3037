"""RMSNorm (Zhang and Sennrich 2019, equation 4), with the weight used as it is: w, not 1 + w."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm_reference(x: Tensor, w: Tensor | None, eps: float) -> Tensor:
    """x [..., H] divided by sqrt(mean(x^2) + eps), times w [H]; computed in float32 or wider."""
    a = x.to(torch.promote_types(x.dtype, torch.float32))
    y = a * torch.pow(a.pow(2).mean(-1, keepdim=True) + eps, -0.5)
    return (y if w is None else y * w.to(y.dtype)).to(x.dtype)
