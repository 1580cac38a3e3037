"""What top_k, top_p and min_p cut off, in plain torch: by sorting rows.

Letters: N rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def truncate_reference(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Logits [N, V] with -inf at what is cut off; the parameters are [N].

    top_k keeps the k largest and all ties of the k-th; top_p keeps the smallest set of the largest
    of those whose mass reaches top_p of theirs (ties: lower ids first), at least one; min_p drops
    what is less probable than min_p times the best. 0, 1 and 0 turn them off, and rows of
    temperature 0 stay as they are.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    greedy = (temperature <= 0).unsqueeze(-1)
    # Centred before dividing: a tiny temperature then underflows to 0 instead of giving NaN.
    centred = wide - wide.amax(-1, keepdim=True)
    scaled = centred.div_(torch.where(greedy, 1.0, temperature.unsqueeze(-1)))
    scaled = truncate_top_k_top_p(scaled, top_k, top_p)
    probs = scaled.softmax(-1)
    is_cut = (scaled == -torch.inf) | (probs < min_p.unsqueeze(-1) * probs.amax(-1, keepdim=True))
    return logits.masked_fill(is_cut & ~greedy, -torch.inf)


def kth_largest(descending: Tensor, top_k: Tensor) -> Tensor:
    """[N, 1], the top_k-th value of each sorted row [N, V]; the last one where top_k is off."""
    vocab_size = descending.shape[-1]
    rank = torch.where(top_k > 0, top_k, vocab_size).clamp_(max=vocab_size) - 1
    return descending.gather(-1, rank.unsqueeze(-1))


def truncate_top_k_top_p(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Scaled logits [N, V] with -inf at what top_k and then top_p cut off."""
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    ordered = ordered.masked_fill_(ordered < kth_largest(ordered, top_k), -torch.inf)
    mass = ordered.softmax(-1)
    mass_before = mass.cumsum(-1) - mass
    limit = top_p.unsqueeze(-1)
    cut = (mass_before >= limit) & (limit < 1)
    cut[:, 0] = False
    return torch.empty_like(scaled).scatter_(-1, order, ordered.masked_fill_(cut, -torch.inf))
