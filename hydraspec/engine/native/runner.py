"""The device's share of a step: prepare → forward → verify → commit → propose, over persistent
state.

Nothing in here reads the device from the host: results travel by themselves (`LaunchedStep`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from hydraspec.engine.native.inputs import PlanPlacer, PlanTensors, prepare
from hydraspec.engine.native.kv_cache import KVCache
from hydraspec.engine.native.launch import LaunchedStep, launched_on_cpu
from hydraspec.engine.native.state import commit, store_draft
from hydraspec.engine.native.timing import Clock
from hydraspec.models.base import TargetModel
from hydraspec.sampling.verifier import Verifier
from hydraspec.speculators.base import BaseSpeculator
from hydraspec.types import (
    Batch,
    RequestState,
    RowSegment,
    SamplingFlags,
    StepPlan,
    TargetStep,
    Verdict,
)

VERBS = ("place", "prepare", "forward", "verify", "commit", "propose")
PHASES = {"place": "prepare", "commit": "verify"}  # verbs that are a part of another's phase


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
        self._placer = PlanPlacer(target.device)
        self._kept_logits: list[Tensor] | None = None  # somebody asks for them, see `keep_logits`
        speculator.bind_kv_caches(kv.specs, kv.caches)

    def place(self, plan: StepPlan) -> PlanTensors:
        """The plan's numbers where the device reads them."""
        return self._placer.place(plan)

    def prepare(self, plan: PlanTensors) -> Batch:
        return prepare(plan, self.state, self.kv.specs)

    def forward(self, batch: Batch) -> TargetStep:
        needed = None if self.speculator.reads_all_hidden_states else batch.needed
        hidden, aux = self.target.forward(
            batch, self.kv.caches, self.speculator.aux_layer_ids, needed
        )
        return TargetStep(
            hidden_states=hidden, logits=self._logits(batch, hidden), aux_hidden_states=aux
        )

    def _logits(self, batch: Batch, hidden: Tensor) -> Tensor:
        if batch.logits_rows is None:
            return self.target.compute_logits(hidden)
        if batch.logits_rows.shape[0] == 0:  # nobody samples: no kernel runs on no rows
            return hidden.new_empty(0, self.target.vocab_size)
        return self.target.compute_logits(hidden.index_select(0, batch.logits_rows))

    def verify(self, batch: Batch, target_step: TargetStep) -> Verdict:
        return self.verifier(target_step.logits, batch, self.state, batch.flags)

    def commit(self, batch: Batch, verdict: Verdict) -> None:
        commit(self.state, batch, verdict)

    def propose(self, batch: Batch, target_step: TargetStep, verdict: Verdict) -> None:
        draft = self.speculator.propose(target_step, verdict, batch, self.state)
        if draft is not None:
            store_draft(self.state, batch, draft)

    def time_with(self, clock: Clock) -> None:
        """Have `clock` take the time of every verb."""
        for verb in VERBS:
            phase = PHASES.get(verb, verb)
            setattr(self, verb, clock.timed(phase, getattr(self, verb)))

    @contextmanager
    def timed_with(self, clock: Clock) -> Iterator[None]:
        """The same for a while."""
        before = {verb: getattr(self, verb) for verb in VERBS}
        self.time_with(clock)
        try:
            yield
        finally:
            for verb, call in before.items():
                setattr(self, verb, call)

    def capture_variant(self, flags: SamplingFlags) -> None:
        """Capture graphs of a way of sampling ahead of the requests that need them."""
        return None

    def num_captured(self) -> int:
        """Graphs captured so far."""
        return 0

    def eagerly(self) -> AbstractContextManager[None]:
        """While it lasts, steps run as Python calls, also those that have graphs."""
        return nullcontext()

    @contextmanager
    def keep_logits(self) -> Iterator[list[Tensor]]:
        """While it lasts, steps run eagerly and the list has the logits [N, V] of the newest that
        sampled. Nothing keeps them otherwise: they are large, and graphs write over theirs."""
        kept: list[Tensor] = []
        self._kept_logits = kept
        try:
            with self.eagerly():
                yield kept
        finally:
            self._kept_logits = None

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> tuple[Batch, TargetStep, Verdict]:
        """The device's verbs, in order."""
        return self.run(self.place(plan))

    def run(self, inputs: PlanTensors) -> tuple[Batch, TargetStep, Verdict]:
        """The same over a plan that is in place: what a graph of a whole step holds."""
        batch, target_step, verdict = self.decide(inputs)
        self.propose(batch, target_step, verdict)
        return batch, target_step, verdict

    def decide(self, inputs: PlanTensors) -> tuple[Batch, TargetStep, Verdict]:
        """A step but for its last verb."""
        batch = self.prepare(inputs)
        target_step = self.forward(batch)
        if self._kept_logits is not None and target_step.logits.shape[0]:
            self._kept_logits[:] = [target_step.logits]
        verdict = self.verify(batch, target_step)
        self.commit(batch, verdict)
        return batch, target_step, verdict

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start a step; its results come when they are asked for."""
        batch, _, verdict = self.step(plan)
        return launched_on_cpu(batch, verdict)


def split_plan(plan: StepPlan, count: int) -> tuple[StepPlan, StepPlan]:
    """The first `count` requests, and the others, as plans of their own."""
    first: list[RowSegment] = []
    rest: list[RowSegment] = []
    num_rows = int(plan.num_rows[:count].sum())
    for segment in plan.segments:
        if segment.first_request < count:
            first.append(segment)
        else:
            rest.append(
                replace(
                    segment,
                    first_row=segment.first_row - num_rows,
                    first_request=segment.first_request - count,
                )
            )
    return _part(plan, slice(count), first), _part(plan, slice(count, None), rest)


def _part(plan: StepPlan, part: slice, segments: list[RowSegment]) -> StepPlan:
    return replace(
        plan,
        slots=plan.slots[part],
        num_rows=plan.num_rows[part],
        num_drafts=plan.num_drafts[part],
        samples=plan.samples[part],
        segments=tuple(segments),
        block_tables=[table.part(part) for table in plan.block_tables],
    )
