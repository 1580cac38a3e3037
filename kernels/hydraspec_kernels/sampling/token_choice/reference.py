"""A token per row in plain torch: the argmax, and two exponential races (a chunk of the
vocabulary by the mass of its tokens, then a token of it).

Letters: N rows, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from hydraspec_kernels.sampling.random_streams import DrawKey, exponential_race

CHUNK = 1024  # tokens; part of what defines a draw
FIRST_CHUNK = 1 << 31  # the first chunk's number in a race: above all token ids


def greedy_tokens_reference(logits: Tensor, *, marks_not_finite: bool = False) -> Tensor:
    """See `token_choice.greedy_tokens`."""
    tokens = logits.argmax(-1)
    if not marks_not_finite:
        return tokens
    best = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return torch.where(best.isfinite(), tokens, ~tokens)


def greedy_candidates_reference(logits: Tensor, first: int, num_tokens: int) -> Tensor:
    """See `token_choice.greedy_candidates`. C is 1; a rank without tokens has the value -inf."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if num_tokens == 0:
        return wide.new_tensor([-math.inf, first]).view(2, 1, 1).repeat(1, len(logits), 1)
    columns = wide[:, :num_tokens].argmax(-1, keepdim=True)
    return torch.stack((wide.gather(1, columns), (columns + first).to(wide.dtype)))


def best_candidates_reference(candidates: Tensor, *, marks_not_finite: bool = False) -> Tensor:
    """See `token_choice.best_candidates`. NaN is the largest value, ties go to the first rank."""
    values, tokens = candidates.transpose(0, 2).flatten(2).unbind(1)  # [N, C * size] each
    best = values.argmax(-1, keepdim=True)
    token = tokens.gather(-1, best).squeeze(-1).to(torch.int64)
    if not marks_not_finite:
        return token
    return torch.where(values.gather(-1, best).squeeze(-1).isfinite(), token, ~token)


def draw_tokens_reference(weights: Tensor, key: DrawKey) -> Tensor:
    """See `token_choice.draw_tokens`. A row of one chunk has no race of chunks."""
    vocab_size = weights.shape[-1]
    ids = torch.arange(min(vocab_size, CHUNK), device=weights.device)
    if vocab_size <= CHUNK:
        return _winner(weights, exponential_race(*key, ids))
    chunks = pad(weights, (0, -vocab_size % CHUNK)).unflatten(-1, (-1, CHUNK))
    numbers = torch.arange(chunks.shape[-2], device=weights.device) + FIRST_CHUNK
    chunk = _winner(chunks.sum(-1), exponential_race(*key, numbers)).unsqueeze(-1)
    at = chunk.unsqueeze(-1).expand(*chunk.shape, CHUNK)
    tokens, ids = chunks.gather(-2, at).squeeze(-2), chunk * CHUNK + ids
    token = _winner(tokens, exponential_race(*key, ids))
    return ids.gather(-1, token.unsqueeze(-1)).squeeze(-1)


def _winner(weights: Tensor, draws: Tensor) -> Tensor:
    """Argmax of weights / draws; overwrites the draws."""
    return torch.div(weights, draws, out=draws).argmax(-1)


def sample_with_probs_reference(
    logits: Tensor, temperature: Tensor, key: DrawKey, *, any_greedy: bool
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
    return draw_tokens_reference(probs, key), probs
