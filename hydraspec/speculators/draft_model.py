"""Drafters with weights: loading, the newest row of each request, and sampling a draft token."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Protocol

import torch
from hydraspec_kernels.sampling.random_streams import DrawKey, Purpose
from hydraspec_kernels.sampling.rules import without_bans
from hydraspec_kernels.sampling.token_choice import greedy_tokens, sample_with_probs
from torch import Tensor

from hydraspec.config.schema import DraftSampling, RunConfig
from hydraspec.models.base import TargetModel
from hydraspec.models.draft_spec import DraftSpec
from hydraspec.models.kv_groups import BlockSize
from hydraspec.speculators.base import BaseSpeculator
from hydraspec.types import (
    Batch,
    ConfigurationError,
    KVGroupSpec,
    RequestState,
    Rows,
    TargetStep,
)


def step_rows(batch: Batch, specs: Sequence[KVGroupSpec], input_ids: Tensor) -> Rows:
    """The step's rows with the KV groups of a drafter, which come last, and its input ids [T]."""
    first = len(batch.slot_mapping) - len(specs)
    return Rows(
        segments=batch.segments,
        input_ids=input_ids,
        positions=batch.positions,
        seq_lens=batch.seq_lens,
        slot_mapping=batch.slot_mapping[first:],
        block_tables=batch.block_tables[first:],
        query_start_loc=batch.query_start_loc,
        has_padding=batch.has_padding,
    )


class DraftHead(Protocol):
    """The interface of every draft head in `models/`."""

    spec: DraftSpec

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits in the draft vocabulary, hidden [B, H_draft] -> [B, V_draft]."""
        ...

    def greedy_tokens(self, hidden: Tensor) -> Tensor:
        """Best tokens, hidden [B, H_draft] -> [B] ids of the target's vocabulary."""
        ...

    def memory_bytes(self) -> int: ...


class OwnCacheHead(DraftHead, Protocol):
    """A draft head whose layers write KV."""

    def kv_groups(self, block_size: BlockSize, first_layer: int) -> list[KVGroupSpec]:
        """The head's KV groups; layer i of the head is number `first_layer` + i."""
        ...

    def combine_target_hidden(self, target_step: TargetStep) -> Tensor:
        """The hidden state that a pass over the target's rows takes, [T, H]."""
        ...

    def forward(
        self, rows: Rows, hidden: Tensor, kv_caches: list[Tensor], *, step: int
    ) -> tuple[Tensor, Tensor]:
        """States [T, H_draft] for `compute_logits`, and [T, H] that the next step takes as hidden.

        `kv_caches` has one entry per layer of the head. `step` is the number of the draft that the
        newest rows yield; 0 is the pass over the target's rows.
        """
        ...


