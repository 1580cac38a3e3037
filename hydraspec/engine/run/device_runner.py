"""Launches of steps, on every device: plans are uploaded, batches padded to a graph where one fits,
and results are on their way to the host before the step has run.

Every shape here is a host number. Padding requests have the state's last slot, no rows and length
0, and do not sample; padding rows have id 0, position 0 and cache row -1.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from hydraspec.engine.cache.kv_cache import KVCache
from hydraspec.engine.run.draft_check import check_drafts_on_cpu
from hydraspec.engine.run.host_drafts import rehearse_drafts, write_drafts
from hydraspec.engine.run.images import EncodedImages
from hydraspec.engine.run.inputs import LateRows, PlanTensors, needed_unless_all
from hydraspec.engine.run.logprobs import prompt_logprobs
from hydraspec.engine.run.results import (
    DeviceStep,
    LaunchedStep,
    MoreResults,
    ResultRing,
    StepOutputs,
    next_drafts,
    packed_results,
)
from hydraspec.engine.run.runner import Runner
from hydraspec.engine.run.step_graphs import (
    GREEDY_VARIANT,
    CapturedStep,
    RunnerLimits,
    StepGraphs,
    descriptors,
    is_large,
)
from hydraspec.engine.run.upload import PlanUpload, UploadShape
from hydraspec.engine.schedule.plans import dummy_plans, full_decodes, is_uniform, split_plan
from hydraspec.graphs import Descriptor, GraphBackend, GraphModes
from hydraspec.graphs.modes import NONE
from hydraspec.models.base import TargetModel
from hydraspec.models.needed_rows import padded_needed_rows
from hydraspec.parallel.control import ALONE, Control
from hydraspec.sampling.rules import write_masks
from hydraspec.sampling.verifier import Verifier
from hydraspec.speculators.base import BaseSpeculator, DraftGraphs
from hydraspec.types import (
    Batch,
    NeededRows,
    RequestState,
    RowSegment,
    SamplingFlags,
    StepPlan,
)

log = logging.getLogger(__name__)

# Without a graph, a step of few prefill rows takes the host longer than the device: its decodes are
# launched first, as a graph. With many rows decodes cost least in the same pass over the weights.
MAX_SPLIT_ROWS = 512


class DeviceRunner(Runner):
    """Launches steps, eagerly or as graphs."""

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
        control: Control = ALONE,
    ) -> None:
        super().__init__(target, speculator, verifier, kv, state)
        self.graphs: StepGraphs | None = None
        self.limits, self.modes, self.backend = limits, modes, backend
        self._rows = limits.rows_per_decode
        self.upload = PlanUpload(
            UploadShape(
                max_num_seqs=limits.max_num_seqs,
                max_num_rows=limits.max_num_batched_tokens,
                num_speculative_tokens=limits.num_speculative_tokens,
                table_widths=kv.table_widths,
            ),
            target.device,
        )
        self.images = EncodedImages(target)
        self._scored: Tensor | None = None  # see ScoredRows, of the step being launched
        self._ring = ResultRing(limits.max_num_seqs, limits.num_speculative_tokens, target.device)
        if backend is not None and modes.enabled:
            self.graphs = StepGraphs(backend, modes, limits, control)

    # ------------------------------------------------------------------ capture

    @torch.inference_mode()
    def capture(self) -> int:
        """Capture greedy steps and the drafter's decode pass as the mode asks for; returns the
        bytes of device memory that they take."""
        graphs = self.graphs
        if graphs is None:
            return 0
        with graphs.counting_memory():
            if self.modes.draft != NONE:
                self.speculator.init_cudagraph_manager(graphs.backend)
                sizes = self.limits.capture_sizes
                self.speculator.capture(DraftGraphs(sizes, self._draft_batch, self.state))
            graphs.capture_greedy(self)
        return graphs.num_bytes

    def capture_variant(self, all_greedy: bool, flags: SamplingFlags) -> None:
        """Capture graphs of steps that are sampled as `flags` say, if steps use graphs."""
        if self.graphs is not None:
            self.graphs.capture_variant(self, all_greedy, flags)

    @torch.inference_mode()
    def run_padding(self) -> None:
        """Run the largest possible step, of padding alone, and encode as many images as any."""
        self.images.encode_largest()
        self.run(self._largest())

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Run dummy steps that need every kernel of later steps: the largest one, those that
        `capture` captures, one with an image, and some others that will run eagerly."""
        limits = self.limits
        plans = dummy_plans(
            *({1, *limits.capture_sizes}, limits.num_speculative_tokens),
            max_rows=limits.max_num_batched_tokens,
            max_seq_len=limits.max_seq_len,
            decodes=self.modes.decode == NONE,
            mixed=self.modes.mixed == NONE,
        )
        with self.eagerly():
            self.captured_step(self._largest())
            if encoded := self.images.padding(limits.max_num_batched_tokens):
                self.captured_step(replace(self._largest(), encoded=encoded))
            for descriptor in self._rehearsed():
                self.captured_step(self.static_inputs(descriptor))
            for plan in plans:
                chosen = {int(plan.num_drafts[0])} if limits.draft_lengths else set[int]()
                for length in (None, *chosen):
                    self.state.num_computed.zero_()  # steps would run past the end of the tables
                    self._launch_part(replace(plan, draft_length=length), None)
        self._ring.rehearse(self.state.num_computed.device)
        if (drafts := self.speculator.host_drafts) is not None:
            rehearse_drafts(self.state, limits.num_speculative_tokens, drafts.lookup)

    def _rehearsed(self) -> list[Descriptor]:
        """Shapes that need the kernels of all that `capture` captures."""
        found = descriptors(self.modes, self.limits)
        # A few of the large ones: their kernels change with the powers of two, if at all.
        large = [each for each in found if is_large(each)]
        return [each for each in found if each not in large or each in (*large[::3], large[-1])]

    def _largest(self) -> PlanTensors:
        """The largest step, of padding alone; every row runs through every layer."""
        limits = self.limits
        descriptor = Descriptor(
            num_requests=limits.max_num_seqs,
            num_rows=limits.max_num_batched_tokens,
            rows_per_request=None,
            variant=GREEDY_VARIANT,
        )
        self.upload.write(descriptor, None)
        return self.upload.view(descriptor, self._segments(descriptor), *GREEDY_VARIANT)

    @contextmanager
    def keeping_logits(self) -> Iterator[None]:
        """Run steps eagerly during the block, and keep in `kept_logits` [N, V] the logits of the
        newest step that sampled. Else none are kept: they are large, and graphs overwrite them."""
        self._keeps_logits = True
        try:
            with self.eagerly():
                yield
        finally:
            self._keeps_logits, self.kept_logits = False, None

    @contextmanager
    def eagerly(self) -> Iterator[None]:
        """Replay no graph during the block."""
        self._pause_graphs(True)
        try:
            yield
        finally:
            self._pause_graphs(False)

    def _pause_graphs(self, paused: bool) -> None:
        if self.graphs is not None:
            self.graphs.manager.is_paused = paused
        self.speculator.pause_graphs(paused)

    def static_inputs(self, descriptor: Descriptor) -> PlanTensors:
        """A batch of padding alone, in the memory that plans of this shape are written to."""
        needed = self._write(descriptor, None)
        all_greedy, flags = cast(tuple[bool, SamplingFlags], descriptor.variant)
        segments, rows = self._segments(descriptor), descriptor.rows_per_request
        is_chosen = bool(self.limits.draft_lengths) and rows is not None
        length = rows - 1 if is_chosen and rows is not None else None
        return self.upload.view(
            *(descriptor, segments, all_greedy, flags),
            needed=needed,
            draft_length=length,
            num_verified=length if self._is_narrow else None,
            by_request=self.limits.is_by_request and rows is None,
        )

    @property
    def _is_narrow(self) -> bool:
        """Returns whether verification is as wide as a step's drafts. Probabilities of drafts, and
        messages between stages, have the width of K drafts."""
        return self.io is None and self.state.draft_probs is None

    def _num_verified(self, plan: StepPlan) -> int | None:
        """Width of the drafts under verification in an eager step; None: K. A step without any
        does what one of `method=none` does."""
        if plan.draft_length is None or not self._is_narrow:
            return None
        if not plan.num_drafts.any():
            return 0
        return plan.draft_length if is_uniform(plan) else None

    def _write(self, descriptor: Descriptor, plan: StepPlan | None) -> NeededRows | None:
        """Write a plan (None: padding alone) where graphs of this shape read it; returns its needed
        rows if these graphs leave out the others."""
        b, t, k = descriptor.num_requests, descriptor.num_rows, self._rows - 1
        if (
            not is_large(descriptor)
            or 2 * b * (k + 1) > t
            or self.speculator.reads_all_hidden_states
        ):
            self.upload.write(descriptor, plan)
            return None
        needed = padded_needed_rows(plan, b, t, k, self.limits.max_seq_len)
        self.upload.write(descriptor, plan, needed=needed)
        return needed

    def _segments(self, descriptor: Descriptor) -> tuple[RowSegment, ...]:
        """Segments whose bounds hold for every batch of this shape."""
        b, t, longest = descriptor.num_requests, descriptor.num_rows, self.limits.max_seq_len
        if descriptor.rows_per_request is not None:
            return (RowSegment(0, 0, b, descriptor.rows_per_request, longest),)
        most = min(t, descriptor.most_rows or t)  # one request may have so many of the rows
        whole = RowSegment(0, 0, 1, most, longest)
        return (whole, RowSegment(most, 1, b - 1, 0, longest)) if b > 1 else (whole,)

    def captured_step(self, inputs: PlanTensors) -> StepOutputs:
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
        """A greedy batch of padding, in the memory of tables and slots that every batch uses."""
        descriptor = Descriptor(
            num_requests=num_requests,
            num_rows=num_requests * self._rows,
            rows_per_request=self._rows,
            variant=GREEDY_VARIANT,
        )
        return self.prepare(self.static_inputs(descriptor))

    # ------------------------------------------------------------------ launch

    def place(self, plan: StepPlan) -> PlanTensors:
        """Upload a plan that runs eagerly, and encode the images that it reads. Requests are padded
        to a size for which the drafter's decode pass is captured; rows are not padded."""
        count, rows = len(plan.slots), int(plan.num_rows.sum())
        b = self.speculator.padded_requests(count)
        longest = max(segment.max_seq_len for segment in plan.segments)
        needed = needed_unless_all(plan) if plan.scored is None else None
        segments = plan.segments
        if is_uniform(plan) and b == count:
            each, split = None, plan.decode_rows
        else:
            split = None
            each = 0 if not plan.samples.any() else None if plan.num_drafts.any() else 1
            if b > count:
                segments = (*segments, RowSegment(rows, count, b - count, 0, longest))
        shape = Descriptor(num_requests=b, num_rows=rows, rows_per_request=split)
        self.upload.write(shape, plan, each, needed)
        placed = self.upload.view(
            shape,
            segments,
            plan.all_greedy,
            plan.flags,
            rows_of_logits=each,
            has_padding=b > count,
            needed=needed,
            # A captured decode pass always makes K drafts.
            draft_length=plan.draft_length if self.modes.draft == NONE else None,
            num_verified=self._num_verified(plan),
            by_request=plan.proposes is not None,
        )
        if plan.num_late is not None:
            placed = replace(placed, late=LateRows(plan.num_late, plan.drafter_rests))
        return self._with_images(placed, plan, rows)

    def _with_images(self, placed: PlanTensors, plan: StepPlan, num_rows: int) -> PlanTensors:
        following = plan.next_images if self.speculator.reads_next_images else ()
        if not plan.images and not following:
            return placed
        return replace(
            placed,
            encoded=self.images.rows(plan.images, num_rows),
            next_encoded=self.images.rows(following, None),
        )

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start a step, in two parts where only its decodes have a graph; returns before it has
        run."""
        self.place_drafts(plan)
        if plan.masks is not None:
            write_masks(self.state, plan.masks)
        self._scored = None
        *first, last = self._split(plan)
        # Graphs share memory: the next one may write where these results are.
        parts = [(self._launch_part(*part).clone(), len(part[0].slots)) for part in first]
        parts.append((self._launch_part(*last), len(last[0].slots)))
        return self._ring.launched(parts, self._more_results(plan))

    def _more_results(self, plan: StepPlan) -> MoreResults | None:
        by_slot = {}
        if self.state.draft_survivals is not None:
            by_slot["next_survivals"] = self.state.draft_survivals
        if plan.masks is not None and self._rows > 1 and not self.speculator.drafts_on_host:
            by_slot["next_tokens"] = next_drafts(self.state, self._rows - 1)
        if plan.flags.any_logprobs and self.state.logprobs is not None:
            by_slot["logprobs"] = self.state.logprobs
        if not by_slot and self._scored is None:
            return None
        return MoreResults(slots=plan.slots, by_slot=by_slot, prompt_logprobs=self._scored)

    def place_drafts(self, plan: StepPlan) -> None:
        """Write the drafts that the host proposes for this step, if any, once the state has the
        results of the steps before."""
        if plan.continuations is not None:
            drafts = self.speculator.host_drafts
            lookup = None if drafts is None else drafts.lookup
            with self.clock("propose"):
                write_drafts(self.state, plan.continuations, lookup)

    def _launch_part(self, plan: StepPlan, captured: CapturedStep | None) -> Tensor:
        """Launch one part; returns `packed_results` of the plan's requests, then of padding."""
        if captured is None:
            step = self.run_eagerly(plan)
            if plan.scored is not None:
                hidden = step.target_step.hidden_states
                self._scored = prompt_logprobs(self.target, hidden, plan.scored)
            check_drafts_on_cpu(step.draft, self.target.vocab_size, self.speculator)
            return packed_results(step)
        self._write(captured.descriptor, plan)
        outputs = captured.replay()
        if outputs.undrafted is not None:
            self._propose_late(outputs.undrafted)
        return outputs.packed

    def run_eagerly(self, plan: StepPlan) -> DeviceStep:
        """Place a plan and run its verbs."""
        with self.clock("prepare"):
            inputs = self.place(plan)
        return self.run(inputs)

    def _split(self, plan: StepPlan) -> list[tuple[StepPlan, CapturedStep | None]]:
        """The parts in which a plan is launched, each with its graph, or None to run eagerly."""
        graphs = self.graphs
        if plan.scored is not None:  # its eager step computes every row
            graphs = None
        whole = plan, None if graphs is None else graphs.serving(self, plan)
        if graphs is None or self.modes.decode == NONE or whole[1] is not None:
            return [whole]
        decodes = full_decodes(plan)
        count = len(decodes) if decodes.all() else int(decodes.argmin())
        num_rows_after = int(plan.num_rows[count:].sum())
        most = min(MAX_SPLIT_ROWS, self.limits.launch_bound_rows)
        if not 0 < count < len(decodes) or num_rows_after > most:
            return [whole]
        first, rest = split_plan(plan, count)
        captured = graphs.serving(self, first)
        if captured is None:
            return [whole]
        return [(first, captured), (rest, graphs.serving(self, rest))]
