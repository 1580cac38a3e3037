"""A mixture of gated experts (Shazeer et al. 2017), token by token."""

from __future__ import annotations

import torch
from torch import Tensor

from hydraspec_kernels.activation import gated_activation


def moe_reference(x: Tensor, w: Tensor, e: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """x [T, D], w and e [T, k], gate_up [E, D, 2I], down [E, I, D] -> sum_k w_k
    down_k(act(gate_up_k(x))), [T, D].
    """
    rows = []
    for x_t, w_t, e_t in zip(x, w.to(x.dtype), e.tolist(), strict=True):
        parts = [gated_activation(x_t @ gate_up[i]) @ down[i] for i in e_t]
        rows.append(w_t @ torch.stack(parts))
    return torch.stack(rows)
