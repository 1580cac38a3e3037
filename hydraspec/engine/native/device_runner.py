"""A runner whose steps are launched: plans uploaded, batches padded to a graph where one fits,
results on their way before the step has run.

Every shape here is a host number. Padding requests have the state's last slot, no rows of their
own, length 0 and do not sample; padding rows have id 0, position 0 and cache row -1.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from hydraspec.engine.native.inputs import PlanTensors, rows_worth_naming
from hydraspec.engine.native.kv_cache import KVCache
from hydraspec.engine.native.rehearsal import rehearsals
from hydraspec.engine.native.results import (
    DeviceStep,
    LaunchedStep,
    ResultRing,
    StepOutputs,
    packed_results,
)
from hydraspec.engine.native.runner import Runner, split_plan
from hydraspec.engine.native.upload import PlanUpload, UploadShape
from hydraspec.engine.native.variants import GREEDY, GREEDY_VARIANT, SamplingVariants
from hydraspec.graphs import (
    Captured,
    Descriptor,
    GraphBackend,
    GraphManager,
    GraphModes,
    mixed_row_sizes,
)
from hydraspec.graphs.modes import NONE, PIECEWISE
from hydraspec.models.base import TargetModel
from hydraspec.sampling.verifier import Verifier
from hydraspec.speculators.base import BaseSpeculator, DraftGraphs
from hydraspec.types import (
    Batch,
    RequestState,
    RowSegment,
    SamplingFlags,
    StepPlan,
)

log = logging.getLogger(__name__)

# A step of few prefill rows keeps the device less busy than the host: its decodes go first, as a
# graph. Behind many rows they cost least where they share the pass over the weights.
MAX_SPLIT_ROWS = 512
NOT_CAPTURED = (
    "some steps that sample run without CUDA graphs, for which there is no memory left; lower "
    "engine.kv_cache.memory_gib to have them"
)


@dataclass(slots=True, frozen=True, kw_only=True)
class RunnerLimits:
    """The largest batches, and the batch sizes that get graphs."""

    max_num_seqs: int
    max_num_batched_tokens: int
    num_speculative_tokens: int
    max_seq_len: int  # positions a block table can name
    capture_sizes: tuple[int, ...]


CapturedStep: TypeAlias = Captured[PlanTensors, StepOutputs]


class DeviceRunner(Runner):
    """Launches steps, eagerly or as graphs. The same verbs in the same order as any runner's."""

    def __init__(
        self,
        target: TargetModel,
        speculator: BaseSpeculator,
        verifier: Verifier,
        kv: KVCache,
        state: RequestState,
        *,
        limits: RunnerLimits,
        modes: GraphModes,
        backend: GraphBackend | None,
    ) -> None:
        super().__init__(target, speculator, verifier, kv, state)
        self.limits, self.modes, self.backend = limits, modes, backend
        self._rows = limits.num_speculative_tokens + 1  # of a decoding request
        self.upload = PlanUpload(
            UploadShape(
                max_num_seqs=limits.max_num_seqs,
                max_num_rows=limits.max_num_batched_tokens,
                num_speculative_tokens=limits.num_speculative_tokens,
                table_widths=kv.table_widths,
            ),
            target.device,
        )
        self._ring = ResultRing(limits.max_num_seqs, limits.num_speculative_tokens, target.device)
        self._variants = SamplingVariants()
        self._uncaptured: set[Descriptor] = set()  # the device's memory was too small
        self._memory_bytes: dict[str, int] = {}  # of the engine, as are the warnings
        self._warnings: list[str] = []
        self.graphs: GraphManager[PlanTensors, StepOutputs] | None = None
        if backend is not None and modes.enabled:
            self.graphs = GraphManager(
                "step", backend, self._static_inputs, self._captured_step, in_pieces=self._in_pieces
            )

    # ------------------------------------------------------------------ capture

    @torch.inference_mode()
    def capture(self, memory_bytes: dict[str, int], warnings: list[str]) -> None:
        """Capture what the mode asks for, for greedy steps; others are captured when first met.

        memory_bytes["graphs"] counts all of them, and `warnings` tells why one that was met could
        not be captured: both also later.
        """
        if self.graphs is None or self.backend is None:
            return
        self._memory_bytes, self._warnings = memory_bytes, warnings
        with self._counted_memory():
            self._capture_greedy(self.graphs, self.backend)

    def _capture_greedy(
        self, graphs: GraphManager[PlanTensors, StepOutputs], backend: GraphBackend
    ) -> None:
        sizes = self.limits.capture_sizes
        if self.modes.draft != NONE:
            self.speculator.init_cudagraph_manager(
                DraftGraphs(backend, sizes, self._draft_batch, self.state)
            )
            self.speculator.capture()
        graphs.capture_all(self.descriptors())

    @contextmanager
    def _counted_memory(self) -> Iterator[None]:
        """Adds what is captured meanwhile to the engine's figure, also if a capture fails."""
        assert self.backend is not None
        before = self.backend.num_bytes()
        try:
            yield
        finally:
            taken = self.backend.num_bytes() - before
            self._memory_bytes["graphs"] = self._memory_bytes.get("graphs", 0) + taken

    def descriptors(self) -> list[Descriptor]:
        """What the mode asks for: greedy steps of decodes by batch size, mixed ones by rows."""
        limits, greedy = self.limits, GREEDY_VARIANT
        most_rows = min(limits.max_num_seqs * self._rows, limits.max_num_batched_tokens)
        found = []
        if self.modes.decode != NONE:
            found = [
                Descriptor(
                    num_requests=size,
                    num_rows=size * self._rows,
                    rows_per_request=self._rows,
                    variant=greedy,
                )
                for size in limits.capture_sizes
                if size * self._rows <= most_rows
            ]
        if self.modes.mixed != NONE:
            found += [
                Descriptor(
                    num_requests=limits.max_num_seqs,
                    num_rows=rows,
                    rows_per_request=None,
                    variant=greedy,
                )
                for rows in mixed_row_sizes(
                    limits.capture_sizes, self._rows, most_rows, limits.max_num_batched_tokens
                )
            ]
        return found

    @torch.inference_mode()
    def capture_variant(self, flags: SamplingFlags) -> None:
        """Capture a way of sampling in every shape that greedy steps have, as far as memory
        allows: none of its steps is then captured when it is met."""
        if self.graphs is None:
            return
        variant = self._variants.serving(flags)
        for greedy in self.graphs.descriptors[::-1]:  # the largest first, as ever
            wanted = replace(greedy, variant=variant)
            if greedy.variant == GREEDY_VARIANT and not (
                wanted in self._uncaptured or self.graphs.has(wanted)
            ):
                self._capture_late(wanted)

    def num_graphs(self) -> int:
        """Captured steps."""
        return 0 if self.graphs is None else len(self.graphs)

    def num_captured(self) -> int:
        return 0 if self.graphs is None else self.graphs.num_captured

    @torch.inference_mode()
    def run_padding(self) -> None:
        """The largest step there is, of padding alone."""
        self.run(self._static_inputs(self._largest()))

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Run, on padding and prompts of nothing, the largest step, those that `capture` will meet,
        and such as will run eagerly: for the sake of their kernels, before there are requests."""
        limits = self.limits
        plans = rehearsals(
            *({1, *limits.capture_sizes}, limits.num_speculative_tokens),
            max_rows=limits.max_num_batched_tokens,
            max_seq_len=limits.max_seq_len,
            decodes=self.modes.decode == NONE,
        )
        with self.eagerly():
            for descriptor in [self._largest(), *self.descriptors()]:
                self._captured_step(self._static_inputs(descriptor))
            for plan in plans:
                self._launch_part(plan, None)

    def _largest(self) -> Descriptor:
        limits = self.limits
        return Descriptor(
            num_requests=limits.max_num_seqs,
            num_rows=limits.max_num_batched_tokens,
            rows_per_request=None,
            variant=GREEDY_VARIANT,
        )

    @contextmanager
    def eagerly(self) -> Iterator[None]:
        self._pause_graphs(True)
        try:
            yield
        finally:
            self._pause_graphs(False)

    def _pause_graphs(self, paused: bool) -> None:
        if self.graphs is not None:
            self.graphs.is_paused = paused
        self.speculator.pause_graphs(paused)

    def _in_pieces(self, descriptor: Descriptor) -> bool:
        mixed = descriptor.rows_per_request is None
        return (self.modes.mixed if mixed else self.modes.decode) == PIECEWISE

    def _static_inputs(self, descriptor: Descriptor) -> PlanTensors:
        """A batch of padding alone, in the memory that plans of this shape are written to."""
        self.upload.write(descriptor, None)
        all_greedy, flags = cast(tuple[bool, SamplingFlags], descriptor.variant)
        return self.upload.view(descriptor, self._segments(descriptor), all_greedy, flags)

    def _segments(self, descriptor: Descriptor) -> tuple[RowSegment, ...]:
        """Bounds that hold for every batch of this shape."""
        b, t, longest = descriptor.num_requests, descriptor.num_rows, self.limits.max_seq_len
        if descriptor.rows_per_request is not None:
            return (RowSegment(0, 0, b, descriptor.rows_per_request, longest),)
        whole = RowSegment(0, 0, 1, t, longest)  # one request may have all the rows
        return (whole, RowSegment(t, 1, b - 1, 0, longest)) if b > 1 else (whole,)

    def _captured_step(self, inputs: PlanTensors) -> StepOutputs:
        step = self.run(inputs, proposes=False)
        packed = packed_results(step)
        if not self.modes.holds_propose:
            return StepOutputs(packed, undrafted=step)
        self._propose_late(step)
        return StepOutputs(packed)

    def _propose_late(self, step: DeviceStep) -> None:
        with self.clock("propose"):
            self.propose(step.batch, step.target_step, step.verdict)

    def _draft_batch(self, num_requests: int) -> Batch:
        """A greedy batch of padding, over the tables and slots that every batch stands in."""
        descriptor = Descriptor(
            num_requests=num_requests,
            num_rows=num_requests * self._rows,
            rows_per_request=self._rows,
            variant=GREEDY_VARIANT,
        )
        return self.prepare(self._static_inputs(descriptor))

    # ------------------------------------------------------------------ launch

    def place(self, plan: StepPlan) -> PlanTensors:
        """Upload a plan that runs eagerly. Requests are padded to where a drafter's decode pass is
        captured; rows are the plan's own."""
        count, rows = len(plan.slots), int(plan.num_rows.sum())
        b = self.speculator.padded_requests(count)
        longest = max(segment.max_seq_len for segment in plan.segments)
        segments, needed = plan.segments, rows_worth_naming(plan)
        if self._is_uniform(plan) and b == count:
            each, split = None, self._rows
        else:
            split = None
            each = 0 if not plan.samples.any() else None if plan.num_drafts.any() else 1
            if b > count:
                segments = (*segments, RowSegment(rows, count, b - count, 0, longest))
        shape = Descriptor(num_requests=b, num_rows=rows, rows_per_request=split)
        self.upload.write(shape, plan, each, needed)
        return self.upload.view(
            shape,
            segments,
            plan.all_greedy,
            GREEDY if plan.all_greedy else plan.flags,
            rows_of_logits=each,
            has_padding=b > count,
            needed=needed,
        )

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start a step, in two parts where its decodes have a graph that the whole has not."""
        *first, last = self._split(plan)
        # Graphs share memory: the next may write where these results are.
        parts = [(self._launch_part(*part).clone(), len(part[0].slots)) for part in first]
        parts.append((self._launch_part(*last), len(last[0].slots)))
        return self._ring.launched(parts)

    def _launch_part(self, plan: StepPlan, captured: CapturedStep | None) -> Tensor:
        """Packed results, padding behind those of the plan's requests."""
        if captured is None:
            return packed_results(self.run_eagerly(plan))
        self.upload.write(captured.descriptor, plan)
        outputs = captured.replay()
        if outputs.undrafted is not None:
            self._propose_late(outputs.undrafted)
        return outputs.packed

    def _split(self, plan: StepPlan) -> list[tuple[StepPlan, CapturedStep | None]]:
        """The parts a plan is launched in, each with the graph that serves it."""
        whole = plan, self._graph_for(plan)
        if self.graphs is None or self.modes.decode == NONE or whole[1] is not None:
            return [whole]
        decodes = self._full_decodes(plan)
        count = len(decodes) if decodes.all() else int(decodes.argmin())
        rows_behind = int(plan.num_rows[count:].sum())
        if not 0 < count < len(decodes) or rows_behind > MAX_SPLIT_ROWS:
            return [whole]
        first, rest = split_plan(plan, count)
        captured = self._graph_for(first)
        if captured is None:
            return [whole]
        return [(first, captured), (rest, self._graph_for(rest))]

    def _graph_for(self, plan: StepPlan) -> CapturedStep | None:
        """The graph that serves a plan. One for its way of sampling is captured where only a greedy
        one of its shape exists; where memory does not allow that, such plans run eagerly.
        """
        if self.graphs is None:
            return None
        wanted = Descriptor(
            num_requests=len(plan.slots),
            num_rows=int(plan.num_rows.sum()),
            rows_per_request=self._rows if self._is_uniform(plan) else None,
            variant=GREEDY_VARIANT,
        )
        found = self.graphs.dispatch(wanted)
        if found is None or plan.all_greedy:
            return found
        exact = replace(found.descriptor, variant=self._variants.serving(plan.flags))
        if exact in self._uncaptured:
            return None
        return self.graphs.dispatch(exact) or self._capture_late(exact)

    def _capture_late(self, descriptor: Descriptor) -> CapturedStep | None:
        assert self.graphs is not None
        log.info("capturing a step of a way of sampling that is met for the first time")
        try:
            with self._counted_memory():
                return self.graphs.capture(descriptor)
        except torch.OutOfMemoryError as error:
            reason = str(error).split(". ", 1)[0]
        self._uncaptured.add(descriptor)
        if self.target.device.type == "cuda":
            torch.cuda.empty_cache()  # what the attempt took on the stream of captures
        told = f"{NOT_CAPTURED}: {reason}"
        log.warning(told)
        if told not in self._warnings:
            self._warnings.append(told)
        return None

    def _full_decodes(self, plan: StepPlan) -> np.ndarray:
        """[B] bool: requests that sample and verify all K drafts."""
        k = self._rows - 1
        found: np.ndarray = (plan.num_rows == k + 1) & (plan.num_drafts == k) & plan.samples
        return found

    def _is_uniform(self, plan: StepPlan) -> bool:
        return bool(self._full_decodes(plan).all())
