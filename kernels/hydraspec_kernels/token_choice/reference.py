"""One token per row in plain torch: the argmax, and the exponential race.

Letters: N rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hydraspec_kernels.random_streams import Purpose, exponential_race


def greedy_tokens_reference(logits: Tensor) -> Tensor:
    """See `token_choice.greedy_tokens`."""
    return logits.argmax(-1)


def draw_tokens_reference(
    weights: Tensor,
    seed: Tensor,
    position: Tensor,
    purpose: Purpose | Tensor,
    index: int | Tensor,
) -> Tensor:
    """See `token_choice.draw_tokens`: argmax_v w_v / E_v with standard exponential E."""
    race = exponential_race(seed, position, purpose, index, weights.shape[-1])
    return torch.div(weights, race, out=race).argmax(-1)


def sample_with_probs_reference(
    logits: Tensor,
    temperature: Tensor,
    seed: Tensor,
    position: Tensor,
    purpose: Purpose | Tensor,
    index: int | Tensor,
    *,
    any_greedy: bool,
) -> tuple[Tensor, Tensor]:
    """See `token_choice.sample_with_probs`."""
    greedy = temperature <= 0
    logits = logits.to(torch.float32)
    peak = logits.amax(-1, keepdim=True)
    divisor = torch.where(greedy, 1.0, temperature).unsqueeze(-1)
    probs = (logits - peak).div_(divisor).softmax(-1)
    if any_greedy:
        best = logits.argmax(-1, keepdim=True)
        one_hot = torch.zeros_like(probs).scatter_(-1, best, 1.0)
        probs = torch.where(greedy.unsqueeze(-1), one_hot, probs)
    return draw_tokens_reference(probs, seed, position, purpose, index), probs
