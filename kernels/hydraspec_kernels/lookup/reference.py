"""Lookups in plain torch: the specification, which runs on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from hydraspec_kernels.lookup.records import Lookup


def continued_reference(
    token_ids: Tensor, slots: Tensor, last: Tensor, *, num_drafts: int, least: int, most: int
) -> Tensor:
    """See `lookup.continued`."""
    text = token_ids.index_select(0, slots)
    place, length = _longest_match(text, last, most)
    return torch.where(length >= least, _copied(text, last, place, num_drafts), -1)


def write_drafts_reference(
    token_ids: Tensor,
    num_computed: Tensor,
    numbers: Tensor,
    *,
    width: int,
    is_ahead: bool,
    lookup: Lookup | None,
) -> None:
    """See `lookup.write_drafts`."""
    k = (numbers.shape[1] - 3) // 2
    slots, num_known, tokens = numbers[:, 0], numbers[:, 1:2], numbers[:, 2:]
    ahead = torch.arange(k + 1, device=token_ids.device)
    places = slots.unsqueeze(1) * token_ids.shape[1] + num_known + ahead  # [N, K+1]
    drafts = tokens[:, :k]
    if is_ahead:
        newest = num_computed.index_select(0, slots).unsqueeze(1)
        num_sampled = newest + 1 - num_known  # [N, 1], 0 to K+1
        agrees = (token_ids.take(places) == tokens[:, : k + 1]) | (ahead >= num_sampled)
        rest = tokens.gather(1, num_sampled + ahead[:k])
        agrees = agrees.all(1, keepdim=True)
        if lookup is None:
            drafts = torch.where(agrees, rest, -1)
        else:
            text = token_ids[:, :width].index_select(0, slots)
            others = _looked_up(text, newest.squeeze(1), k, lookup)
            drafts = torch.where(agrees & (rest[:, :1] >= 0), rest, others)
        places = places + num_sampled
    token_ids.view(-1).index_copy_(0, places[:, :k].flatten(), drafts.flatten())


def _looked_up(text: Tensor, last: Tensor, k: int, lookup: Lookup) -> Tensor:
    """Drafts [N, K] copied from texts [N, W] that end at column `last` [N]; -1 where there is no
    more."""
    place, length = _longest_match(text, last, lookup.longest)
    most = (length * lookup.factor).floor().maximum(length.clamp_max(1) * lookup.fewest)
    ahead = torch.arange(k, device=text.device)
    return torch.where(ahead < most, _copied(text, last, place, k), -1)


def _longest_match(text: Tensor, last: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Where the last tokens of texts [B, W] that end at column `last` [B] stood before: the column
    [B, 1] at the end of the longest match, of several the latest, and its tokens [B, 1], at most
    `most` and 0 without any."""
    width, columns = text.shape[1], torch.arange(text.shape[1], device=text.device)
    back = columns[:most]
    tokens = text.gather(1, (last[:, None] - back).clamp_min(0))  # [B, most] the newest first
    before = functional.pad(text, (most, 0), value=-1)
    matches = columns < last[:, None]  # [B, W] the last tokens looked at so far stand here too
    length = torch.zeros_like(text)
    for i in range(back.shape[0]):
        matches &= before[:, most - i : most - i + width] == tokens[:, i : i + 1]
        length += matches
    found, place = (length * width + columns).max(1, keepdim=True)
    return place, found // width


def _copied(text: Tensor, last: Tensor, place: Tensor, num_drafts: int) -> Tensor:
    """The tokens [B, K] after column `place` [B, 1] of texts that end at column `last` [B], and go
    on repeating themselves there."""
    period = (last[:, None] - place).clamp_min(1)
    ahead = torch.arange(num_drafts, device=text.device)
    return text.gather(1, (place + 1 + ahead % period).clamp_max(text.shape[1] - 1))
