"""A token per row: the argmax, or a draw by an exponential race (see `random_streams`)."""

from __future__ import annotations

import torch
from torch import Tensor

from hydraspec_kernels.runtime.launch import runs_kernels
from hydraspec_kernels.sampling.random_streams import DrawKey
from hydraspec_kernels.sampling.token_choice.reference import (
    best_candidates_reference,
    draw_tokens_reference,
    greedy_candidates_reference,
    greedy_tokens_reference,
    sample_with_probs_reference,
)

__all__ = [
    "best_candidates",
    "draw_tokens",
    "greedy_candidates",
    "greedy_tokens",
    "sample_with_probs",
]


def greedy_tokens(logits: Tensor, *, marks_not_finite: bool = False) -> Tensor:
    """The argmax of each row, [N] int64: logits [N, V]. Ties go to the lowest id, and NaN counts
    as the largest.

    With `marks_not_finite`, a row whose maximum is NaN or infinite gives ~token, which is negative.
    """
    if runs_kernels(logits) and logits.dtype is not torch.float64:
        # Triton is imported only where kernels run.
        from hydraspec_kernels.sampling.token_choice.kernel import greedy_tokens_kernel

        return greedy_tokens_kernel(logits, marks_not_finite=marks_not_finite)
    return greedy_tokens_reference(logits, marks_not_finite=marks_not_finite)


def greedy_candidates(logits: Tensor, first: int, num_tokens: int) -> Tensor:
    """The candidates for the argmax of rows of which a rank has some columns, [2, N, C]: the best
    values and their tokens. logits [N, >= num_tokens]: columns are the tokens from `first` on.

    `best_candidates` reads those of all ranks; C and the form depend on the columns' type, device
    and number alone.
    """
    if runs_kernels(logits) and logits.dtype is not torch.float64:
        from hydraspec_kernels.sampling.token_choice.kernel import greedy_candidates_kernel

        return greedy_candidates_kernel(logits, first, num_tokens)
    return greedy_candidates_reference(logits, first, num_tokens)


def best_candidates(candidates: Tensor, *, marks_not_finite: bool = False) -> Tensor:
    """The argmax [N] of whole rows as `greedy_tokens` gives it, from every rank's candidates
    [size, 2, N, C] in the order of their tokens.
    """
    if runs_kernels(candidates) and candidates.dtype is not torch.float64:
        from hydraspec_kernels.sampling.token_choice.kernel import best_candidates_kernel

        return best_candidates_kernel(candidates, marks_not_finite=marks_not_finite)
    return best_candidates_reference(candidates, marks_not_finite=marks_not_finite)


def draw_tokens(weights: Tensor, key: DrawKey) -> Tensor:
    """Token ids [...] int64 drawn from weights [..., V] (non-negative, need not sum to 1); the
    parts of the key are [...] or scalar. Tokens of weight 0 are never drawn unless all are 0.
    """
    if runs_kernels(weights):
        from hydraspec_kernels.sampling.token_choice.kernel import draw_tokens_kernel

        return draw_tokens_kernel(weights, key)
    return draw_tokens_reference(weights, key)


def sample_with_probs(
    logits: Tensor, temperature: Tensor, key: DrawKey, *, any_greedy: bool = True
) -> tuple[Tensor, Tensor]:
    """Token ids [N] drawn from softmax(logits / temperature), and those distributions [N, V]
    float32: logits [N, V], temperature [N], the parts of the key [N] or scalar.

    Rows of temperature 0 take the argmax and have one-hot distributions. `any_greedy` is a host
    fact that saves work: some row may have temperature 0.
    """
    if runs_kernels(logits) and logits.dtype is not torch.float64:
        from hydraspec_kernels.sampling.token_choice.kernel import sample_with_probs_kernel

        return sample_with_probs_kernel(logits, temperature, key)
    return sample_with_probs_reference(logits, temperature, key, any_greedy=any_greedy)
