"""Experts on a CPU, without shapes that depend on routing: the chosen ones are gathered if few are
used, else all of them run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hydraspec_kernels.activation import Activation, gated_activation

# Numbers held at once by the all-experts path (gate and up of a chunk of experts for every row).
MAX_CHUNK_NUMBERS = 1 << 24


def moe_gather(
    x: Tensor,
    w: Tensor,
    e: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: Activation = "gelu_tanh",
) -> Tensor:
    """See `moe.moe`. It copies the k experts of every row: fast while T * k is well below E."""
    rows, k = e.shape
    chosen = e.reshape(-1)
    each = x[:, None].expand(rows, k, x.shape[1]).reshape(rows * k, 1, x.shape[1])
    inner = gated_activation(torch.bmm(each, gate_up.index_select(0, chosen)), activation)
    out = torch.bmm(inner, down.index_select(0, chosen)).view(rows, k, x.shape[1])
    return torch.bmm(w.to(x.dtype)[:, None], out).squeeze(1)


def moe_dense(
    x: Tensor,
    w: Tensor,
    e: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: Activation = "gelu_tanh",
) -> Tensor:
    """Weighted sum of all experts, x [T, D], w and e [T, k], gate_up [E, D, 2I], down [E, I, D] ->
    [T, D]. Every expert runs on every row, in chunks of experts; weights of unchosen ones are 0.
    """
    rows, experts = x.shape[0], gate_up.shape[0]
    share = w.new_zeros(rows, experts).scatter_(1, e, w).to(x.dtype).t()[:, :, None]  # [E, T, 1]
    step = max(1, MAX_CHUNK_NUMBERS // (rows * gate_up.shape[2]))
    total: Tensor | None = None
    for start in range(0, experts, step):
        part = slice(start, start + step)
        size = min(step, experts - start)
        inner = gated_activation(torch.bmm(x.expand(size, *x.shape), gate_up[part]), activation)
        out = torch.bmm(inner.mul_(share[part]), down[part]).sum(0)
        total = out if total is None else total.add_(out)
    assert total is not None
    return total
