"""Construction of an engine's runner, and runners of pipeline stages. The last stage runs every
verb of a step; the others prepare, run their layers, send the residual stream on, and apply the
results when they come.

Results are applied in the order of steps: before another step with the same requests is launched,
at the latest when the host reads them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from hydraspec.config.schema import LogprobsMode
from hydraspec.engine.cache.kv_cache import KVCache
from hydraspec.engine.cache.sizing import Models
from hydraspec.engine.run.device_runner import DeviceRunner
from hydraspec.engine.run.inputs import PlanTensors
from hydraspec.engine.run.late_rows import MOST_LATE_ROWS, LateStates
from hydraspec.engine.run.results import LaunchedStep, StepOutputs, StepResult
from hydraspec.engine.run.stage_io import StageIO, stack
from hydraspec.engine.run.state import new_request_state
from hydraspec.engine.run.step_graphs import CapturedStep, RunnerLimits
from hydraspec.engine.schedule.draft_lengths import (
    DraftLengths,
    build_draft_lengths,
    lengths_up_to,
    offered_lengths,
)
from hydraspec.graphs import GraphBackend, GraphModes, default_capture_sizes
from hydraspec.parallel.control import ALONE, Control
from hydraspec.sampling.verifier import build_verifier
from hydraspec.speculators.draft_model import DraftModelSpeculator
from hydraspec.types import StepPlan


def build_runner(
    models: Models,
    kv: KVCache,
    modes: GraphModes,
    backend: GraphBackend | None,
    control: Control = ALONE,
    *,
    activation_bytes: int = 0,
) -> DeviceRunner:
    """The runner of these models' steps. activation_bytes: as in RunnerLimits."""
    config, target, speculator = models.config, models.target, models.speculator
    num_drafts, most = speculator.num_speculative_tokens, config.engine.max_num_seqs
    state = new_request_state(
        num_slots=most,
        max_model_len=models.max_model_len,
        vocab_size=target.vocab_size,
        num_speculative_tokens=num_drafts,
        draft_vocab_size=speculator.draft_vocab_size,
        device=target.device,
        draft_vocab_map=speculator.draft_vocab_map,
        # Stages hand over tokens alone.
        estimates_survival=speculator.estimates_survival and models.link is None,
        follows_record=config.method.synthetic_trace is not None and num_drafts > 0,
    )
    verifier = build_verifier(
        config.method.verification.value,
        synthetic_acceptance_length=config.method.synthetic_acceptance_length,
        vocabulary=target.vocabulary,
    )
    limits = RunnerLimits(
        max_num_seqs=most,
        max_num_batched_tokens=config.engine.max_num_batched_tokens,
        num_speculative_tokens=num_drafts,
        max_seq_len=models.cache_size().max_tokens,
        capture_sizes=tuple(config.cudagraph.capture_sizes or default_capture_sizes(most)),
        launch_bound_rows=launch_bound_rows(target.hidden_size),
        draft_lengths=(
            lengths_up_to(num_drafts)
            if speculator.drafts_on_host
            else offered_lengths(config.method)
        ),
        is_by_request=bool(offered_lengths(config.method)),
        activation_bytes=activation_bytes,
        vocab_size=target.vocab_size,
    )
    runner = _kind(models)(
        *(target, speculator, verifier, kv, state),
        limits=limits,
        modes=modes,
        backend=backend,
        control=control,
    )
    runner.late = _late_states(models, runner)
    is_processed = config.sampling.logprobs_mode is LogprobsMode.processed
    runner.logprobs = replace(runner.logprobs, is_processed=is_processed)
    if models.link is not None:
        runner.io = StageIO.of(models)
    return runner


def _late_states(models: Models, runner: DeviceRunner) -> LateStates | None:
    """States that a drafter at rest would have read; None: it runs in every step."""
    drafter = models.speculator
    on_cpu = models.target.device.type == "cpu" and runner.graphs is None
    if not (on_cpu and runner.limits.is_by_request and models.link is None):
        return None
    if not (isinstance(drafter, DraftModelSpeculator) and drafter.may_rest):
        return None
    return LateStates(drafter, runner.state)


