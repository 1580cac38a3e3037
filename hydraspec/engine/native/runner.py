"""The device's share of a step: prepare → forward → verify → commit → propose, over persistent
state.

Nothing in here reads the device from the host; `NativeEngine` copies the results out after the
step.
"""

from __future__ import annotations

import torch

from hydraspec.engine.native.inputs import LayoutCache, prepare
from hydraspec.engine.native.kv_cache import KVCache
from hydraspec.engine.native.state import commit, store_draft
from hydraspec.engine.native.timing import PhaseClock
from hydraspec.models.base import TargetModel
from hydraspec.sampling.verifier import Verifier
from hydraspec.speculators.base import BaseSpeculator
from hydraspec.types import Batch, RequestState, StepPlan, TargetStep, Verdict


class Runner:
    """Runs the verbs of a step. Each is a method so that the engine can time it and a graph can
    hold it."""

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
        self._layouts = LayoutCache(target.device)
        speculator.bind_kv_caches(kv.specs, kv.caches)

    def prepare(self, plan: StepPlan) -> Batch:
        return prepare(plan, self._layouts.get(plan), self.state, self.kv.specs, self.target.device)

    def forward(self, batch: Batch) -> TargetStep:
        hidden, aux = self.target.forward(batch, self.kv.caches, self.speculator.aux_layer_ids)
        rows = hidden if batch.logits_rows is None else hidden.index_select(0, batch.logits_rows)
        return TargetStep(
            hidden_states=hidden, logits=self.target.compute_logits(rows), aux_hidden_states=aux
        )

    def verify(self, batch: Batch, target_step: TargetStep) -> Verdict:
        return self.verifier(target_step.logits, batch, self.state, batch.flags)

    def commit(self, batch: Batch, verdict: Verdict) -> None:
        commit(self.state, batch, verdict)

    def propose(self, batch: Batch, target_step: TargetStep, verdict: Verdict) -> None:
        draft = self.speculator.propose(target_step, verdict, batch, self.state)
        if draft is not None:
            store_draft(self.state, batch, draft)

    def time_with(self, clock: PhaseClock) -> None:
        """Have `clock` take the time of every verb."""
        for verb in ("prepare", "forward", "verify", "commit", "propose"):
            phase = "verify" if verb == "commit" else verb
            setattr(self, verb, clock.timed(phase, getattr(self, verb)))

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> tuple[Batch, TargetStep, Verdict]:
        """The device's verbs, in order."""
        batch = self.prepare(plan)
        target_step = self.forward(batch)
        verdict = self.verify(batch, target_step)
        self.commit(batch, verdict)
        self.propose(batch, target_step, verdict)
        return batch, target_step, verdict
