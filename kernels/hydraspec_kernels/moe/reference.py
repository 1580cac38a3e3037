"""Routers, and a mixture of gated experts (Shazeer et al. 2017), token by token.

Letters: T tokens, E experts, k experts of a token, D hidden, I inner width of an expert.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hydraspec_kernels.activation import Activation, gated_activation
from hydraspec_kernels.quantised.records import QuantisedMatrix
from hydraspec_kernels.quantised.reference import quantised_linear_reference


def route_reference(logits: Tensor, k: int, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Router logits [T, E] -> weights [T, k] float32 and experts [T, k].

    The softmax over all experts is in float32; its k largest are made to sum to 1, then multiplied
    by scale [E].
    """
    p = torch.softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))
    w, e = torch.topk(p, k, dim=-1)
    return w / w.sum(-1, keepdim=True) * scale[e], e


def route_grouped_reference(
    logits: Tensor, bias: Tensor, k: int, num_groups: int, kept_groups: int
) -> tuple[Tensor, Tensor]:
    """DeepSeek-V3's routing (arXiv 2412.19437, sections 2.1.2 and 2.1.3): logits [T, E], bias [E]
    -> scores and experts [T, k].

    A group's score is the sum of its two best biased scores; experts outside the kept groups cannot
    be chosen. The bias chooses only: the weights are the plain sigmoid scores.
    """
    scores = logits.sigmoid()
    biased = scores + bias.to(scores.dtype)
    if kept_groups < num_groups:
        groups = biased.unflatten(1, (num_groups, -1))
        best = groups.topk(2, dim=-1).values.sum(-1).topk(kept_groups, dim=-1).indices
        lost = torch.ones_like(groups[..., 0]).scatter_(1, best, 0.0) > 0
        biased = groups.masked_fill(lost[..., None], -torch.inf).flatten(1)
    e = biased.topk(k, dim=-1).indices
    return scores.gather(1, e), e


def moe_reference(x: Tensor, w: Tensor, e: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Sum over k of w_k down_k(act(gate_up_k(x))), [T, D], for x [T, D], w and e [T, k], gate_up
    [E, D, 2I], down [E, I, D].
    """
    rows = []
    for x_t, w_t, e_t in zip(x, w.to(x.dtype), e.tolist(), strict=True):
        parts = [gated_activation(x_t @ gate_up[i]) @ down[i] for i in e_t]
        rows.append(w_t @ torch.stack(parts))
    return torch.stack(rows)


def quantised_moe_reference(
    x: Tensor,
    w: Tensor,
    e: Tensor,
    experts: tuple[QuantisedMatrix, QuantisedMatrix, QuantisedMatrix],
    activation: Activation,
) -> Tensor:
    """As `moe_reference`, [T, D], for quantised gate and up [E, I, D] and down [E, D, I], each of
    which rounds its rows as its checkpoint says.
    """
    rows = []
    for x_t, w_t, e_t in zip(x, w.to(x.dtype), e.tolist(), strict=True):
        parts = []
        for i in e_t:
            gate, up, down = (matrix.of_experts(slice(i, i + 1)) for matrix in experts)
            halves = [quantised_linear_reference(x_t[None, None], half) for half in (gate, up)]
            inner = gated_activation(torch.cat(halves, -1).flatten(0, 1), activation)
            parts.append(quantised_linear_reference(inner[None], down).flatten())
        rows.append(w_t @ torch.stack(parts))
    return torch.stack(rows)
