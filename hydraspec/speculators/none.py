"""`method=none`: plain decoding, one token a step."""

from __future__ import annotations

from hydraspec.models.base import TargetModel
from hydraspec.speculators.base import BaseSpeculator
from hydraspec.types import Batch, RequestState, TargetStep, Verdict


class NoSpeculator(BaseSpeculator):
    """Offers no drafts; the verifier then samples one token from each request's newest row."""

    def load(self, target: TargetModel) -> None:
        return None

    def propose(
        self, target_step: TargetStep, verdict: Verdict, batch: Batch, state: RequestState
    ) -> None:
        return None
