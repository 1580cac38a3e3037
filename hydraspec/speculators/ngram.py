"""`method=ngram`: drafts copied from the text, from where its last tokens stood before."""

from __future__ import annotations

from hydraspec_kernels.lookup import continued

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
        drafts = continued(
            *(state.token_ids, batch.slots, newest.seq_lens),
            num_drafts=self.num_speculative_tokens,
            least=self.least,
            most=self.most,
        )
        return Draft(tokens=drafts)
