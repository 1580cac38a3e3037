"""Which experts a token goes to, and with what weight."""

from __future__ import annotations

import torch
from torch import Tensor


def route_reference(logits: Tensor, k: int, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Router logits [T, E] -> weights [T, k] float32 and experts [T, k].

    Softmax over all experts in float32, the k largest made to sum to 1, then times scale [E] (so
    that they no longer need to).
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
