"""`method=suffix`: drafts from counts of what followed a text's last tokens before, in the text
itself and in finished outputs."""

from __future__ import annotations

from hydraspec.config.options import SuffixOptions
from hydraspec.config.schema import RunConfig
from hydraspec.models.base import TargetModel
from hydraspec.speculators.base import BaseSpeculator
from hydraspec.speculators.host import HostDrafts
from hydraspec.speculators.suffix.drafts import SuffixDrafts
from hydraspec.types import Batch, RequestState, TargetStep, Verdict


class SuffixSpeculator(BaseSpeculator):
    """Suffix decoding; see SuffixDrafts."""

    drafts_on_host = True

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self._options = config.method.options or SuffixOptions()

    def load(self, target: TargetModel) -> None:
        self._drafts = SuffixDrafts(self._options, self.num_speculative_tokens, target.vocab_size)

    @property
    def host_drafts(self) -> HostDrafts:
        return self._drafts

    def propose(
        self, target_step: TargetStep, verdict: Verdict, batch: Batch, state: RequestState
    ) -> None:
        return None
