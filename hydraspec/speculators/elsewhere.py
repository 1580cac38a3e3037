"""The drafter as the pipeline stages before the last one know it: facts, and no weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hydraspec.config.schema import RunConfig
from hydraspec.models.base import TargetModel
from hydraspec.models.draft_spec import DraftSpec
from hydraspec.models.kv_groups import BlockSize
from hydraspec.parallel.stages import StageLink
from hydraspec.speculators.base import BaseSpeculator
from hydraspec.types import (
    Batch,
    Draft,
    KVGroupSpec,
    RequestState,
    TargetStep,
    UserError,
    Verdict,
)


@dataclass(slots=True, frozen=True, kw_only=True)
class DrafterFacts:
    """Facts that all stages have to know of the drafter that the last one has loaded."""

    spec: DraftSpec | None
    aux_layer_ids: tuple[int, ...]  # states that stages capture and send on
    num_lookahead_tokens: int
    num_following_tokens: int
    kv_groups: Sequence[KVGroupSpec]  # its own: every stage allocates their blocks alike
    cannot_be_captured: str | None

    @classmethod
    def of(
        cls, speculator: BaseSpeculator, target: TargetModel, block_size: BlockSize
    ) -> DrafterFacts:
        """Facts of a loaded drafter."""
        return cls(
            spec=speculator.spec,
            aux_layer_ids=tuple(speculator.aux_layer_ids),
            num_lookahead_tokens=speculator.num_lookahead_tokens,
            num_following_tokens=speculator.num_following_tokens,
            kv_groups=speculator.kv_groups(block_size, target.num_layers),
            cannot_be_captured=speculator.cannot_be_captured,
        )


class DrafterElsewhere(BaseSpeculator):
    """Stands in for the drafter of the last stage. Drafts come with that stage's results."""

    def __init__(self, config: RunConfig, facts: DrafterFacts) -> None:
        super().__init__(config)
        self._facts = facts
        self.spec, self.aux_layer_ids = facts.spec, facts.aux_layer_ids
        self.cannot_be_captured = facts.cannot_be_captured  # type: ignore[misc]
        self.num_following_tokens = facts.num_following_tokens  # type: ignore[misc]

    @property
    def num_lookahead_tokens(self) -> int:
        return self._facts.num_lookahead_tokens

    def kv_groups(self, block_size: BlockSize, first_layer: int) -> list[KVGroupSpec]:
        """The drafter's groups, of which this stage has block tables and no cache."""
        return [replace(spec, layers=()) for spec in self._facts.kv_groups]

    def load(self, target: TargetModel) -> None:
        """Does nothing: the last stage holds the drafter's weights."""

    def propose(
        self, target_step: TargetStep, verdict: Verdict, batch: Batch, state: RequestState
    ) -> Draft:
        raise AssertionError("only the last stage drafts")


def loaded_drafter(
    speculator: BaseSpeculator, target: TargetModel, config: RunConfig, link: StageLink | None
) -> BaseSpeculator:
    """The loaded drafter; on pipeline stages before the last, a stand-in with facts of it.

    Raises:
        UserError: on every stage, the one that `load` raised on the last stage.
    """
    if link is None or speculator.drafts_on_host:
        speculator.load(target)
        return speculator
    found: DrafterFacts | UserError | None = None
    if target.stage.is_last:
        try:
            speculator.load(target)
            found = DrafterFacts.of(speculator, target, config.engine.kv_cache.block_size_of)
        except UserError as error:
            found = error
    shared: DrafterFacts | UserError = link.share(found)
    if isinstance(shared, UserError):
        raise shared
    return speculator if target.stage.is_last else DrafterElsewhere(config, shared)
