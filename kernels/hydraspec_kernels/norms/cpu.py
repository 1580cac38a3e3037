"""RMSNorm without its constant factors: three small operators where the full norm takes six."""

from __future__ import annotations

import torch
from torch import Tensor

_vector_norm = torch.linalg.vector_norm


def unit_norm(x: Tensor, floor: Tensor) -> Tensor:
    """x [..., H] / hypot(|x|, floor). With floor = sqrt(H eps) this is RMSNorm / sqrt(H).

    The caller folds sqrt(H) and the norm's weight into the next matrix. floor is a 0-d tensor of
    x's dtype.
    """
    return x / _vector_norm(x, 2, -1, True).hypot_(floor)


def unit_norm_(x: Tensor, floor: Tensor) -> Tensor:
    """`unit_norm` in place, for a view of a projection that has no other reader."""
    return x.div_(_vector_norm(x, 2, -1, True).hypot_(floor))
