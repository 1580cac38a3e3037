"""The runner of one pipeline stage. The last stage runs every verb of a step; the others prepare,
run their layers and send the stream on, and apply the results when they come."""

from __future__ import annotations

from functools import partial

import torch

from hydraspec.engine.native.draft_check import check_drafts_on_cpu
from hydraspec.engine.native.kv_cache import KVCache
from hydraspec.engine.native.results import LaunchedStep, StepResult, launched_on_cpu
from hydraspec.engine.native.runner import Runner
from hydraspec.engine.native.stage_io import StageIO
from hydraspec.models.base import TargetModel
from hydraspec.sampling.verifier import Verifier
from hydraspec.speculators.base import BaseSpeculator
from hydraspec.types import Batch, RequestState, StepPlan


class StageRunner(Runner):
    """On a CPU."""

    io: StageIO

    def __init__(
        self,
        target: TargetModel,
        speculator: BaseSpeculator,
        verifier: Verifier,
        kv: KVCache,
        state: RequestState,
        io: StageIO,
    ) -> None:
        super().__init__(target, speculator, verifier, kv, state)
        self.io = io

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start a step; its results have to be read in the order of steps, and before another step
        with the same requests is launched."""
        io = self.io
        io.receive(int(plan.num_rows.sum()))
        if io.stage.is_last:
            step = self.run_eagerly(plan)
            check_drafts_on_cpu(step.draft, self.target.vocab_size, self.speculator)
            io.send_results(step)
            return launched_on_cpu(step)
        batch = self.prepare(self.place(plan))
        io.send(*self.hidden_states(batch))
        return LaunchedStep(partial(self._applied, batch))

    @torch.inference_mode()
    def _applied(self, batch: Batch) -> StepResult:
        verdict = self.io.apply_results(batch, self.state)
        return StepResult(
            verdict.tokens.numpy(),
            verdict.num_sampled.numpy(),
            verdict.not_finite.numpy(),
            batch.draft_tokens.numpy(),
        )
