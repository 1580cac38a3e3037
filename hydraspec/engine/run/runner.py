"""The device's part of a step: prepare → forward → verify → commit → propose, over persistent
state.

Nothing here reads the device from the host: results are copied asynchronously (`LaunchedStep`).
"""

from __future__ import annotations

from hydraspec_kernels.sampling.verification import commit_tokens
from torch import Tensor

from hydraspec.engine.cache.kv_cache import KVCache
from hydraspec.engine.run.draft_check import check_draft
from hydraspec.engine.run.inputs import LateRows, PlanTensors, prepare
from hydraspec.engine.run.late_rows import LateStates
from hydraspec.engine.run.results import DeviceStep
from hydraspec.engine.run.stage_io import StageIO
from hydraspec.engine.run.state import of_full_width, store_draft
from hydraspec.engine.run.timing import Clock, no_clock
from hydraspec.models.base import TargetModel
from hydraspec.sampling.logprobs import LogprobRule, keep_logprobs
from hydraspec.sampling.verifier import Verifier
from hydraspec.speculators.base import BaseSpeculator
from hydraspec.types import (
    Batch,
    Draft,
    RequestState,
    TargetStep,
    Verdict,
)


class Runner:
    """Runs the verbs of a step, which a graph may hold."""

    def __init__(
        self,
        target: TargetModel,
        speculator: BaseSpeculator,
        verifier: Verifier,
        kv: KVCache,
        state: RequestState,
    ) -> None:
        self.target = target
        self.speculator = speculator
        self.verifier = verifier
        self.kv = kv
        self.state = state
        self.clock: Clock = no_clock
        self.io: StageIO | None = None  # of a pipeline stage
        self._keeps_logits = False
        self.kept_logits: Tensor | None = None  # [N, V], see `keeping_logits`
        self.late: LateStates | None = None  # None: the drafter runs in every step
        self.logprobs = LogprobRule(is_processed=False, vocabulary=target.vocabulary)
        speculator.bind_kv_caches(kv.specs, kv.caches)

    def prepare(self, plan: PlanTensors) -> Batch:
        return prepare(plan, self.state, self.kv.specs)

    def hidden_states(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        """Run the target's forward pass, or a pipeline stage's part of it; returns hidden states
        [T, D] and aux states, [T, D] each."""
        needed = None if self.speculator.reads_all_hidden_states else batch.needed
        received = () if self.io is None else (self.io.received(batch),)
        return self.target.forward(
            batch, self.kv.caches, self.speculator.aux_layer_ids, needed, *received
        )

    def forward(self, batch: Batch) -> TargetStep:
        hidden, aux = self.hidden_states(batch)
        logits = self._logits(batch, hidden)
        if self._keeps_logits and logits.shape[0]:
            self.kept_logits = self.target.vocabulary.whole(logits)
        return TargetStep(hidden_states=hidden, logits=logits, aux_hidden_states=aux)

    def _logits(self, batch: Batch, hidden: Tensor) -> Tensor:
        if batch.logits_rows is None:
            return self.target.compute_logits(hidden)
        if batch.logits_rows.shape[0] == 0:  # no request samples, and no kernel takes zero rows
            return hidden.new_empty(0, self.target.vocabulary.num_rows)
        return self.target.compute_logits(hidden.index_select(0, batch.logits_rows))

    def verify(self, batch: Batch, target_step: TargetStep) -> Verdict:
        """The verifier's decision on the drafts of a batch: tokens [B, K+1] and counts [B]. Log
        probabilities of its tokens go to the state, if some request asks for them."""
        logits, state, rows = target_step.logits, self.state, None
        keeps_logprobs = batch.flags.any_logprobs and state.logprobs is not None
        if keeps_logprobs and logits.shape[0]:
            rows = self.logprobs.rows(logits, batch, state)  # the verifier may change logits
        verdict = self.verifier(logits, batch, state, batch.flags)
        if rows is not None:
            keep_logprobs(rows, batch, state, verdict)
        return verdict

    def commit(self, batch: Batch, verdict: Verdict) -> None:
        """Write the verdict into the request state: emitted tokens after the computed ones, then
        the new computed count."""
        commit_tokens(self.state, batch, verdict)

    def propose(
        self,
        batch: Batch,
        target_step: TargetStep,
        verdict: Verdict,
        late: LateRows | None = None,
    ) -> Draft | None:
        if self.speculator.drafts_on_host:
            return None
        draft = None
        if self.late is None or not self.late.hold_or_fill(late, batch, target_step):
            draft = self.speculator.propose(target_step, verdict, batch, self.state)
        if draft is not None:
            check_draft(draft, batch, self.state, self.speculator)
        if batch.draft_length is not None:
            draft = of_full_width(draft, batch, self.speculator.num_speculative_tokens)
        if draft is not None:
            store_draft(self.state, batch, draft)
        return draft

    def reassign(self, slot: int) -> None:
        """Hook for a new owner of `slot`: results in flight for the last owner are dropped."""

    def run(self, inputs: PlanTensors, *, proposes: bool = True) -> DeviceStep:
        """Run the device's verbs, in order, over an uploaded plan; `propose` only if `proposes`."""
        clock = self.clock
        with clock("prepare"):
            batch = self.prepare(inputs)
        with clock("forward"):
            target_step = self.forward(batch)
        with clock("verify"):
            verdict = self.verify(batch, target_step)
        with clock("verify"):
            self.commit(batch, verdict)
        draft = None
        if proposes:
            with clock("propose"):
                draft = self.propose(batch, target_step, verdict, inputs.late)
        return DeviceStep(batch, target_step, verdict, draft)
