"""Drafts from the host, in the state on the device (docs/adr/0047)."""

from __future__ import annotations

import torch
from torch import Tensor

from hydraspec.speculators.host import Lookup
from hydraspec.speculators.ngram import copied, longest_match
from hydraspec.types import Continuations, RequestState

WIDTH = 256  # columns of texts are looked at in whole pieces of so many


def write_drafts(
    state: RequestState, found: Continuations, k: int, lookup: Lookup | None = None
) -> None:
    """Write K drafts after the newest token of each request, -1 where there is none.

    Tokens that a step in flight has sampled are compared with the first ones of the continuation:
    drafts are those after them if all agree. If not, or if none is left, they are copied from the
    request's text, as `lookup` says. The host waits for nothing.
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
        agrees = agrees.all(1, keepdim=True)
        if lookup is None:
            drafts = torch.where(agrees, rest, -1)
        else:
            width = int(found.numbers[:, 1].max()) + k + 1
            text = token_ids[:, : -(-width // WIDTH) * WIDTH].index_select(0, slots)
            others = _looked_up(text, newest.squeeze(1), k, lookup)
            drafts = torch.where(agrees & (rest[:, :1] >= 0), rest, others)
        places = places + num_sampled
    token_ids.view(-1).index_copy_(0, places[:, :k].flatten(), drafts.flatten())


def _looked_up(text: Tensor, last: Tensor, k: int, lookup: Lookup) -> Tensor:
    """Drafts [N, K] copied from texts [N, W] that end at column `last` [N]; -1 where there is no
    more."""
    place, length = longest_match(text, last, lookup.longest)
    most = (length * lookup.factor).floor().maximum(length.clamp_max(1) * lookup.fewest)
    ahead = torch.arange(k, device=text.device)
    return torch.where(ahead < most, copied(text, last, place, k), -1)
