"""Writing a verdict and drafts into the state, in plain torch.

Letters: S slots, L columns, B requests, K drafts.
"""

from __future__ import annotations

import torch
from torch import Tensor


def commit_tokens_reference(
    token_ids: Tensor,
    num_computed: Tensor,
    slots: Tensor,
    seq_lens: Tensor,
    num_drafts: Tensor,
    samples: Tensor,
    tokens: Tensor,
    num_rejected: Tensor,
) -> None:
    """See `verification.commit_tokens`."""
    ends = seq_lens - num_drafts  # position of the first predicted token
    _write_behind(token_ids, slots, samples, ends, tokens)
    num_computed.index_copy_(0, slots, seq_lens - num_rejected)


def store_drafts_reference(
    token_ids: Tensor, num_computed: Tensor, slots: Tensor, samples: Tensor, tokens: Tensor
) -> None:
    """See `verification.store_drafts`."""
    newest = num_computed.index_select(0, slots)
    _write_behind(token_ids, slots, samples, newest + 1, tokens)


def _write_behind(
    token_ids: Tensor, slots: Tensor, samples: Tensor, first: Tensor, tokens: Tensor
) -> None:
    """token_ids[slot, first + j] = tokens[:, j] for requests that sample; the others write the
    last column.
    """
    columns = token_ids.shape[1]
    offsets = torch.arange(tokens.shape[1], device=tokens.device)
    places = torch.where(samples.unsqueeze(1), first.unsqueeze(1) + offsets, columns - 1)
    places = places + (slots * columns).unsqueeze(1)
    token_ids.view(-1).index_copy_(0, places.view(-1), tokens.reshape(-1))
