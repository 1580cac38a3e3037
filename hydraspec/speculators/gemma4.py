"""Gemma 4's MTP assistant: Q-only attention over the target's KV, one constant position, no KV of
its own."""

from __future__ import annotations

from hydraspec.models.base import TargetModel
from hydraspec.models.gemma4_assistant import Gemma4Assistant, load_assistant
from hydraspec.speculators.autoregressive import AutoRegressiveSpeculator
from hydraspec.types import ConfigurationError


class Gemma4Speculator(AutoRegressiveSpeculator):
    """Every draft step reads the target's KV of positions 0..p and rotates at p, the last row with
    target KV."""

    def load_draft_model(self, target: TargetModel) -> Gemma4Assistant:
        method = self.config.method
        checkpoint = method.checkpoint or self.config.target.drafters.get(method.name)
        if checkpoint is None:
            raise ConfigurationError(
                f"method.checkpoint is null and target={self.config.target.name} names no drafter "
                f"for method={method.name}: set it to the assistant's folder or hub id"
            )
        return load_assistant(
            checkpoint, weights=method.weights.value, target=target, seed=self.config.seed
        )
