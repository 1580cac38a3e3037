"""Checks of what a speculator returns: a draft that cannot be verified is one error that names the
speculator's class. The checks read what the host knows, and token ids that are on the host anyway.
"""

from __future__ import annotations

import numpy as np
import torch

from hydraspec.speculators.base import BaseSpeculator
from hydraspec.types import Batch, Draft, DraftError, RequestState


def check_draft(
    draft: object, batch: Batch, state: RequestState, speculator: BaseSpeculator
) -> None:
    """Check type, shapes, dtypes and device of what `propose` returned.

    Raises:
        DraftError: naming what is expected and what was given.
    """
    requests, k = batch.num_requests, speculator.num_speculative_tokens
    if batch.draft_length is not None:  # further columns may be left out
        k = _width(draft) if batch.draft_length <= _width(draft) <= k else batch.draft_length
    device = batch.slots.device
    wanted = [("tokens", (requests, k), torch.int64)]
    if state.draft_probs is not None and not batch.all_greedy:
        wanted.append(("probs", (requests, k, *state.draft_probs.shape[2:]), torch.float32))
    if state.draft_survivals is not None:
        wanted.append(("survivals", (requests, k), torch.float32))
    if not isinstance(draft, Draft) or not all(
        _fits(getattr(draft, name), shape, dtype, device) for name, shape, dtype in wanted
    ):
        parts = (f"{name} {_tensor(shape, dtype, device)}" for name, shape, dtype in wanted)
        raise _error(speculator, f"Draft with {' and '.join(parts)}", _described(draft))


def check_draft_ids(tokens: np.ndarray, vocab_size: int, speculator: BaseSpeculator) -> None:
    """Check that draft tokens [B, K] are ids of the target's vocabulary, or -1 for no draft.

    Raises:
        DraftError: naming the first other id.
    """
    # One pass for both bounds: ids below -1 are large as unsigned numbers.
    if tokens.size and (tokens + 1).view(np.uint64).max() > vocab_size:
        wrong = tokens[(tokens < -1) | (tokens >= vocab_size)]
        expected = f"token ids from 0 to {vocab_size - 1}, or -1 where there is no draft"
        raise _error(speculator, expected, f"token id {wrong[0]}")


def check_drafts_on_cpu(draft: Draft | None, vocab_size: int, speculator: BaseSpeculator) -> None:
    """Check the ids of a draft that is on the CPU, where reading them waits for no step."""
    if draft is not None and draft.tokens.is_cpu:
        check_draft_ids(draft.tokens.numpy(), vocab_size, speculator)


def _error(speculator: BaseSpeculator, expected: str, given: str) -> DraftError:
    name = f"{type(speculator).__module__}.{type(speculator).__qualname__}"
    return DraftError(
        f"{name}.propose returned a draft that cannot be verified\n  expected: {expected}\n"
        f"  given: {given}\n  to do: mend the class; docs/adding_a_speculator.md describes a draft"
    )


def _width(draft: object) -> int:
    """Columns of a draft's tokens; -1: there are none."""
    tokens = draft.tokens if isinstance(draft, Draft) else None
    return tokens.shape[1] if isinstance(tokens, torch.Tensor) and tokens.dim() == 2 else -1


def _fits(found: object, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> bool:
    return isinstance(found, torch.Tensor) and (found.shape, found.dtype, found.device) == (
        *(shape, dtype, device),
    )


def _tensor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> str:
    return f"{list(shape)} of {dtype} on {device}"


def _described(found: object) -> str:
    if isinstance(found, Draft):
        probs = "" if found.probs is None else f" and probs {_described(found.probs)}"
        return f"Draft with tokens {_described(found.tokens)}{probs}"
    if isinstance(found, torch.Tensor):
        return _tensor(tuple(found.shape), found.dtype, found.device)
    return type(found).__name__
