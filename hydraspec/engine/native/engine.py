"""The native engine: loads target and drafter, and runs requests step by step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager, suppress

import numpy as np
import torch
from hydraspec_kernels.runtime.ahead import num_compiled

from hydraspec.config.schema import RunConfig
from hydraspec.engine.base import Built, Engine, EngineInfo, StepProfile
from hydraspec.engine.finish import FinishCheck
from hydraspec.engine.native.collect import Collector, Flight
from hydraspec.engine.native.launch import LaunchedStep
from hydraspec.engine.native.loading import Loaded, load, load_baseline
from hydraspec.engine.native.profiling import profile, profile_steps
from hydraspec.engine.native.sequence import Scheduled, Sequence
from hydraspec.engine.native.state import write_request
from hydraspec.engine.native.timing import Clock, PhaseClock
from hydraspec.engine.native.variants import flags_of
from hydraspec.engine.prompts import tokenize
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
        self.info: EngineInfo = self.parts.info
        self._scheduler = self.parts.scheduler
        decode = self.parts.tokenizer.decode if self.parts.tokenizer else None
        self._collector = Collector(
            self._scheduler,
            FinishCheck(self.parts.target.eos_token_ids, self.info.max_model_len, decode),
            self.info.dtype,
        )
        self._runs_ahead = bool(self.info.async_scheduling)
        self._in_flight: Flight | None = None  # launched, not collected
        on_cpu = self.parts.target.device.type == "cpu"
        self._clock = PhaseClock(enabled=on_cpu and not self._runs_ahead)
        self._schedule = self._clock.timed("schedule", self._next_plan)
        self._start = self._start_step
        self.parts.runner.time_with(self._clock)

    @torch.inference_mode()
    def step(self) -> tuple[StepRecord | None, list[Completion]]:
        """Launch the next step and collect one: the same, or where the host runs ahead the one
        before. The record is None when there was none to collect."""
        if self._in_flight is None:
            self._clock.start()
        launched = self._launch()
        if self._runs_ahead:
            launched, self._in_flight = self._in_flight, launched
        if launched is None:
            return None, self._collector.failed()
        collected = self._collector.collect(launched, self._clock)
        self._clock.start()  # with a step in flight, the next one's time counts from here
        return collected

    def _launch(self) -> Flight | None:
        """Give the device its next step; None when nobody can run."""
        begin = time.perf_counter()
        scheduled, plan = self._schedule()
        if plan is None:
            return None
        scheduler = self._scheduler
        flight = Flight(
            scheduled,
            self._start(plan),
            num_preempted=scheduler.take_num_preempted(),
            kv_usage=scheduler.kv.usage,
            launch_s=0.0,
        )
        if self._runs_ahead:
            scheduler.launched(scheduled)
        flight.launch_s = time.perf_counter() - begin
        self._clock.launched(flight.launch_s)
        return flight

    def _start_step(self, plan: StepPlan) -> LaunchedStep:
        return self.parts.runner.launch(plan)

    def _next_plan(self) -> tuple[list[Scheduled], StepPlan | None]:
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

    def run(
        self, requests: Seq[Request], *, concurrency: int | None
    ) -> Generator[StepRecord | Completion]:
        with self.parts.runner.kv.lease.taken():
            try:
                yield from self._run(deque(requests), concurrency or len(requests))
            finally:
                self._drop_everything()

    def _run(self, pending: deque[Request], concurrency: int) -> Generator[StepRecord | Completion]:
        num_offered = 0
        while pending or num_offered:
            while pending and num_offered < concurrency:
                self._scheduler.add(_new_sequence(pending.popleft()))
                num_offered += 1
            record, completions = self.step()
            num_offered -= len(completions)
            if record is not None:
                yield record
            yield from completions
            self._collector.check()

    def _drop_everything(self) -> None:
        """Forget every request, and wait until the device has too: the cache may have another
        engine next (`baseline`)."""
        flight, self._in_flight = self._in_flight, None
        self._scheduler.clear()
        if flight is not None:
            flight.step.result()

    def tokenize(self, requests: Seq[Request]) -> None:
        checkpoint = self.parts.config.target.checkpoint
        tokenize(requests, self.parts.tokenizer, self.info, checkpoint)

    def prepare(self, requests: Seq[Request]) -> None:
        """Graphs of the way in which these requests are sampled, together."""
        all_greedy, flags = flags_of(request.sampling for request in requests)
        if not all_greedy:
            self.parts.runner.capture_variant(flags)

    def has_eager_steps(self) -> bool:
        on_device = self.parts.target.device.type != "cpu"
        return on_device and self.info.cudagraph["target"] in ("none", "full_decode_only")

    def num_built(self) -> Built:
        runner = self.parts.runner
        return Built(num_compiled(runner.target.device), runner.num_captured())

    def profile_step(self, requests: Seq[Request]) -> StepProfile | None:
        if self.parts.target.device.type == "cpu":
            return None
        return profile_steps(self, requests, lambda: torch.cuda.Event(enable_timing=True))

    def profile_phases(self, requests: Seq[Request]) -> dict[str, float] | None:
        """None on a CPU, where phases are measured in every step."""
        if self.parts.target.device.type == "cpu":
            return None
        return profile(self, requests, lambda: torch.cuda.Event(enable_timing=True))

    @contextmanager
    def scheduling_timed_by(self, clock: Clock) -> Iterator[None]:
        """For a while: no step ahead of results, and `clock` takes the time of scheduling."""
        before = self._schedule, self._runs_ahead
        self._schedule, self._runs_ahead = clock.timed("schedule", self._next_plan), False
        try:
            yield
        finally:
            self._schedule, self._runs_ahead = before

    @contextmanager
    def launches_timed_by(self, clock: Clock, device: Clock) -> Iterator[None]:
        """For a while: `clock` takes the host's time of scheduling and launching, and `device` the
        device's of a launched step."""
        before = self._schedule, self._start
        self._schedule = clock.timed("schedule", self._next_plan)
        self._start = clock.timed("launch", device.timed("device", self._start_step))
        try:
            yield
        finally:
            self._schedule, self._start = before

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
        # Logits that are not finite are an answer here.
        with self.parts.runner.keep_logits() as kept, suppress(NotFiniteError):
            for _ in self.run([request], concurrency=1):
                pass
        assert kept, "a prompt that does not fit samples nothing"
        return kept[0][-1].double().cpu().numpy()


def _new_sequence(request: Request) -> Sequence:
    assert request.prompt_token_ids is not None, "call tokenize() first"
    tokens = list(request.prompt_token_ids)
    return Sequence(request=request, token_ids=tokens, num_prompt=len(tokens))
