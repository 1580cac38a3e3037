"""Runs a workload through one engine or two: a warm-up, then A B A B, so that both see the same
machine.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from hydraspec.engine.base import Built, Engine, StepProfile
from hydraspec.metrics.meter import Meter
from hydraspec.metrics.sinks import Side, Sink
from hydraspec.types import Completion, Request, StepRecord

NUM_ROUNDS = 2
WARM_UP_REQUESTS = 8
WARM_UP_TOKENS = 8
MOST_WHOLE_RUNS = 3  # of a warm-up, where kernels are compiled when they are first met
WHOLE_ROUNDS = 4  # times the requests that are offered at once: so many run whole
PROFILED_REQUESTS = 32  # at most, and no more than are offered at once


@dataclass(slots=True)
class Observed:
    """What a side shows beside its steps and completions."""

    built: Built = field(default_factory=Built)  # within the measured rounds: there should be none
    step: StepProfile | None = None
    phases: dict[str, float] | None = None  # milliseconds a step, where steps have none


class Measurement:
    """Both sides of a run: engines, meters, and the sinks that watch."""

    def __init__(
        self,
        engines: Mapping[Side, Engine],
        requests: Sequence[Request],
        sinks: Sequence[Sink],
        *,
        concurrency: int | None,
    ) -> None:
        self.engines = engines
        self.requests = requests
        self.sinks = sinks
        self.concurrency = concurrency
        self.meters = {
            side: Meter(requests, num_speculative_tokens=engine.info.num_speculative_tokens)
            for side, engine in engines.items()
        }

        self.observed = {side: Observed() for side in engines}

    def completions(self, side: Side) -> dict[int, Completion]:
        """Completions of a side by request index, errors included."""
        meter = self.meters.get(side)
        ended = meter.completed if meter else []
        return {c.index: c.completion for c in ended if c.completion is not None}

    def warm_up(self) -> None:
        """Have every engine build what the workload needs, then run a few tokens of a few requests;
        where steps run without graphs, or kernels are still compiled, some requests whole. Nothing
        is counted."""
        count = min(self.concurrency or WARM_UP_REQUESTS, WARM_UP_REQUESTS)
        few = [
            replace(r, sampling=replace(r.sampling, max_tokens=WARM_UP_TOKENS, ignore_eos=True))
            for r in self.requests[:count]
        ]
        whole = self.requests[: WHOLE_ROUNDS * count]
        for engine in self.engines.values():
            engine.prepare(self.requests)
            for requests in (few, *[whole] * MOST_WHOLE_RUNS):
                built_before = engine.num_built()
                with closing_run(engine, requests, self.concurrency) as events:
                    for _ in events:
                        pass
                is_worth_more = requests is few and engine.has_eager_steps()
                if engine.num_built() == built_before and not is_worth_more:
                    break

    def run(self) -> None:
        """Decode the workload in NUM_ROUNDS parts, each with every side in turn."""
        with _without_collection_of_what_is_loaded():
            for number, part in enumerate(_parts(self.requests), start=1):
                for side in self.engines:
                    for sink in self.sinks:
                        sink.on_round(side, number, NUM_ROUNDS)
                    self._run_part(side, part)

    def profile(self) -> None:
        """Where steps spend their time, and phase times where steps have none: a few steps of the
        first requests, once all ran."""
        few = self.requests[: min(self.concurrency or PROFILED_REQUESTS, PROFILED_REQUESTS)]
        for side, engine in self.engines.items():
            self.observed[side].step = engine.profile_step(few)
            self.observed[side].phases = engine.profile_phases(few)

    def _run_part(self, side: Side, part: Sequence[Request]) -> None:
        meter, engine = self.meters[side], self.engines[side]
        built_before = engine.num_built()
        with closing_run(engine, part, self.concurrency) as events:
            for event in events:
                if isinstance(event, StepRecord):
                    record = replace(event, step=meter.num_steps)  # steps count on through rounds
                    meter.add_step(record)
                    for sink in self.sinks:
                        sink.on_step(side, record, meter)
                else:
                    meter.add_completion(event)
                    for sink in self.sinks:
                        sink.on_completion(side, event, meter)
        self.observed[side].built += engine.num_built() - built_before


@contextlib.contextmanager
def closing_run(
    engine: Engine, requests: Sequence[Request], concurrency: int | None
) -> Iterator[Iterator[StepRecord | Completion]]:
    """An engine's run that is closed in any case, so that an interrupt leaves the engine usable."""
    events = engine.run(requests, concurrency=concurrency)
    try:
        yield events
    finally:
        if isinstance(events, Generator):
            events.close()


def _parts(requests: Sequence[Request]) -> Iterator[Sequence[Request]]:
    """The workload in NUM_ROUNDS contiguous parts, empty ones left out."""
    bounds = [len(requests) * i // NUM_ROUNDS for i in range(NUM_ROUNDS + 1)]
    for first, last in pairwise(bounds):
        if last > first:
            yield requests[first:last]


@contextlib.contextmanager
def _without_collection_of_what_is_loaded() -> Iterator[None]:
    """Keep full garbage collections from walking the loaded model in the middle of a step."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
