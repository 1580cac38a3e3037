"""The interface of every speculator, and defaults for those without weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from hydraspec_kernels.step_inputs import NewestRows, newest_rows
from torch import Tensor

from hydraspec.config.schema import RunConfig
from hydraspec.graphs import GraphBackend
from hydraspec.models.base import TargetModel
from hydraspec.models.draft_spec import DraftSpec
from hydraspec.models.kv_groups import BlockSize
from hydraspec.speculators.host import HostDrafts
from hydraspec.types import Batch, Draft, KVGroupSpec, RequestState, TargetStep, Verdict


@dataclass(slots=True, frozen=True)
class DraftGraphs:
    """Tools with which a drafter captures its decode pass."""

    sizes: tuple[int, ...]  # batch sizes worth a graph
    make_batch: Callable[[int], Batch]  # padding alone, in the memory of every batch of that size
    state: RequestState


class BaseSpeculator(ABC):
    """Proposes K tokens after each request's newest sampled token.

    A speculator that is used (a leaf) sets class attributes and overrides hooks of its base.
    """

    owns_kv_cache: ClassVar[bool] = False  # drafting writes KV into further groups
    # Tokens after a position that KV in those groups depends on: a draft row reads the next one.
    num_following_tokens: ClassVar[int] = 1
    reads_target_kv: ClassVar[bool] = False  # KV of the last layer of each kind that writes any
    # The reason, if `propose` cannot be captured; only such a drafter may read the device.
    cannot_be_captured: ClassVar[str | None] = None
    # `host_drafts` proposes before a step is launched, in place of `propose` after one. Each
    # pipeline stage loads such a drafter and proposes the same.
    drafts_on_host: ClassVar[bool] = False

    def __init__(self, config: RunConfig) -> None:
        self.num_speculative_tokens = config.method.most_drafts
        self.spec: DraftSpec | None = None
        self.aux_layer_ids: tuple[int, ...] = ()  # target states that propose reads

    def draft_length(self, batch: Batch) -> int:
        """Number of drafts to propose after this batch's step: K, or fewer where the engine chooses
        it per step."""
        return self.num_speculative_tokens if batch.draft_length is None else batch.draft_length

    @property
    def reads_all_hidden_states(self) -> bool:
        """Returns whether `propose` reads target_step.hidden_states of rows without logits. If not,
        the target may leave those rows out from its last layer that writes KV on.
        """
        return self.owns_kv_cache  # which is filled by a pass over all rows

    @property
    def reads_next_images(self) -> bool:
        """Returns whether `propose` reads `Batch.next_encoded`: encoder outputs for rows whose
        following token is an image's, in place of the placeholder's embedding.
        """
        return False

    @property
    def num_lookahead_tokens(self) -> int:
        """Positions after a request's rows that drafting writes KV to."""
        return max(0, self.num_speculative_tokens - 1) if self.owns_kv_cache else 0

    def kv_groups(self, block_size: BlockSize, first_layer: int) -> list[KVGroupSpec]:
        """KV groups the drafter owns; their layers count from `first_layer`."""
        return []

    @abstractmethod
    def load(self, target: TargetModel) -> None:
        """Load the drafter's weights and check them against the target.

        Raises:
            CheckpointError: naming both sides, where drafter and target do not belong together.
        """

    def bind_kv_caches(self, specs: Sequence[KVGroupSpec], caches: list[Tensor | None]) -> None:
        """Hand over the cache: groups, and a tensor per layer, the target's layers and then the
        drafter's own; None for layers that share KV.
        """
        return None

    @property
    def draft_vocab_size(self) -> int | None:
        """Width of the draft probabilities that the engine keeps; None while drafts are greedy."""
        return None

    @property
    def draft_vocab_map(self) -> Tensor | None:
        """The target's ids [V_draft] of the drafter's vocabulary; None where they are the same."""
        return None

    @property
    def estimates_survival(self) -> bool:
        """Returns whether drafts come with `survivals`, which the engine then keeps."""
        return False

    @property
    def min_survival(self) -> float | None:
        """Estimated survival below which `propose` leaves drafts out; None: it proposes all K."""
        return None

    @property
    def host_drafts(self) -> HostDrafts | None:
        """The drafts of a loaded drafter that drafts on the host."""
        return None

    def memory_bytes(self) -> int:
        """Bytes of weights the drafter holds beside the target's."""
        return 0

    def init_cudagraph_manager(self, backend: GraphBackend) -> None:
        """Prepare to capture the decode pass: drafts 2 to K, after the pass over the step's rows.

        The pass over the step's rows is captured with the step, and so is all of `propose` where
        a graph holds the whole step.
        """
        return None

    def capture(self, graphs: DraftGraphs) -> None:
        """Capture the decode pass, after `init_cudagraph_manager` and `bind_kv_caches`. `graphs`
        must not be stored: its `make_batch` is bound to the runner, which holds this speculator."""
        return None

    def pause_graphs(self, paused: bool) -> None:
        """Run the decode pass eagerly while `paused`."""
        return None

    def padded_requests(self, num_requests: int) -> int:
        """Number of requests, padding included, that an eager step should have so that the captured
        decode pass can run in it.
        """
        return num_requests

    def newest_row(self, verdict: Verdict, batch: Batch, state: RequestState) -> NewestRows:
        """Rows at which drafting starts: each request's newest computed row after verification, at
        position p, and the token sampled after it. Requests that did not sample have any valid row.
        """
        return newest_rows(verdict, batch, state.num_computed)

    @abstractmethod
    def propose(
        self, target_step: TargetStep, verdict: Verdict, batch: Batch, state: RequestState
    ) -> Draft | None:
        """Drafts [B, K] from the state after commit, -1 where there is none; None where K is 0 or
        no request samples. It must not read the device from the host, unless `cannot_be_captured`.

        Where the engine chooses K per step, the drafter's own cache is kept current at 0 drafts
        too, and only the first `draft_length(batch)` columns are used: the others may be left out.
        """
