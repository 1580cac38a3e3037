"""The native engine: loads target and drafter, and runs requests step by step."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import repeat

import numpy as np
import torch
from hydraspec_kernels.runtime.ahead import num_compiled

from hydraspec.config.schema import RunConfig
from hydraspec.engine.base import Built, Engine, EngineInfo, StepProfile
from hydraspec.engine.cache.noise import fill
from hydraspec.engine.costs import from_json
from hydraspec.engine.finish import FinishCheck
from hydraspec.engine.grammars import Grammars
from hydraspec.engine.prompts import LOGPROBS, refuse_sampling, tokenize
from hydraspec.engine.recorded import read_recorded
from hydraspec.engine.run.collect import Collected, Collector, Flight
from hydraspec.engine.run.loading import Loaded, load, load_baseline
from hydraspec.engine.run.plain_cache import load_plain
from hydraspec.engine.run.positions import position_scores
from hydraspec.engine.run.profiling import profile_phases, profile_step
from hydraspec.engine.run.results import LaunchedStep
from hydraspec.engine.run.state import write_request
from hydraspec.engine.run.step_costs import NOT_MEASURED, measure_costs
from hydraspec.engine.run.step_graphs import GREEDY_VARIANT
from hydraspec.engine.run.timing import Clock, StepClock
from hydraspec.engine.schedule.admission import Admission, Cancels, Pending, obeyed
from hydraspec.engine.schedule.sequence import Scheduled, Sequence
from hydraspec.engine.turns import History
from hydraspec.models.checkpoint.reader import open_checkpoint
from hydraspec.models.pictures.format import read_picture_format
from hydraspec.parallel.ranks import current
from hydraspec.sampling.flags import flags_of
from hydraspec.sampling.rules import RuleWriter
from hydraspec.speculators.teacher_forcing.texts import continued, finished_texts
from hydraspec.speculators.teacher_forcing.trial import can_be_forced
from hydraspec.types import (
    IMAGE,
    Completion,
    Image,
    NotFiniteError,
    PositionScores,
    Request,
    SamplingParams,
    Span,
    StepPlan,
    StepRecord,
)

log = logging.getLogger(__name__)


class NativeEngine(Engine):
    """Continuous batching over a paged, hybrid KV cache; each step verifies drafts and proposes the
    next."""

    def __init__(
        self, config: RunConfig, loaded: Loaded | None = None, grammars: Grammars | None = None
    ) -> None:
        """Load what `config` names, or wrap parts that are loaded already, and grammars that are
        compiled for the same tokenizer (`baseline` does)."""
        self._recorded = read_recorded(config.method)
        self.parts = loaded or load(config)
        target = self.parts.target
        self._grammars = grammars or Grammars(
            self.parts.tokenizer, target.vocab_size, target.eos_token_ids
        )
        self._watch = current().watch
        self._scheduler = self.parts.scheduler
        decode = self.parts.tokenizer.decode if self.parts.tokenizer else None
        self._collector = Collector(
            self._scheduler,
            FinishCheck(self.parts.target.eos_token_ids, self.parts.info.max_model_len, decode),
            self.parts.info,
            self.parts.runner.speculator,
        )
        # Steps that were launched and not collected; `step` leaves `_num_ahead` of them.
        self._in_flight: deque[Flight] = deque()
        self._cancels = Cancels()  # of the newest run
        rules, eos = self.parts.runner.state.rules, self.parts.target.eos_token_ids
        assert rules is not None
        self._rules = RuleWriter(rules, tuple(eos))
        self._num_stages = self.parts.target.stage.count
        self._num_ahead = self._num_stages - 1 + bool(self.parts.info.async_scheduling)
        on_cpu = self.parts.target.device.type == "cpu"
        has_phases = on_cpu and not self._num_ahead
        self.clock = StepClock(has_phases=has_phases)
        if has_phases:
            self.parts.runner.clock = self.clock
            if self._scheduler.step_drafts is not None:
                self._scheduler.step_drafts.clock = self.clock

    @property
    def info(self) -> EngineInfo:  # type: ignore[override]
        """Facts as they are now, with costs and graphs that runs have added."""
        info, graphs = self.parts.info, self.parts.runner.graphs
        if self._scheduler.draft_lengths is not None:
            info = replace(info, costs=self._scheduler.draft_lengths.costs)
        if self._grammars.costs.compile_ms:
            info = replace(info, grammars=self._grammars.costs.as_json())
        if graphs is None:
            return info
        memory_bytes = {**info.memory_bytes, "graphs": graphs.num_bytes}
        return replace(info, memory_bytes=memory_bytes, warnings=[*info.warnings, *graphs.warnings])

    def run(
        self, requests: Seq[Request], *, concurrency: int | None
    ) -> Generator[StepRecord | Completion]:
        self._cancels = Cancels()
        return self.offer(requests, concurrency, self._cancels)

    def cancel(self, index: int) -> None:
        """See Engine."""
        self._cancels.add(index)

    def offer(
        self, requests: Seq[Request], concurrency: int | None, cancels: Cancels
    ) -> Generator[StepRecord | Completion]:
        """Runs requests as `run` does; those in `cancels` end early."""
        control = self.parts.control
        pending = Pending(requests, concurrency, cancels=cancels, watch=control.watch)
        return self.decode(requests, obeyed(pending, requests, control))

    def decode(
        self, requests: Seq[Request], admission: Admission
    ) -> Generator[StepRecord | Completion]:
        """Runs the requests that `admission` admits; yields the same events as `run`."""
        num_unfinished, history = 0, History(requests)
        images = self.parts.runner.images
        images.learn(requests)
        if self._scheduler.draft_lengths is not None:
            self._scheduler.draft_lengths.start_over()
        if self._scheduler.step_drafts is not None:
            self._scheduler.step_drafts.start_over()
        with self.parts.runner.kv.lease.taken(), self._dropping(), closing(admission):
            if any(request.num_filled for request in requests):
                fill(self.parts.runner.kv)
            while (joining := self._joining(admission, num_unfinished)) is not None:
                for request in joining:
                    offered_at = admission.offered_at(request)
                    sequence = history.offer(Sequence, request, offered_at)
                    if sequence.spans and (fault := images.fault(sequence.spans)):
                        sequence.fail(fault)
                    sequence.grammar = self._grammars.of(sequence.request)
                    self._scheduler.add(sequence)
                if cancelled := admission.cancelled():
                    self._scheduler.cancel(cancelled)
                collected = self.step()
                num_unfinished += len(joining) - len(collected.completions)
                for completion in collected.completions:
                    history.add(completion)
                    admission.ended(completion.index)
                if collected.record is not None:
                    yield collected.record
                yield from collected.completions
                if collected.error is not None:
                    raise collected.error

    def _joining(self, admission: Admission, num_unfinished: int) -> Seq[Request] | None:
        """The requests that join the next step; None: the run is over. Waiting without unfinished
        requests counts in no step's time, even while a step launched ahead is in flight."""
        if num_unfinished:
            return admission.joining(num_unfinished)
        with self.clock.paused():
            return admission.joining(0)

    @torch.inference_mode()
    def step(self) -> Collected:
        """Schedule and launch the next step, then collect one: the same step or, where the host
        runs ahead or pipeline stages work on several steps, the oldest in flight."""
        with self._watch.step():
            return self._step()

    def _step(self) -> Collected:
        clock, runner, flights = self.clock, self.parts.runner, self._in_flight
        if not flights:
            clock.start()
        with clock("schedule"):
            scheduled, plan = ([], None) if self._awaits_drafts() else self._schedule()
        if plan is not None:
            with clock("launch"), runner.clock("device"):
                launched = runner.launch(plan)
            flights.append(self._flight(scheduled, launched))
        if not flights or (plan is not None and len(flights) <= self._num_ahead):
            return Collected(None, self._collector.failed())
        flight = flights.popleft()
        if self.parts.check is not None:
            rows = np.array([[item.num_computed, item.num_rows] for item in flight.scheduled])
            self.parts.check.compare(self._collector.num_steps, rows, flight.step.result())
        collected = self._collector.collect(flight, clock)
        clock.start(flight.launch_ms)  # a step that is in flight is timed from here
        return collected

    def _awaits_drafts(self) -> bool:
        """Returns whether the next step's masks need results in flight: the drafts of a request
        with a grammar, which is followed along them before the launch (docs/adr/0051)."""
        return any(
            item.samples and item.sequence.grammar is not None
            for flight in self._in_flight
            for item in flight.scheduled
        )

    def _schedule(self) -> tuple[list[Scheduled], StepPlan | None]:
        """The next step's shares of sequences, and its plan (None: nothing to run). Writes the
        state of the slots of newly admitted requests."""
        scheduled = self._scheduler.schedule()
        for sequence in self._scheduler.admitted:
            sequence.note_slot(time.perf_counter())
            if sequence.slot >= 0:
                self.parts.runner.reassign(sequence.slot)
                write_request(
                    self.parts.runner.state,
                    sequence.slot,
                    sequence.token_ids,
                    sequence.request.sampling,
                    sequence.num_computed,
                )
                self._rules.write(sequence.slot, sequence.request.sampling, sequence.num_prompt)
                if self._recorded is not None:
                    self._recorded.write(self.parts.runner.state, sequence)
        return scheduled, self._scheduler.plan(scheduled) if scheduled else None

    def _flight(self, scheduled: list[Scheduled], launched: LaunchedStep) -> Flight:
        scheduler = self._scheduler
        if self._num_ahead:
            scheduler.launched(scheduled)
        return Flight(
            scheduled,
            launched,
            num_preempted=scheduler.take_num_preempted(),
            kv_usage=scheduler.kv.usage,
            kv_usage_per_group=scheduler.kv.usage_per_group,
            launch_ms=self.clock.launch_ms(),
            # Of a drafter on the host K is a bound, and requests differ.
            draft_length=scheduler.draft_length if scheduler.draft_lengths is not None else None,
            after=self._in_flight[-1].step if self._in_flight else None,
        )

    @contextmanager
    def _dropping(self) -> Iterator[None]:
        """Context that on exit drops unfinished requests and waits for the steps in flight: another
        engine (`baseline`) may use the cache next."""
        scheduler, flights = self._scheduler, self._in_flight  # an engine may be closed meanwhile
        try:
            yield
        finally:
            scheduler.clear()
            while flights:
                flights.popleft().step.result()

    def tokenize(self, requests: Seq[Request]) -> None:
        config, info = self.parts.config.target, self.info
        has_encoder, form = IMAGE in info.encoded_kinds, None
        if has_encoder or config.max_soft_tokens is not None:
            opened = open_checkpoint(config.checkpoint)
            form = read_picture_format(opened, config.max_soft_tokens, has_encoder=has_encoder)
        tokenize(requests, self.parts.tokenizer, info, config.checkpoint, form)
        if self._num_stages > 1:
            why = "pipeline stages hand over tokens alone"
            refuse_sampling(requests, dict.fromkeys((*LOGPROBS, "structured"), why))
        self._grammars.check(requests, self.parts.config)

    def allowed_tokens(
        self, sampling: SamplingParams, token_ids: Seq[int], num_prompt: int
    ) -> np.ndarray | None:
        return self._grammars.allowed_after(sampling, token_ids, num_prompt)

    def prepare(self, requests: Seq[Request], *, concurrency: int | None = None) -> None:
        """Capture graphs for the sampling that these requests need together; if K is chosen by
        costs that are not known, measure them. All ranks use the costs that rank 0 measured."""
        lengths, control = self._scheduler.draft_lengths, self.parts.control
        every = [request.sampling for request in requests]
        for group in (every, [sampling for sampling in every if sampling.temperature == 0]):
            if (variant := flags_of(group)) != GREEDY_VARIANT:
                self.parts.runner.capture_variant(*variant)
        if lengths is None or lengths.costs is not None:
            return
        found = measure_costs(
            *(self, requests, lengths, concurrency),
            max_num_seqs=self._scheduler.max_num_seqs,
            num_replicas=control.layout.data,
            num_micro_batches=self._scheduler.micro_batches.count,
        )
        message = None if found is None else found.as_json()
        agreed = control.gather(message, control.all_ranks, "costs")[0]
        lengths.costs = None if agreed is None else from_json(agreed, "rank 0")
        if agreed is None:
            log.warning(NOT_MEASURED)

    def most_at_once(self, num_tokens: int) -> int:
        scheduler = self._scheduler
        num_rows = 1 + scheduler.num_speculative_tokens + scheduler.num_lookahead_tokens
        held = scheduler.kv.most_requests(num_tokens, num_rows)
        return min(held, scheduler.max_num_seqs) if num_tokens < scheduler.max_model_len else 0

    @contextmanager
    def with_drafts(self, num_drafts: int) -> Iterator[None]:
        lengths = self._scheduler.draft_lengths
        if lengths is None:
            super().with_drafts(num_drafts)
            return
        lengths.follow(repeat(num_drafts))
        try:
            yield
        finally:
            lengths.follow(None)

    def has_eager_steps(self) -> bool:
        graphs = self.parts.runner.graphs
        on_device = self.parts.target.device.type != "cpu"
        return on_device and (graphs is None or graphs.modes.has_eager_steps)

    def num_built(self) -> Built:
        runner = self.parts.runner
        num_captured = 0 if runner.graphs is None else runner.graphs.manager.num_captured
        return Built(num_compiled(runner.target.device), num_captured)

    def profile_step(self, requests: Seq[Request]) -> StepProfile | None:
        if self._cannot_be_profiled():
            return None
        return profile_step(self, requests, lambda: torch.cuda.Event(enable_timing=True))

    def profile_phases(self, requests: Seq[Request]) -> dict[str, float] | None:
        """See Engine. Returns None on a CPU, where every step measures its phases, and with several
        pipeline stages."""
        if self._cannot_be_profiled():
            return None
        return profile_phases(self, requests, lambda: torch.cuda.Event(enable_timing=True))

    def _cannot_be_profiled(self) -> bool:
        """Returns whether the engine runs on a CPU, or its stages work on several steps at once."""
        return self.parts.target.device.type == "cpu" or self._num_stages > 1

    @contextmanager
    def timed_by(self, clock: Clock, *, ahead: bool) -> Iterator[None]:
        """Let `clock` time the device's work during the block; no step runs ahead of results unless
        `ahead` is true."""
        runner = self.parts.runner
        before = runner.clock, self._num_ahead
        runner.clock, self._num_ahead = clock, self._num_ahead if ahead else 0
        try:
            yield
        finally:
            runner.clock, self._num_ahead = before

    def position_scores(
        self, requests: Seq[Request], completions: Mapping[int, Completion]
    ) -> Iterator[PositionScores] | None:
        if not can_be_forced(self.parts.runner.speculator):
            return None
        self.parts.runner.images.learn(requests)  # a round has some of the requests
        run = partial(self.run, concurrency=None)
        num_more = self.parts.info.num_speculative_tokens
        texts = continued(finished_texts(requests, completions), num_more, run)
        return position_scores(self.parts, texts)

    def baseline(self) -> NativeEngine:
        parts = load_baseline(self.parts)
        return NativeEngine(parts.config, parts, self._grammars)

    def plain_cache(self) -> NativeEngine | None:
        parts = load_plain(self.parts)
        return None if parts is None else NativeEngine(parts.config, parts)

    def next_token_logits(
        self,
        token_ids: Seq[int],
        spans: tuple[Span, ...] = (),
        images: tuple[Image, ...] = (),
    ) -> np.ndarray:
        request = Request(
            index=0,
            id="logits",
            sampling=SamplingParams(max_tokens=1, ignore_eos=True),
            prompt_token_ids=list(token_ids),
            spans=spans,
            images=images,
        )
        runner = self.parts.runner
        with runner.keeping_logits():
            with suppress(NotFiniteError):  # such logits are returned too
                for _ in self.run([request], concurrency=1):
                    pass
            logits = None if runner.kept_logits is None else runner.kept_logits[-1].double().cpu()
            if runner.io is not None:
                logits = runner.io.link.share(logits)
            assert logits is not None, "a prompt that does not fit samples nothing"
            return logits.numpy()
