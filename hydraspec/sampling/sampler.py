"""From logits to probabilities to token ids: temperature, truncation, drawing. No verification."""

from __future__ import annotations

import torch
from hydraspec_kernels.sampling.token_choice import draw_tokens, sample_with_probs
from hydraspec_kernels.sampling.truncation import kth_largest, truncate_top_k_top_p
from torch import Tensor

from hydraspec.sampling.streams import Purpose
from hydraspec.types import SamplingFlags

EVERYTHING = SamplingFlags()


def process_logits(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    flags: SamplingFlags = EVERYTHING,
) -> Tensor:
    """What a row samples from: temperature, then top_k, top_p and min_p, each renormalised.

    Shapes: logits [N, V]; the parameters [N]; the result [N, V], float64 for float64 logits, else
    float32. Definitions and order are those of transformers' logits warpers: top_k keeps the k
    largest and all ties of the k-th; top_p keeps the smallest set of largest tokens whose mass
    reaches top_p (ties: lower ids first), at least one; min_p drops tokens less probable than min_p
    times the best. 0, 1 and 0 turn them off. Rows with temperature 0 are one-hot at the argmax
    (ties: the lowest id).
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    greedy = temperature <= 0
    peak = logits.amax(-1, keepdim=True)
    # Centred before dividing: a tiny temperature then underflows to 0 instead of giving NaN.
    scaled = (logits - peak).div_(torch.where(greedy, 1.0, temperature).unsqueeze(-1))
    if flags.any_top_p:
        scaled = truncate_top_k_top_p(scaled, top_k, top_p)
    elif flags.any_top_k:
        kth = kth_largest(scaled.sort(-1, descending=True).values, top_k)
        scaled = scaled.masked_fill_(scaled < kth, -torch.inf)
    probs = scaled.softmax(-1)
    if flags.any_min_p:
        floor = min_p.unsqueeze(-1) * probs.amax(-1, keepdim=True)
        probs = probs.masked_fill_(probs < floor, 0.0)
        probs = probs.div_(probs.sum(-1, keepdim=True))
    if flags.any_greedy:
        probs = torch.where(greedy.unsqueeze(-1), _one_hot_argmax(logits, probs), probs)
    return probs


def _one_hot_argmax(logits: Tensor, like: Tensor) -> Tensor:
    """[N, V] of ones at the argmax of each row, in the dtype of `like`."""
    return torch.zeros_like(like).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)


def sample(
    weights: Tensor,
    seed: Tensor,
    position: Tensor,
    purpose: Purpose | Tensor,
    index: int | Tensor,
) -> Tensor:
    """Token ids [...] int64 drawn from weights [..., V] (non-negative, need not sum to 1).

    seed, position, purpose and index, each [...] or scalar, key the draw (see
    `streams.stream_key`). Tokens of weight 0 are never drawn unless all are 0.
    """
    return draw_tokens(weights, seed, position, purpose, index)


def sample_draft(
    logits: Tensor,
    temperature: Tensor,
    seed: Tensor,
    position: Tensor,
    index: int | Tensor,
    flags: SamplingFlags = EVERYTHING,
) -> tuple[Tensor, Tensor]:
    """Draw one draft per row: ids [B] int64 and what they were drawn from, [B, V] float32.

    Shapes: logits [B, V]; temperature, seed, position [B]; index, the draft's place in its step
    from 0. Temperature only: a truncated draft could not propose what the target may accept. Rows
    with temperature 0 take the argmax and have one-hot distributions.
    """
    return sample_with_probs(
        logits, temperature, seed, position, Purpose.DRAFT, index, any_greedy=flags.any_greedy
    )
