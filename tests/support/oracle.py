"""A drafter that is told the target's continuation and plants errors, so that every accepted length
occurs."""

from __future__ import annotations

import numpy as np
import torch

from hydraspec.config.schema import RunConfig
from hydraspec.speculators.base import BaseSpeculator
from hydraspec.types import Batch, Draft, RequestState, TargetStep, Verdict


class OracleSpeculator(BaseSpeculator):
    """Drafts the known continuation up to a random length, then a wrong token, then anything.

    A test double: it reads the device freely, which a real speculator must not.
    """

    def __init__(
        self, config: RunConfig, continuations: dict[tuple[int, ...], list[int]], vocab_size: int
    ) -> None:
        super().__init__(config)
        self._known = continuations
        self._vocab_size = vocab_size
        self._rng = np.random.default_rng(config.seed)

    def load(self, target: object) -> None:
        return None

    def propose(
        self, target_step: TargetStep, verdict: Verdict, batch: Batch, state: RequestState
    ) -> Draft:
        k = self.num_speculative_tokens
        drafts = self._rng.integers(0, self._vocab_size, (batch.num_requests, k))
        for row, slot in enumerate(batch.slots.tolist()):
            if not bool(batch.samples[row]):
                continue
            length = int(state.num_computed[slot]) + 1
            truth = self._continuation(state.token_ids[slot, :length].tolist())[:k]
            right = int(self._rng.integers(0, k + 1))
            drafts[row, : len(truth)] = truth
            if right < len(truth):
                drafts[row, right] = (truth[right] + self._rng.integers(1, self._vocab_size)) % (
                    self._vocab_size
                )
        return Draft(tokens=torch.from_numpy(drafts))

    def _continuation(self, tokens: list[int]) -> list[int]:
        for prompt, continuation in self._known.items():
            known = [*prompt, *continuation]
            if len(tokens) >= len(prompt) and known[: len(tokens)] == tokens:
                return known[len(tokens) :]
        raise AssertionError(
            "the engine left the target's greedy path before the drafter was asked"
        )
