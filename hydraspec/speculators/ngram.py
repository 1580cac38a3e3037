"""`method=ngram`: drafts copied from the text, from where its last tokens stood before."""

from __future__ import annotations

import torch
from torch import Tensor

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
    `least` tokens did not stand together before.

    The place copied from is the end of the longest match of at most `most` tokens, and the latest
    of several.
    """
    columns = torch.arange(text.shape[1], device=text.device)
    end = last[:, None]
    matches = columns < end  # [B, W] the last tokens so far looked at stand before this column too
    length = torch.zeros_like(text)
    for back in range(most):
        token = text.gather(1, (end - back).clamp_min(0))
        before = torch.roll(text, back, 1)
        matches = matches & (before == token) & (columns >= back)
        length += matches
    found, place = (length * text.shape[1] + columns).max(1, keepdim=True)
    is_long = found >= least * text.shape[1]
    period = (end - place).clamp_min(1)
    ahead = torch.arange(num_drafts, device=text.device)
    drafts = text.gather(1, (place + 1 + ahead % period).clamp_max(text.shape[1] - 1))
    return torch.where(is_long, drafts, -1)
