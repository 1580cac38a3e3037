"""The speculator family's common part: what an engine may ask of any drafter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from hydraspec.config.schema import RunConfig
from hydraspec.graphs import GraphBackend
from hydraspec.models.base import TargetModel
from hydraspec.models.draft_spec import DraftSpec
from hydraspec.types import Batch, Draft, KVGroupSpec, RequestState, TargetStep, Verdict


@dataclass(slots=True, frozen=True)
class DraftGraphs:
    """What a drafter captures its decode pass with."""

    backend: GraphBackend
    sizes: tuple[int, ...]  # batch sizes worth a graph
    make_batch: Callable[[int], Batch]  # padding alone, where every batch of that size will stand
    state: RequestState


class BaseSpeculator(ABC):
    """Proposes K tokens behind each request's newest sampled token.

    A leaf is a list of differences: class attributes first, then at most three hooks.
    """

    owns_kv_cache: ClassVar[bool] = False  # drafts write KV of their own into further groups
    # Why `propose` cannot be part of a graph, where it cannot: it asks the device, say.
    cannot_be_captured: ClassVar[str | None] = None

    def __init__(self, config: RunConfig) -> None:
        self.num_speculative_tokens = config.method.num_speculative_tokens
        self.spec: DraftSpec | None = None
        self.aux_layer_ids: tuple[int, ...] = ()  # target states that propose reads

    @property
    def reads_all_hidden_states(self) -> bool:
        """Whether `propose` reads target_step.hidden_states of rows that nobody samples from. Else
        the target may leave those rows out from its last layer that writes KV on.
        """
        return self.owns_kv_cache  # which is filled by a pass over all rows

    @property
    def num_lookahead_tokens(self) -> int:
        """Positions behind a request's rows that drafting writes KV to."""
        return max(0, self.num_speculative_tokens - 1) if self.owns_kv_cache else 0

    def kv_groups(self, block_size: int, first_layer: int) -> list[KVGroupSpec]:
        """KV groups the drafter owns; their layers count from `first_layer`."""
        return []

    @abstractmethod
    def load(self, target: TargetModel) -> None:
        """Load the drafter's weights and check them against the target.

        Raises:
            CheckpointError: naming both sides, where drafter and target do not belong together.
        """

    def bind_kv_caches(self, specs: Sequence[KVGroupSpec], caches: list[Tensor | None]) -> None:
        """Hand over the cache: groups, and per target layer the tensor or None."""
        return None

    @property
    def draft_vocab_size(self) -> int | None:
        """Width of the draft probabilities that the engine keeps; None while drafts are greedy."""
        return None

    @property
    def draft_vocab_map(self) -> Tensor | None:
        """[V_draft] the target's ids of the drafter's vocabulary; None where they are the same."""
        return None

    def memory_bytes(self) -> int:
        """Bytes of weights the drafter holds beside the target's."""
        return 0

    def init_cudagraph_manager(self, graphs: DraftGraphs) -> None:
        """Take the means to capture what runs behind the pass over the step's rows.

        That pass, and all of `propose` in a step that is one graph, is captured with the step.
        """
        return None

    def capture(self) -> None:
        """Capture it, after `init_cudagraph_manager` and once the cache is bound."""
        return None

    def pause_graphs(self, paused: bool) -> None:
        """Run eagerly while `paused`."""
        return None

    def padded_requests(self, num_requests: int) -> int:
        """How many requests a step should have, some of them padding, so that a captured pass
        serves it.
        """
        return num_requests

    @abstractmethod
    def propose(
        self, target_step: TargetStep, verdict: Verdict, batch: Batch, state: RequestState
    ) -> Draft | None:
        """Drafts [B, K] from the state after commit; None where K is 0. Reads nothing back to the
        host."""