class DraftModelSpeculator(BaseSpeculator):
    """Holds a draft head and samples its tokens, greedily or from its distribution."""

    # `fill` may run later, over the rows of several steps, while no drafts are wanted.
    may_rest: ClassVar[bool] = False
    head: Any  # a DraftHead; leaves narrow it
    dtype: torch.dtype  # of the target, whose states the head reads

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.config = config
        self.is_probabilistic = config.method.draft_sampling is DraftSampling.probabilistic
        self.target_caches: list[Tensor | None] = []
        self.draft_caches: list[Tensor] = []
        self.draft_specs: list[KVGroupSpec] = []

    @abstractmethod
    def load_draft_model(self, target: TargetModel, checkpoint: str) -> DraftHead:
        """Read the head from `checkpoint` and check it against `target`."""

    def load(self, target: TargetModel) -> None:
        self.dtype = target.dtype
        self.head = self.load_draft_model(target, self._checkpoint())
        stored = getattr(self.head, "quantization", None)  # heads of plugins may have none
        more = getattr(self.head, "quantization_notes", ())
        if stored is not None or more:
            kv_note = getattr(self.head, "kv_cache_note", "")
            notes = (*self.head.spec.notes, *more, *filter(None, [kv_note]))
            self.head.spec = replace(self.head.spec, quantization=stored, notes=notes)
        self.spec = self.head.spec
        self.aux_layer_ids = self.head.spec.aux_layer_ids

    def _checkpoint(self) -> str:
        method, target = self.config.method, self.config.target
        checkpoint = method.checkpoint or target.drafters.get(method.name)
        if checkpoint is None:
            raise ConfigurationError(
                f"method.checkpoint is null and target={target.name} names no drafter for "
                f"method={method.name}: set it to the drafter's folder or hub id"
            )
        return checkpoint

    @property
    def reads_next_images(self) -> bool:
        """Returns whether the head fills KV of its own from rows that read the following token, and
        declares that it reads images."""
        reads_next = self.owns_kv_cache and self.num_following_tokens > 0
        return reads_next and self.spec is not None and self.spec.supports_mm_inputs

    def kv_groups(self, block_size: BlockSize, first_layer: int) -> list[KVGroupSpec]:
        if self.owns_kv_cache:
            self.draft_specs = self.head.kv_groups(block_size, first_layer)
        return self.draft_specs

    def bind_kv_caches(self, specs: Sequence[KVGroupSpec], caches: list[Tensor | None]) -> None:
        self.target_caches = caches
        owned = sorted(layer for spec in self.draft_specs for layer in spec.layers)
        self.draft_caches = [cache for layer in owned if (cache := caches[layer]) is not None]

    def states_read(self, target_step: TargetStep) -> Tensor:
        """The target's states that a pass over the step's rows reads, [T, W]."""
        aux = target_step.aux_hidden_states
        return torch.cat(aux, 1) if self.aux_layer_ids else target_step.hidden_states

    def fill(self, target_step: TargetStep, batch: Batch, state: RequestState) -> None:
        """Write the drafter's own KV of the rows of a batch, without drafts."""
        return None

    def fill_late(self, states: Tensor, batch: Batch, state: RequestState) -> None:
        """`fill` for rows whose `states_read` were [T, W]."""
        aux = list(states.chunk(len(self.aux_layer_ids), 1)) if self.aux_layer_ids else []
        kept = TargetStep(hidden_states=states, logits=states[:0], aux_hidden_states=aux)
        self.fill(kept, batch, state)

    @property
    def draft_vocab_size(self) -> int | None:
        return self.head.spec.vocab_size if self.is_probabilistic else None

    def memory_bytes(self) -> int:
        size: int = self.head.memory_bytes()
        return size

    def draws(self, batch: Batch) -> bool:
        """Returns whether drafts of a step are drawn, with probabilities, and not the best ones."""
        return self.is_probabilistic and not batch.all_greedy

    def sample_draft(
        self, hidden: Tensor, batch: Batch, state: RequestState, seq_lens: Tensor, index: int
    ) -> tuple[Tensor, Tensor | None]:
        """Draft token number `index` of each request, [B], and the probabilities [B, V_draft] that
        it was drawn from; None for greedy drafts.

        seq_lens [B] are p + 1: the sampled token has that position, so the draft predicts
        p + 2 + index.
        """
        rules = state.rules if batch.flags.any_biases else None
        if rules is None and not self.draws(batch):
            return self.head.greedy_tokens(hidden), None
        logits = self.head.compute_logits(hidden)
        if rules is not None:
            num_known = seq_lens + (1 + index)
            logits = without_bans(logits, batch.slots, num_known, rules, self.draft_vocab_map)
        if self.draws(batch):
            return self.draw_draft(logits, batch, state, seq_lens, index)
        return self._target_ids(greedy_tokens(logits)), None

    def draw_draft(
        self, logits: Tensor, batch: Batch, state: RequestState, seq_lens: Tensor, index: int
    ) -> tuple[Tensor, Tensor]:
        """Draft tokens [B] drawn from logits [B, V_draft], and their probabilities; see
        `sample_draft`."""
        # Drafts have the temperature, but no truncation: a truncated draft could not propose every
        # token that the target may accept.
        seed = state.seed.index_select(0, batch.slots)
        tokens, probs = sample_with_probs(
            logits,
            state.temperature.index_select(0, batch.slots),
            DrawKey(seed, seq_lens + (1 + index), Purpose.DRAFT, index),
            any_greedy=batch.flags.any_greedy,
        )
        return self._target_ids(tokens), probs

    def _target_ids(self, tokens: Tensor) -> Tensor:
        ids = self.draft_vocab_map
        return tokens if ids is None else ids.index_select(0, tokens)
