"""`method=ngram`: drafts copied from the text, from where its last tokens stood before."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from hydraspec.config.options import NgramOptions
from hydraspec.config.schema import RunConfig
from hydraspec.models.base import TargetModel
from hydraspec.speculators.base import BaseSpeculator
from hydraspec.types import Batch, Draft, RequestState, TargetStep, Verdict


class NgramSpeculator(BaseSpeculator):
    """Prompt lookup without weights: the tokens that followed the last n tokens where these stood
    before, for the largest n that `method.options` allows, and the latest such place.

    Source: Saxena, Prompt Lookup Decoding, 2023. Where a place is so near to the end that fewer
    than K tokens follow it, the text repeats itself from there, and so do the drafts.
    """

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        options = config.method.options or NgramOptions()
        self.least, self.most = options.prompt_lookup_min, options.prompt_lookup_max

    def load(self, target: TargetModel) -> None:
        return None

    def propose(
        self, target_step: TargetStep, verdict: Verdict, batch: Batch, state: RequestState
    ) -> Draft:
        newest = self.newest_row(verdict, batch, state)
        text = state.token_ids[batch.slots]
        num_drafts = self.num_speculative_tokens
        return Draft(tokens=continued(text, newest.seq_lens, num_drafts, self.least, self.most))


def continued(text: Tensor, last: Tensor, num_drafts: int, least: int, most: int) -> Tensor:
    """Drafts [B, K] for texts [B, W] that end at column `last` [B]; -1 for a text whose last
    `least` tokens did not stand together before. They are copied from `longest_match`.
    """
    place, length = longest_match(text, last, most)
    return torch.where(length >= least, copied(text, last, place, num_drafts), -1)


def longest_match(text: Tensor, last: Tensor, most: int) -> tuple[Tensor, Tensor]:
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


def copied(text: Tensor, last: Tensor, place: Tensor, num_drafts: int) -> Tensor:
    """The tokens [B, K] after column `place` [B, 1] of texts that end at column `last` [B], and go
    on repeating themselves there."""
    period = (last[:, None] - place).clamp_min(1)
    ahead = torch.arange(num_drafts, device=text.device)
    return text.gather(1, (place + 1 + ahead % period).clamp_max(text.shape[1] - 1))
