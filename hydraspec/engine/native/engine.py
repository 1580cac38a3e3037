"""The native engine: loads target and drafter, and runs requests step by step."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from collections.abc import Sequence as Seq
from contextlib import closing, contextmanager, suppress
from dataclasses import replace

import numpy as np
import torch
from hydraspec_kernels.runtime.ahead import num_compiled

from hydraspec.config.schema import RunConfig
from hydraspec.distributed.ranks import current
from hydraspec.engine.base import Built, Engine, EngineInfo, StepProfile
from hydraspec.engine.finish import FinishCheck
from hydraspec.engine.native.admission import Admission, Pending, obeyed
from hydraspec.engine.native.collect import Collected, Collector, Flight
from hydraspec.engine.native.loading import Loaded, load, load_baseline
from hydraspec.engine.native.profiling import profile_phases, profile_step
from hydraspec.engine.native.results import LaunchedStep
from hydraspec.engine.native.sequence import Scheduled, Sequence
from hydraspec.engine.native.state import write_request
from hydraspec.engine.native.timing import Clock, StepClock
from hydraspec.engine.prompts import tokenize
from hydraspec.sampling.flags import flags_of
from hydraspec.types import (
    Completion,
    NotFiniteError,
    Request,
    SamplingParams,
    StepPlan,
    StepRecord,
)


class NativeEngine(Engine):
    """Continuous batching over a paged, hybrid KV cache; each step verifies drafts and proposes the
    next."""

    def __init__(self, config: RunConfig, loaded: Loaded | None = None) -> None:
        """Load what `config` names, or wrap parts that are loaded already (`baseline` does)."""
        self.parts = loaded or load(config)
        self._watch = current().watch
        self._scheduler = self.parts.scheduler
        decode = self.parts.tokenizer.decode if self.parts.tokenizer else None
        self._collector = Collector(
            self._scheduler,
            FinishCheck(self.parts.target.eos_token_ids, self.parts.info.max_model_len, decode),
            self.parts.info,
            self.parts.runner.speculator,
        )
        self._runs_ahead = bool(self.parts.info.async_scheduling)
        self._in_flight: Flight | None = None  # launched, not collected
        on_cpu = self.parts.target.device.type == "cpu"
        self.clock = StepClock(has_phases=on_cpu and not self._runs_ahead)
        if on_cpu and not self._runs_ahead:
            self.parts.runner.clock = self.clock

    @property
    def info(self) -> EngineInfo:  # type: ignore[override]
        """Facts as they are now: what is captured while requests run is counted."""
        info, graphs = self.parts.info, self.parts.runner.graphs
        if graphs is None:
            return info
        memory_bytes = {**info.memory_bytes, "graphs": graphs.num_bytes}
        return replace(info, memory_bytes=memory_bytes, warnings=[*info.warnings, *graphs.warnings])

    def run(
        self, requests: Seq[Request], *, concurrency: int | None
    ) -> Generator[StepRecord | Completion]:
        control = self.parts.control
        return self.decode(obeyed(Pending(requests, concurrency), requests, control))

    def decode(self, admission: Admission) -> Generator[StepRecord | Completion]:
        """As `run`, of the requests that `admission` lets join."""
        num_unfinished = 0
        with self.parts.runner.kv.lease.taken(), self._dropping(), closing(admission):
            while (joining := admission.joining(num_unfinished)) is not None:
                for request in joining:
                    self._scheduler.add(Sequence.of(request, admission.offered_at))
                collected = self.step()
                num_unfinished += len(joining) - len(collected.completions)
                if collected.record is not None:
                    yield collected.record
                yield from collected.completions
                if collected.error is not None:
                    raise collected.error

    @torch.inference_mode()
    def step(self) -> Collected:
        """Schedule and launch the next step, then collect one: the same or, where the host runs
        ahead, the one launched before it."""
        with self._watch.step():
            return self._step()

    def _step(self) -> Collected:
        clock, runner = self.clock, self.parts.runner
        if self._in_flight is None:
            clock.start()
        with clock("schedule"):
            scheduled, plan = self._schedule()
        flight = None
        if plan is not None:
            with clock("launch"), runner.clock("device"):
                launched = runner.launch(plan)
            flight = self._flight(scheduled, launched)
        if self._runs_ahead:
            flight, self._in_flight = self._in_flight, flight
        if flight is None:
            return Collected(None, self._collector.failed())
        if self.parts.check is not None:
            self.parts.check.compare(self._collector.num_steps, flight.step.result())
        collected = self._collector.collect(flight, clock)
        clock.start(flight.launch_ms)  # with a step in flight, the next one's time counts from here
        return collected

    def _schedule(self) -> tuple[list[Scheduled], StepPlan | None]:
        """The rows of the next step; requests that were admitted get their slot's state."""
        scheduled = self._scheduler.schedule()
        for sequence in self._scheduler.admitted:
            if sequence.slot >= 0:
                write_request(
                    self.parts.runner.state,
                    sequence.slot,
                    sequence.token_ids,
                    sequence.request.sampling,
                )
        return scheduled, self._scheduler.plan(scheduled) if scheduled else None

    def _flight(self, scheduled: list[Scheduled], launched: LaunchedStep) -> Flight:
        scheduler = self._scheduler
        if self._runs_ahead:
            scheduler.launched(scheduled)
        return Flight(
            scheduled,
            launched,
            num_preempted=scheduler.take_num_preempted(),
            kv_usage=scheduler.kv.usage,
            launch_ms=self.clock.launch_ms(),
        )

    @contextmanager
    def _dropping(self) -> Iterator[None]:
        """At its end, forget unfinished requests, and wait until the device has done the step in
        flight: the cache may serve another engine next (`baseline`)."""
        try:
            yield
        finally:
            flight, self._in_flight = self._in_flight, None
            self._scheduler.clear()
            if flight is not None:
                flight.step.result()

    def tokenize(self, requests: Seq[Request]) -> None:
        checkpoint = self.parts.config.target.checkpoint
        tokenize(requests, self.parts.tokenizer, self.info, checkpoint)

    def prepare(self, requests: Seq[Request]) -> None:
        """Capture graphs of the way in which these requests, together, are sampled."""
        graphs = self.parts.runner.graphs
        all_greedy, flags = flags_of(request.sampling for request in requests)
        if graphs is not None and not all_greedy:
            graphs.capture_variant(flags)

    def has_eager_steps(self) -> bool:
        graphs = self.parts.runner.graphs
        on_device = self.parts.target.device.type != "cpu"
        return on_device and (graphs is None or graphs.modes.has_eager_steps)

    def num_built(self) -> Built:
        runner = self.parts.runner
        num_captured = 0 if runner.graphs is None else runner.graphs.manager.num_captured
        return Built(num_compiled(runner.target.device), num_captured)

    def profile_step(self, requests: Seq[Request]) -> StepProfile | None:
        if self.parts.target.device.type == "cpu":
            return None
        return profile_step(self, requests, lambda: torch.cuda.Event(enable_timing=True))

    def profile_phases(self, requests: Seq[Request]) -> dict[str, float] | None:
        """None on a CPU, where phases are measured in every step."""
        if self.parts.target.device.type == "cpu":
            return None
        return profile_phases(self, requests, lambda: torch.cuda.Event(enable_timing=True))

    @contextmanager
    def timed_by(self, clock: Clock, *, ahead: bool) -> Iterator[None]:
        """While it lasts, `clock` times what the device does, and no step runs ahead of results
        unless `ahead` is true."""
        runner = self.parts.runner
        before = runner.clock, self._runs_ahead
        runner.clock, self._runs_ahead = clock, self._runs_ahead and ahead
        try:
            yield
        finally:
            runner.clock, self._runs_ahead = before

    def baseline(self) -> NativeEngine:
        parts = load_baseline(self.parts)
        return NativeEngine(parts.config, parts)

    def next_token_logits(self, token_ids: Seq[int]) -> np.ndarray:
        request = Request(
            index=0,
            id="logits",
            sampling=SamplingParams(max_tokens=1, ignore_eos=True),
            prompt_token_ids=list(token_ids),
        )
        runner = self.parts.runner
        with runner.keeping_logits():
            with suppress(NotFiniteError):  # they are an answer here
                for _ in self.run([request], concurrency=1):
                    pass
            assert runner.kept_logits is not None, "a prompt that does not fit samples nothing"
            return runner.kept_logits[-1].double().cpu().numpy()
