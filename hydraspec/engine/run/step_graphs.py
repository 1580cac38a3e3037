"""Captured steps: which shapes have graphs, which graph runs a plan, how much memory they take."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import torch

from hydraspec.engine.machine import GIB
from hydraspec.engine.run.inputs import PlanTensors
from hydraspec.engine.run.results import StepOutputs
from hydraspec.engine.schedule.plans import is_decode, is_uniform
from hydraspec.graphs import (
    PROMPT_ROWS,
    Captured,
    Descriptor,
    GraphBackend,
    GraphManager,
    GraphModes,
    mixed_row_sizes,
)
from hydraspec.graphs.modes import NONE
from hydraspec.parallel.control import ALONE, Control
from hydraspec.sampling.flags import GREEDY
from hydraspec.types import SamplingFlags, StepPlan

if TYPE_CHECKING:
    from hydraspec.engine.run.device_runner import DeviceRunner

log = logging.getLogger(__name__)

GREEDY_VARIANT = (True, GREEDY)  # all_greedy and flags of the plans that a graph serves
MAX_VARIANTS = 4  # ways of sampling with separate graphs; further ones share the general one
NOT_CAPTURED = (
    "some steps that {which} run without CUDA graphs, for which there is no memory left; lower "
    "engine.kv_cache.memory_gib to have them"
)
OF_ANOTHER = "that of another rank"
RAGGED_MEANS = (1, 2, 3, 4, 6, 8, 12, 16)  # drafts of a request on average, with graphs
SPARE_BYTES = GIB // 4  # most memory that a capture takes beside its tensors
SAMPLING_COPIES = 12  # most copies of float32 logits in a step that samples with every option

CapturedStep: TypeAlias = Captured[PlanTensors, StepOutputs]


@dataclass(slots=True, frozen=True, kw_only=True)
class RunnerLimits:
    """The largest batches, and the batch sizes that get graphs."""

    max_num_seqs: int
    max_num_batched_tokens: int
    num_speculative_tokens: int
    max_seq_len: int  # positions a block table can name
    capture_sizes: tuple[int, ...]
    launch_bound_rows: int = 0  # up to so many rows a step's launch takes longer than its work
    # Drafts per request that a step may have, where that is chosen; else it is K.
    draft_lengths: tuple[int, ...] = ()
    is_by_request: bool = False  # requests of a step may have different ones of these
    activation_bytes: int = 0  # of a step of max_num_batched_tokens rows; 0: not measured
    vocab_size: int = 0

    @property
    def rows_per_decode(self) -> int:
        """Rows of a request that verifies every draft."""
        return self.num_speculative_tokens + 1

    def bytes_of(self, descriptor: Descriptor) -> int:
        """Bytes that a capture of this shape takes at most: a warm-up's tensors, and as many in the
        graph's own memory."""
        num_bytes = self.activation_bytes * descriptor.num_rows // self.max_num_batched_tokens
        if descriptor.variant != GREEDY_VARIANT:
            rows = min(descriptor.num_rows, descriptor.num_requests * self.rows_per_decode)
            num_bytes += SAMPLING_COPIES * 4 * rows * self.vocab_size
        return 2 * num_bytes + SPARE_BYTES


def descriptors(modes: GraphModes, limits: RunnerLimits) -> list[Descriptor]:
    """The greedy steps to capture: decodes by drafts and batch size, mixed ones by rows."""
    rows, sizes = limits.rows_per_decode, limits.capture_sizes
    most_rows = min(limits.max_num_seqs * rows, limits.max_num_batched_tokens)
    found = []
    if modes.decode != NONE:
        found = [
            Descriptor(
                num_requests=size,
                num_rows=size * each,
                rows_per_request=each,
                variant=GREEDY_VARIANT,
            )
            for each, of_length in _decodes(limits)
            for size in of_length
            if size * each <= most_rows
        ]
        found += _ragged(limits)
    if modes.mixed != NONE:
        found += [
            Descriptor(
                num_requests=limits.max_num_seqs,
                num_rows=num_rows,
                rows_per_request=None,
                variant=GREEDY_VARIANT,
            )
            for num_rows in mixed_row_sizes(
                *(sizes, rows, most_rows, limits.max_num_batched_tokens),
                max_large_rows=modes.max_mixed_rows if modes.has_large else 0,
            )
        ]
    return found


def _decodes(limits: RunnerLimits) -> list[tuple[int, Sequence[int]]]:
    """Rows of a request and the batch sizes to capture, for each draft length; lengths below K have
    only powers of two and the largest size, so that graphs are few."""
    rows, sizes = limits.rows_per_decode, limits.capture_sizes
    few = [size for size in sizes if size & (size - 1) == 0 or size == sizes[-1]]
    shorter = [length + 1 for length in limits.draft_lengths if length + 1 < rows]
    return [*((each, few) for each in shorter), (rows, sizes)]