def draft_lengths_of(
    models: Models, runner: DeviceRunner, *, runs_ahead: bool
) -> DraftLengths | None:
    """The chooser of drafts for a runner's steps; see `build_draft_lengths`."""
    return build_draft_lengths(
        models.config,
        models.target.stage.count,
        reads_estimates=runner.state.draft_survivals is not None and not runs_ahead,
        most_late=0 if runner.late is None else MOST_LATE_ROWS,
    )


def _kind(models: Models) -> type[DeviceRunner]:
    if models.link is None:
        return DeviceRunner
    return LastStageRunner if models.target.stage.is_last else EarlierStageRunner


def launch_bound_rows(hidden_size: int) -> int:
    """Rows up to which the host takes longer to launch a layer's kernels than the device to run
    them: 0.28 ms (measured, E4B on one H200), against two operations for each of the layer's
    weights, about 14 * hidden_size ** 2 (11 to 17 in Gemma 4, Qwen3 and Llama), at 6e14 a second.
    """
    return int(0.28e-3 * 6e14 / (2 * 14 * hidden_size**2))


@dataclass(slots=True, eq=False)
class _Unapplied:
    """A launched step whose results this stage has not applied yet."""

    parts: list[StepPlan]
    reassigned: set[int] = field(default_factory=set)  # slots with another owner since
    found: LaunchedStep | None = None  # once they are applied


class LastStageRunner(DeviceRunner):
    """The runner of the last stage."""

    io: StageIO

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start a step; see DeviceRunner."""
        self.place_drafts(plan)
        parts = []
        for part, captured in self._split(plan):
            self.io.receive(num_rows_sent(part, captured))
            packed = self._launch_part(part, captured)
            parts.append((self.io.send_results(part, packed, self.state), len(part.slots)))
        return self._ring.launched(parts)


class EarlierStageRunner(DeviceRunner):
    """The runner of a stage before the last, which applies the last one's results to its state."""

    io: StageIO

    @cached_property
    def _unapplied(self) -> deque[_Unapplied]:
        return deque()

    @torch.inference_mode()
    def run_padding(self) -> None:
        """Run the largest possible step, of padding alone, and encode as many images as any."""
        self.images.encode_largest()
        self.captured_step(self._largest())

    def captured_step(self, inputs: PlanTensors) -> StepOutputs:
        """Computes this stage's part of a step: [1 + aux states, T, D] in place of results."""
        return StepOutputs(stack(*self.hidden_states(self.prepare(inputs))))

    def _launch_part(self, plan: StepPlan, captured: CapturedStep | None) -> Tensor:
        """Launch one part; returns [1 + aux states, T, D] for the next stage."""
        if captured is None:
            return self.captured_step(self.place(plan)).packed
        self._write(captured.descriptor, plan)
        return captured.replay().packed.clone()  # the next replay writes over the original

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start a step; see DeviceRunner."""
        self._apply_before(plan)
        self.place_drafts(plan)
        parts = self._split(plan)
        for part, captured in parts:
            self.io.receive(num_rows_sent(part, captured))
            self.io.send(self._launch_part(part, captured))
        step = _Unapplied([part for part, _ in parts])
        self._unapplied.append(step)
        return LaunchedStep(partial(self._result, step))

    def reassign(self, slot: int) -> None:
        for step in self._unapplied:
            step.reassigned.add(slot)

    def _apply_before(self, plan: StepPlan) -> None:
        """Apply the results of earlier steps of these requests, which their next step needs."""
        slots = set(plan.slots.tolist())
        for step in list(self._unapplied):
            kept = slots - step.reassigned
            if any(kept & set(part.slots.tolist()) for part in step.parts):
                self._apply(step)

    def _apply(self, step: _Unapplied) -> LaunchedStep:
        """Apply the results of a step, after those of all steps before it."""
        while step.found is None:
            oldest = self._unapplied.popleft()
            oldest.found = self._ring.launched(
                [
                    (self.io.apply_results(part, self.state, oldest.reassigned), len(part.slots))
                    for part in oldest.parts
                ]
            )
        return step.found

    @torch.inference_mode()
    def _result(self, step: _Unapplied) -> StepResult:
        return self._apply(step).result()


def num_rows_sent(plan: StepPlan, captured: CapturedStep | None) -> int:
    """Rows of the tensors that stages hand over: padded to a graph, where there is one."""
    return int(plan.num_rows.sum()) if captured is None else captured.descriptor.num_rows
