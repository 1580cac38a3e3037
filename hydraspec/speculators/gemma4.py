"""Gemma 4's MTP assistant: Q-only attention over the target's KV at one constant position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from hydraspec_kernels.step_inputs import NewestRows
from torch import Tensor

from hydraspec.models.base import TargetModel
from hydraspec.models.gemma4.assistant import DraftContext, Gemma4Assistant, load_assistant
from hydraspec.speculators.autoregressive import AutoRegressiveSpeculator, num_busy
from hydraspec.types import Batch, KVGroupSpec, RequestState, TargetStep


class Gemma4Speculator(AutoRegressiveSpeculator):
    """Every draft step reads the target's KV of positions 0..p and rotates at p.

    p is the last row with target KV (docs/adr/0001). The drafter writes no KV and needs no prefill.
    """

    owns_kv_cache: ClassVar[bool] = False
    reads_target_kv: ClassVar[bool] = True
    head: Gemma4Assistant

    def load_draft_model(self, target: TargetModel, checkpoint: str) -> Gemma4Assistant:
        weights = self.config.method.weights.value
        return load_assistant(checkpoint, weights=weights, target=target, seed=self.config.seed)

    def bind_kv_caches(self, specs: Sequence[KVGroupSpec], caches: list[Tensor | None]) -> None:
        super().bind_kv_caches(specs, caches)
        self.head.read_from(specs)

    def begin(self, row: NewestRows, batch: Batch) -> DraftContext:
        max_seq_len = max(segment.max_seq_len for segment in batch.segments)
        return self.head.begin(
            *(row.positions, row.seq_lens, batch.block_tables, max_seq_len, self.target_caches),
            num_busy=num_busy(batch),
        )

    def first_step(
        self,
        row: NewestRows,
        shared: DraftContext,
        target_step: TargetStep,
        batch: Batch,
        state: RequestState,
    ) -> tuple[Tensor, Tensor]:
        return self.head.step(shared, row.token_ids, target_step.hidden_states, row.rows)

    def next_step(
        self,
        row: NewestRows,
        shared: DraftContext,
        tokens: Tensor,
        feedback: Tensor,
        batch: Batch,
        index: int,
    ) -> tuple[Tensor, Tensor]:
        return self.head.step(shared, tokens, feedback)
