"""Measured rounds of a workload on one engine or two: a warm-up, then method and baseline in turn,
two to eight times (A B A B), so that changes of the machine affect method and baseline alike.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from hydraspec.engine.base import Built, Engine, StepProfile, closing_run
from hydraspec.metrics.meter import Meter
from hydraspec.metrics.sinks import Side, Sink
from hydraspec.metrics.summary import TeacherForced
from hydraspec.types import Completion, Request, StepRecord
from hydraspec.workloads.arrivals import ArrivalProcess

LEAST_ROUNDS, MOST_ROUNDS = 2, 8
TURNOVERS = 2  # of the requests that run at once, in each of more than LEAST_ROUNDS
WARM_UP_REQUESTS = 8
WARM_UP_TOKENS = 8
MAX_FULL_WARM_UPS = 3  # repeats, while kernels are still compiled
FULL_WARM_UP_BATCHES = 4  # batches of at most WARM_UP_REQUESTS, in a warm-up of whole outputs
AT_ONCE = ArrivalProcess(rate=None, burstiness=1.0, seed=0)
PROFILED_REQUESTS = 32  # at most, and no more than run at once


@dataclass(slots=True, kw_only=True)
class Measured:
    """Results of one side of a run: its engine's outputs, their counts, and its profile."""

    engine: Engine
    meter: Meter
    completions: dict[int, Completion] = field(default_factory=dict)  # by request index
    built: Built = field(default_factory=Built)  # within the measured rounds: there should be none
    step_profile: StepProfile | None = None
    phase_ms: dict[str, float] | None = None  # per step, from a profile where steps have none
    teacher_forced: TeacherForced | None = None  # where the run records it


class Measurement:
    """Both sides of a run, and the sinks that watch them.

    Attributes:
        sides: results of each side.
        method: results of the engine under study.
        baseline: results of the same target without a drafter; None if it does not run.
    """

    def __init__(
        self,
        engines: Mapping[Side, Engine],
        requests: Sequence[Request],
        sinks: Sequence[Sink],
        *,
        concurrency: int | None,
        arrivals: ArrivalProcess = AT_ONCE,
    ) -> None:
        assert not any(request.num_filled for request in requests), (
            "their outputs are not the target's"
        )
        self.requests = requests
        self._arrivals = arrivals
        self._sinks = sinks
        self._concurrency = concurrency
        self.sides = {
            side: Measured(
                engine=engine,
                meter=Meter(
                    requests,
                    num_speculative_tokens=engine.info.num_speculative_tokens,
                    prefix_caching=engine.info.prefix_caching,
                ),
            )
            for side, engine in engines.items()
        }
        self.method = self.sides[Side.method]
        self.baseline = self.sides.get(Side.baseline)

    def warm_up(self) -> None:
        """Have every engine build what the workload needs, then run a few tokens of a few requests,
        and, if steps run without graphs or kernels are still compiled, some whole requests. Nothing
        is counted."""
        count = min(self._concurrency or WARM_UP_REQUESTS, WARM_UP_REQUESTS)
        in_turn = sorted(self.requests, key=lambda r: r.turn)  # what runs together at first
        few = [
            replace(r, sampling=replace(r.sampling, max_tokens=WARM_UP_TOKENS, ignore_eos=True))
            for r in in_turn[:count]
        ]
        whole = in_turn[: FULL_WARM_UP_BATCHES * count]
        for engine in (side.engine for side in self.sides.values()):
            engine.prepare(self.requests, concurrency=self._concurrency)
            for requests in (few, *[whole] * MAX_FULL_WARM_UPS):
                built_before = engine.num_built()
                with closing_run(engine, requests, self._concurrency) as events:
                    for _ in events:
                        pass
                needs_whole = requests is few and engine.has_eager_steps()
                if engine.num_built() == built_before and not needs_whole:
                    break

    def run(self) -> None:
        """Decode the workload in rounds, each with a part of the requests and every side in turn; a
        part that an interrupt cuts short is timed too."""
        num_rounds = _num_rounds(len(self.requests), self._concurrency)
        with _model_kept_from_garbage_collection():
            for number, share in enumerate(_parts(self.requests, num_rounds), start=1):
                part = self._arrivals.offered(share, number)
                for side, measured in self.sides.items():
                    for sink in self._sinks:
                        sink.on_round(side, number, num_rounds)
                    steps = measured.meter.steps
                    built_before = measured.engine.num_built()
                    measured.meter.begin_run()
                    began_s = time.perf_counter() - steps.rounds_s
                    try:
                        with closing_run(measured.engine, part, self._concurrency) as events:
                            for event in events:
                                steps.rounds_s = time.perf_counter() - began_s
                                self.record(side, event)
                    finally:
                        steps.rounds_s = time.perf_counter() - began_s
                    measured.built += measured.engine.num_built() - built_before

    def profile(self) -> None:
        """Profile a few decode steps of the first requests: the breakdown of a step's time, and
        times of phases for engines that do not measure them in a run."""
        firsts = [request for request in self.requests if request.after is None]
        few = firsts[: min(self._concurrency or PROFILED_REQUESTS, PROFILED_REQUESTS)]
        for measured in self.sides.values():
            measured.step_profile = measured.engine.profile_step(few)
            measured.phase_ms = measured.engine.profile_phases(few)

    def record(self, side: Side, event: StepRecord | Completion) -> None:
        """Count a step or a completion of the round that has begun."""
        measured, meter = self.sides[side], self.sides[side].meter
        if isinstance(event, StepRecord):
            record = replace(event, step=meter.steps.num_steps)  # steps count on through rounds
            meter.add_step(record)
            for sink in self._sinks:
                sink.on_step(side, record, meter)
        else:
            measured.completions[event.index] = event
            meter.add_completion(event)
            for sink in self._sinks:
                sink.on_completion(side, event, meter)


def _num_rounds(num_requests: int, concurrency: int | None) -> int:
    """The number of rounds. With more of them less of the machine's drift falls on one side, but
    each ends with steps of few requests."""
    turnovers = num_requests // (concurrency or num_requests)
    return min(max(LEAST_ROUNDS, turnovers // TURNOVERS), MOST_ROUNDS)


def _parts(requests: Sequence[Request], num_rounds: int) -> Iterator[Sequence[Request]]:
    """The workload in `num_rounds` contiguous parts, empty ones left out. Conversations stay
    whole: a part ends before a first turn."""
    starts = [i for i, r in enumerate(requests) if r.after is None] + [len(requests)]
    wanted = [len(requests) * i // num_rounds for i in range(num_rounds + 1)]
    bounds = [min(starts, key=lambda start: abs(start - place)) for place in wanted]
    for first, last in pairwise(bounds):
        if last > first:
            yield requests[first:last]


@contextlib.contextmanager
def _model_kept_from_garbage_collection() -> Iterator[None]:
    """Keep full garbage collections from walking the loaded model in the middle of a step."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
