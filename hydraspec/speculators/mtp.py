"""Multi-token prediction: extra layers that DeepSeek-V3 and MiMo ship after their last one."""

from __future__ import annotations

from typing import ClassVar

from hydraspec.models.base import TargetModel
from hydraspec.models.mtp.head import MTPHead
from hydraspec.models.mtp.loading import load_mtp
from hydraspec.speculators.autoregressive import AutoRegressiveSpeculator


class MTPSpeculator(AutoRegressiveSpeculator):
    """Drafter that runs an MTP layer per step, over its own KV, on the state of the last step."""

    may_rest: ClassVar[bool] = True
    head: MTPHead

    def _checkpoint(self) -> str:
        """The target's own folder, unless the method or the target names another."""
        method, target = self.config.method, self.config.target
        return method.checkpoint or target.drafters.get(method.name) or target.checkpoint

    def load_draft_model(self, target: TargetModel, checkpoint: str) -> MTPHead:
        return load_mtp(
            checkpoint,
            weights=self.config.method.weights.value,
            target=target,
            num_drafts=self.num_speculative_tokens,
            seed=self.config.seed,
        )
