"""EAGLE-1 and EAGLE-3 heads: one or a few decoder layers fed with the target's hidden states."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from hydraspec.models.base import TargetModel
from hydraspec.models.eagle.head import EagleHead
from hydraspec.models.eagle.loading import load_eagle
from hydraspec.speculators.autoregressive import AutoRegressiveSpeculator
from hydraspec.speculators.draft_model import DraftModelSpeculator


class EagleDrafter(DraftModelSpeculator):
    """An EAGLE head of any kind, and the vocabulary it drafts in."""

    may_rest: ClassVar[bool] = True
    head: EagleHead

    def load_draft_model(self, target: TargetModel, checkpoint: str) -> EagleHead:
        method = self.config.method
        return load_eagle(
            checkpoint,
            method=method.name,
            weights=method.weights.value,
            target=target,
            seed=self.config.seed,
        )

    @property
    def reads_all_hidden_states(self) -> bool:
        """Returns True for EAGLE-1 alone: heads that combine aux states read nothing else."""
        return self.head.combine is None

    @property
    def draft_vocab_map(self) -> Tensor | None:
        return self.head.vocab_map


class EagleSpeculator(EagleDrafter, AutoRegressiveSpeculator):
    """The drafter of `method=eagle` and `method=eagle3`. The head's DraftSpec says which states
    enter and what is fed back.
    """
