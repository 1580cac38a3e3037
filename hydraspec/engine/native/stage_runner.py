"""Runners of one pipeline stage. The last stage runs every verb of a step; the others prepare, run
their layers and send the stream on, and apply the results when they come.

A launched step's results have to be read in the order of steps, and before another step with the
same requests is launched.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from hydraspec.engine.native.device_runner import DeviceRunner
from hydraspec.engine.native.draft_check import check_drafts_on_cpu
from hydraspec.engine.native.inputs import PlanTensors
from hydraspec.engine.native.results import (
    LaunchedStep,
    StepOutputs,
    StepResult,
    packed_results,
    unpacked,
)
from hydraspec.engine.native.runner import Runner
from hydraspec.engine.native.stage_io import StageIO, stack
from hydraspec.engine.native.step_graphs import CapturedStep
from hydraspec.types import StepPlan


class StageRunner(Runner):
    """On a CPU."""

    io: StageIO

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start a step."""
        self.io.receive(int(plan.num_rows.sum()))
        if not self.io.stage.is_last:
            batch = self.prepare(self.place(plan))
            self.io.send(stack(*self.hidden_states(batch)))
            return LaunchedStep(partial(self._applied, plan))
        step = self.run_eagerly(plan)
        check_drafts_on_cpu(step.draft, self.target.vocab_size, self.speculator)
        packed = self.io.send_results(plan, packed_results(step), self.state)
        return LaunchedStep(lambda: self._unpacked(packed))

    @torch.inference_mode()
    def _applied(self, plan: StepPlan) -> StepResult:
        return self._unpacked(self.io.apply_results(plan, self.state))

    def _unpacked(self, packed: Tensor) -> StepResult:
        return unpacked(packed.numpy(), self.speculator.num_speculative_tokens)


class LastStageRunner(DeviceRunner):
    """Of the last stage, on a device."""

    io: StageIO

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start a step; see DeviceRunner."""
        parts = []
        for part, captured in self._split(plan):
            self.io.receive(num_rows_sent(part, captured))
            packed = self._launch_part(part, captured)
            parts.append((self.io.send_results(part, packed, self.state), len(part.slots)))
        return self._ring.launched(parts)


class EarlierStageRunner(DeviceRunner):
    """Of a stage before the last, on a device."""

    io: StageIO

    @torch.inference_mode()
    def run_padding(self) -> None:
        """Run the largest possible step, of padding alone."""
        self.captured_step(self._largest())

    def captured_step(self, inputs: PlanTensors) -> StepOutputs:
        """What this stage computes of a step, in place of packed results."""
        return StepOutputs(stack(*self.hidden_states(self.prepare(inputs))))

    def _launch_part(self, plan: StepPlan, captured: CapturedStep | None) -> Tensor:
        """[1 + aux states, T, D] for the next stage."""
        if captured is None:
            return self.captured_step(self.place(plan)).packed
        self._write(captured.descriptor, plan)
        return captured.replay().packed.clone()  # which the next replay writes over

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start a step; see DeviceRunner."""
        parts = self._split(plan)
        for part, captured in parts:
            self.io.receive(num_rows_sent(part, captured))
            self.io.send(self._launch_part(part, captured))
        return LaunchedStep(partial(self._applied, [part for part, _ in parts]))

    @torch.inference_mode()
    def _applied(self, parts: list[StepPlan]) -> StepResult:
        results = [(self.io.apply_results(p, self.state), len(p.slots)) for p in parts]
        return self._ring.launched(results).result()


def num_rows_sent(plan: StepPlan, captured: CapturedStep | None) -> int:
    """Rows of what stages hand over: padded to a graph, where there is one."""
    return int(plan.num_rows.sum()) if captured is None else captured.descriptor.num_rows