def _ragged(limits: RunnerLimits) -> list[Descriptor]:
    """Decode steps whose requests verify different numbers of drafts: any split of as many rows as
    requests have on average with RAGGED_MEANS or K drafts. They propose K drafts."""
    if not limits.is_by_request:
        return []
    (*shorter, (rows, sizes)) = _decodes(limits)
    few = shorter[0][1] if shorter else sizes
    means = [each for each, _ in shorter if each - 1 in RAGGED_MEANS]
    return [
        Descriptor(
            num_requests=size,
            num_rows=size * each,
            rows_per_request=None,
            most_rows=rows,
            variant=GREEDY_VARIANT,
        )
        for size in few
        for each in (*means, rows)
        if size > 1 and size * each <= limits.max_num_batched_tokens
    ]


def is_large(descriptor: Descriptor) -> bool:
    """Returns whether a step's time is that of its rows' products, not of reading the weights."""
    return descriptor.rows_per_request is None and descriptor.num_rows > PROMPT_ROWS[-1]


class StepGraphs:
    """Graphs of whole steps, without a reference to the runner that keeps them. Greedy steps are
    captured while loading, sampled ones when graphs for their flags are first needed."""

    def __init__(
        self,
        backend: GraphBackend,
        modes: GraphModes,
        limits: RunnerLimits,
        control: Control = ALONE,
    ) -> None:
        self.backend, self.modes, self._control = backend, modes, control
        self.manager = GraphManager[PlanTensors, StepOutputs](
            "step", backend, in_pieces=partial(_in_pieces, modes)
        )
        self.num_bytes = 0  # device memory of this runner's captures, the drafter's included
        self.warnings: list[str] = []  # why steps run eagerly that could have graphs
        self._greedy = descriptors(modes, limits)
        self._decodes = defaultdict[int | None, list[Descriptor]](list)  # by rows, smallest first
        for each in sorted(self._greedy, key=lambda each: each.num_rows):
            self._decodes[each.rows_per_request].append(each)
        self._launch_bound_rows = limits.launch_bound_rows
        self._limits = limits
        self._variants = SamplingVariants()
        self._uncaptured: set[Descriptor] = set()  # the device's memory was too small

    @property
    def num_graphs(self) -> int:
        """Graphs captured so far, of every way of sampling."""
        return len(self.manager.descriptors)

    @property
    def mixed_rows(self) -> list[int]:
        """Rows of the greedy mixed steps that have graphs, rising."""
        captured = [each for each in self._greedy if each not in self._uncaptured]
        mixed = [e for e in captured if e.rows_per_request is None and e.most_rows is None]
        return sorted(each.num_rows for each in mixed)

    def capture_greedy(self, runner: DeviceRunner) -> None:
        """Capture the greedy steps of every size that the mode asks for; those of many rows as far
        as memory allows."""
        self.manager.capture_all(self._greedy, partial(self._capture_greedy, runner))

    def _capture_greedy(self, runner: DeviceRunner, descriptor: Descriptor) -> None:
        if is_large(descriptor):
            self._capture_if_it_fits(runner, descriptor, "read prompts")
        else:
            self._capture(runner, descriptor)

    def _capture(self, runner: DeviceRunner, descriptor: Descriptor) -> CapturedStep:
        return self.manager.capture(descriptor, runner.static_inputs, runner.captured_step)

    @contextmanager
    def counting_memory(self) -> Iterator[None]:
        """Add the memory of captures in the block to `num_bytes`, also if a capture fails."""
        before = self.backend.num_bytes()
        try:
            yield
        finally:
            self.num_bytes += self.backend.num_bytes() - before

    @torch.inference_mode()
    def capture_variant(self, runner: DeviceRunner, all_greedy: bool, flags: SamplingFlags) -> None:
        """Capture graphs for `flags` in every shape that greedy steps have, as far as memory
        allows, so that no such step is captured while requests run."""
        variant = self._variants.serving(all_greedy, flags)
        for greedy in self.manager.descriptors[::-1]:  # large graphs first: small ones reuse memory
            wanted = replace(greedy, variant=variant)
            if greedy.variant == GREEDY_VARIANT and not (
                wanted in self._uncaptured or self.manager.has(wanted)
            ):
                self._capture_late(runner, wanted)

    def serving(self, runner: DeviceRunner, plan: StepPlan) -> CapturedStep | None:
        """The graph that serves a plan; None: the plan runs eagerly. Where only a greedy graph of
        its shape exists, one for its flags is captured, or None returned if memory does not allow
        that. Plans whose padding would take longer than launching them have no graph, and none have
        those that read images.
        """
        if plan.images or plan.next_images:
            return None
        wanted = Descriptor(
            num_requests=len(plan.slots),
            num_rows=int(plan.num_rows.sum()),
            rows_per_request=plan.decode_rows if is_uniform(plan) else None,
            most_rows=self._limits.rows_per_decode if is_decode(plan) else None,
            variant=GREEDY_VARIANT,
        )
        if plan.draft_length is not None and wanted.rows_per_request is not None:
            wanted = self._of_same_length(wanted)
        found = self.manager.dispatch(wanted)
        if found is None or self._wastes(found.descriptor, wanted.num_rows):
            return None
        if (plan.all_greedy, plan.flags) == GREEDY_VARIANT:
            return found
        variant = self._variants.serving(plan.all_greedy, plan.flags)
        exact = replace(found.descriptor, variant=variant)
        if exact in self._uncaptured:
            return None
        return self.manager.dispatch(exact) or self._capture_late(runner, exact)

    def _of_same_length(self, wanted: Descriptor) -> Descriptor:
        """Shape of the smallest graph of decodes with as many drafts as `wanted`, or `wanted` if
        there is none. A mixed graph with fewer rows would draft K."""
        fitting = [each for each in self._decodes[wanted.rows_per_request] if each.covers(wanted)]
        return fitting[0] if fitting else wanted

    def _wastes(self, graph: Descriptor, num_rows: int) -> bool:
        """Returns whether a large graph would pad a step by over an eighth, and the step has so
        many rows that the device does not wait for eager launches."""
        padding = graph.num_rows - num_rows
        return is_large(graph) and 8 * padding > num_rows > self._launch_bound_rows

    def _capture_late(self, runner: DeviceRunner, descriptor: Descriptor) -> CapturedStep | None:
        log.info("capturing a step of a way of sampling that is met for the first time")
        with self.counting_memory():
            return self._capture_if_it_fits(runner, descriptor, "sample")

    def _capture_if_it_fits(
        self, runner: DeviceRunner, descriptor: Descriptor, which: str
    ) -> CapturedStep | None:
        captured, reason = None, ""
        if self._control.layout.tensor > 1:
            # The ranks exchange in a capture, which cannot be taken back: none begins it if one has
            # too little memory, and a rank that runs out of memory nonetheless ends the run.
            reason = self._reason_not_to_begin(descriptor)
            if self._control.agree_all(not reason):
                return self._capture(runner, descriptor)
        else:
            try:
                captured = self._capture(runner, descriptor)
            except torch.OutOfMemoryError as error:
                reason = str(error).split(". ", 1)[0]  # torch's first sentence; statistics follow
            if self._control.agree_all(captured is not None):
                return captured
            self.manager.drop(descriptor)
        self._left_out(descriptor, f"{NOT_CAPTURED.format(which=which)}: {reason or OF_ANOTHER}")
        return None

    def _reason_not_to_begin(self, descriptor: Descriptor) -> str:
        """Text on the memory that a capture lacks, by a high estimate; empty: there is enough."""
        free, most = self.backend.free_bytes(), self._limits.bytes_of(descriptor)
        return f"{free / GIB:.2f} GiB are free, {most / GIB:.2f} wanted" if free < most else ""

    def _left_out(self, descriptor: Descriptor, warning: str) -> None:
        self._uncaptured.add(descriptor)
        torch.cuda.empty_cache()  # memory that the attempt took on the stream of captures
        if warning not in self.warnings:
            self.warnings.append(warning)


def _in_pieces(modes: GraphModes, descriptor: Descriptor) -> bool:
    is_decode = descriptor.rows_per_request is not None or descriptor.most_rows is not None
    return modes.in_pieces(mixed=not is_decode)


class SamplingVariants:
    """Chooses the variant of a graph that serves a step which is sampled, or whose logits follow
    rules."""

    def __init__(self) -> None:
        self._known: dict[bool, list[SamplingFlags]] = {False: [], True: []}  # by all_greedy

    def serving(self, all_greedy: bool, flags: SamplingFlags) -> tuple[bool, SamplingFlags]:
        """The variant with the fewest flags that covers `flags`; a new one where none does."""
        known = self._known[all_greedy]
        covering = [each for each in known if _covers(each, flags)]
        if covering:
            return all_greedy, min(covering, key=lambda each: sum(astuple(each)))
        if len(known) >= MAX_VARIANTS:
            flags = SamplingFlags()  # covers every other
        known.append(flags)
        return all_greedy, flags


def _covers(known: SamplingFlags, flags: SamplingFlags) -> bool:
    return all(has or not needs for has, needs in zip(astuple(known), astuple(flags), strict=True))
