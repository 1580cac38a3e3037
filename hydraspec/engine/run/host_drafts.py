"""Drafts from the host, in the state on the device (docs/adr/0047)."""

from __future__ import annotations

import torch

from hydraspec.types import Continuations, RequestState


def write_drafts(state: RequestState, found: Continuations, k: int) -> None:
    """Write K drafts after the newest token of each request, -1 where there is none.

    Tokens that a step in flight has sampled are compared with the first ones of the continuation:
    drafts are those after them if all agree, and none otherwise. The host waits for nothing.
    """
    numbers, token_ids = torch.from_numpy(found.numbers), state.token_ids
    if token_ids.is_cuda:
        numbers = numbers.pin_memory().to(token_ids.device, non_blocking=True)
    slots, num_known, tokens = numbers[:, 0], numbers[:, 1:2], numbers[:, 2:]
    ahead = torch.arange(k + 1, device=token_ids.device)
    places = slots.unsqueeze(1) * token_ids.shape[1] + num_known + ahead  # [N, K+1]
    drafts = tokens[:, :k]
    if found.is_ahead:
        newest = state.num_computed.index_select(0, slots).unsqueeze(1)
        num_sampled = newest + 1 - num_known  # [N, 1], 0 to K+1
        agrees = (token_ids.take(places) == tokens[:, : k + 1]) | (ahead >= num_sampled)
        rest = tokens.gather(1, num_sampled + ahead[:k])
        drafts = torch.where(agrees.all(1, keepdim=True), rest, -1)
        places = places + num_sampled
    token_ids.view(-1).index_copy_(0, places[:, :k].flatten(), drafts.flatten())
