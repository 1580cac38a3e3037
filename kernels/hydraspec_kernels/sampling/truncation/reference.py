"""Temperature, top_k, top_p and min_p in plain torch: by sorting rows.

Definitions and order are those of transformers' logits warpers. top_k keeps the k largest and all
ties of the k-th; top_p keeps the smallest set of largest tokens whose mass, after top_k, reaches
top_p (ties: lower ids first), at least one; min_p drops tokens less probable than min_p times the
best. top_k 0, top_p 1 and min_p 0 are off. Letters: N rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hydraspec_kernels.sampling.records import EVERYTHING, SamplingFlags, SamplingTensors


def target_probs(
    logits: Tensor, sampling: SamplingTensors, flags: SamplingFlags = EVERYTHING
) -> Tensor:
    """The distributions [N, V] that rows of logits [N, V] are sampled from, float64 for float64
    logits, else float32. Rows of temperature 0 are one-hot at the argmax (ties: the lowest id).
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scaled = _scaled(logits, sampling.temperature)
    if flags.any_top_p:
        scaled = _truncate_top_k_top_p(scaled, sampling.top_k, sampling.top_p)
    elif flags.any_top_k:
        kth = kth_largest(scaled.sort(-1, descending=True).values, sampling.top_k)
        scaled = scaled.masked_fill_(scaled < kth, -torch.inf)
    probs = scaled.softmax(-1)
    if flags.any_min_p:
        probs = probs.masked_fill_(_is_below_min_p(probs, sampling.min_p), 0.0)
        probs = probs.div_(probs.sum(-1, keepdim=True))
    if flags.any_greedy:
        greedy = (sampling.temperature <= 0).unsqueeze(-1)
        one_hot = torch.zeros_like(probs).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
        probs = torch.where(greedy, one_hot, probs)
    return probs


def truncate_reference(logits: Tensor, sampling: SamplingTensors) -> Tensor:
    """Logits [N, V] with -inf at tokens that are cut off; rows of temperature 0 stay the same."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scaled = _scaled(wide, sampling.temperature)
    scaled = _truncate_top_k_top_p(scaled, sampling.top_k, sampling.top_p)
    is_cut = (scaled == -torch.inf) | _is_below_min_p(scaled.softmax(-1), sampling.min_p)
    greedy = (sampling.temperature <= 0).unsqueeze(-1)
    return logits.masked_fill(is_cut & ~greedy, -torch.inf)


def _scaled(logits: Tensor, temperature: Tensor) -> Tensor:
    """Scaled logits (logits - peak) / temperature; temperature 0 counts as 1. The peak is taken off
    before dividing, so that weights at a tiny temperature underflow to 0 instead of being NaN.
    """
    divisor = torch.where(temperature <= 0, 1.0, temperature).unsqueeze(-1)
    return (logits - logits.amax(-1, keepdim=True)).div_(divisor)


def _is_below_min_p(probs: Tensor, min_p: Tensor) -> Tensor:
    return probs < min_p.unsqueeze(-1) * probs.amax(-1, keepdim=True)


def kth_largest(descending: Tensor, top_k: Tensor) -> Tensor:
    """The top_k-th value [N, 1] of each sorted row [N, V]; the last value where top_k is off."""
    vocab_size = descending.shape[-1]
    rank = torch.where(top_k > 0, top_k, vocab_size).clamp_(max=vocab_size) - 1
    return descending.gather(-1, rank.unsqueeze(-1))


def _truncate_top_k_top_p(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Scaled logits [N, V] with -inf at tokens that top_k and then top_p cut off."""
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    ordered = ordered.masked_fill_(ordered < kth_largest(ordered, top_k), -torch.inf)
    mass = ordered.softmax(-1)
    mass_before = mass.cumsum(-1) - mass
    limit = top_p.unsqueeze(-1)
    cut = (mass_before >= limit) & (limit < 1)
    cut[:, 0] = False
    return torch.empty_like(scaled).scatter_(-1, order, ordered.masked_fill_(cut, -torch.inf))
