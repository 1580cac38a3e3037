"""Drafters with weights: loading, the newest row of each request, and sampling a draft token."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from hydraspec.config.schema import DraftSampling, RunConfig
from hydraspec.models.base import TargetModel
from hydraspec.models.draft_spec import DraftSpec
from hydraspec.sampling.sampler import sample_draft
from hydraspec.speculators.base import BaseSpeculator
from hydraspec.types import Batch, KVGroupSpec, RequestState, TargetStep, Verdict


class DraftHead(Protocol):
    """What a draft head in `models/` offers its speculator."""

    spec: DraftSpec

    def begin(
        self,
        positions: Tensor,
        seq_lens: Tensor,
        block_tables: list[Tensor],
        max_seq_len: int,
        kv_caches: list[Tensor | None],
    ) -> Any: ...

    def step(self, context: Any, token_ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]: ...

    def compute_logits(self, hidden: Tensor) -> Tensor: ...

    def greedy_tokens(self, hidden: Tensor) -> Tensor: ...

    def memory_bytes(self) -> int: ...


@dataclass(slots=True)
class NewestRow:
    """Each request's newest computed row after verification, and the token sampled behind it."""

    hidden: Tensor  # [B, D] target hidden state of the last accepted row
    token_ids: Tensor  # [B] the newly sampled token
    positions: Tensor  # [B] position of the row, p
    seq_lens: Tensor  # [B] valid target KV, p + 1: rejected rows are not counted


class DraftModelSpeculator(BaseSpeculator):
    """Holds a draft head and samples its tokens, greedily or from its distribution."""

    head: DraftHead

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.config = config
        self.is_probabilistic = config.method.draft_sampling is DraftSampling.probabilistic
        self.kv_caches: list[Tensor | None] = []
        self._vocab_size = 0

    @abstractmethod
    def load_draft_model(self, target: TargetModel) -> DraftHead:
        """Read the head that `method.checkpoint` names and check it against `target`."""

    def load(self, target: TargetModel) -> None:
        self.head = self.load_draft_model(target)
        self.spec = self.head.spec
        self._vocab_size = target.vocab_size

    def bind_kv_caches(self, specs: Sequence[KVGroupSpec], caches: list[Tensor | None]) -> None:
        self.kv_caches = caches

    @property
    def draft_vocab_size(self) -> int | None:
        return self._vocab_size if self.is_probabilistic else None

    def memory_bytes(self) -> int:
        return self.head.memory_bytes()

    def newest_row(
        self, target_step: TargetStep, verdict: Verdict, batch: Batch, state: RequestState
    ) -> NewestRow:
        """Where drafting starts. Requests that did not sample give a harmless row; their drafts are
        dropped."""
        rows = batch.query_start_loc[1:] - 1 - verdict.num_rejected
        newest = (verdict.num_sampled - 1).clamp_min(0).unsqueeze(1)
        seq_lens = state.num_computed.index_select(0, batch.slots)
        return NewestRow(
            hidden=target_step.hidden_states.index_select(0, rows),
            token_ids=verdict.tokens.gather(1, newest).squeeze(1).clamp_min(0),
            positions=seq_lens - 1,
            seq_lens=seq_lens,
        )

    def sample_draft(
        self, hidden: Tensor, batch: Batch, state: RequestState, positions: Tensor, index: int
    ) -> tuple[Tensor, Tensor | None]:
        """Draft token [B] number `index`, at `positions` [B], and what it was drawn from [B, V] if
        probabilistic."""
        if not self.is_probabilistic or batch.all_greedy:
            return self.head.greedy_tokens(hidden), None
        return sample_draft(
            self.head.compute_logits(hidden),
            state.temperature.index_select(0, batch.slots),
            state.seed.index_select(0, batch.slots),
            positions,
            index,
            batch.flags,
        )
