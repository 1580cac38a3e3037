"""Step costs and acceptance of loaded engines, from short runs over a workload's own requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean, median

from hydraspec.analysis.predict.model import Acceptance, measured_acceptance
from hydraspec.engine.base import Engine
from hydraspec.engine.costs import CostTable
from hydraspec.errors import ConfigurationError
from hydraspec.lab.rounds import Measurement, closing_run
from hydraspec.metrics.meter import Meter
from hydraspec.metrics.sinks import Side
from hydraspec.types import Completion, Request, StepRecord

STEPS = 12  # timed decode steps of a round
UNSETTLED = 2  # steps before them, which are not timed
BESIDE_PROMPTS = 32  # steps in which the first requests decode while others are read, at most
OUTLIERS = 0.05  # share of the timed steps left out at either end
MIN_PROMPT_ROWS = 8  # fewer say nothing about the time of a row


@dataclass(slots=True, frozen=True)
class Texts:
    """What the engine answered to a workload's requests, and how often drafts were accepted."""

    requests: Sequence[Request]  # tokenised, in an order in which categories are mixed
    completions: Mapping[int, Completion]  # by index of the request
    acceptance: Acceptance | None  # of the same requests; None without drafts

    def halfway(self, request: Request, num_tokens: int, max_model_len: int) -> Request:
        """The request in the middle of its answer, which goes on for `num_tokens` whatever comes:
        steps then have the lengths that they have on average in a run."""
        done = self.completions[request.index]
        ids = [*done.prompt_token_ids, *done.output_token_ids[: len(done.output_token_ids) // 2]]
        ids = ids[: max(1, max_model_len - num_tokens)]
        sampling = replace(
            request.sampling, max_tokens=num_tokens, ignore_eos=True, stop=(), stop_token_ids=()
        )
        return replace(request, prompt_token_ids=ids, sampling=sampling, prompt=None, messages=None)


def warm_up(engine: Engine, requests: Sequence[Request], concurrency: int) -> None:
    """Have the engine compile and capture what the requests need, as before a run."""
    Measurement({Side.method: engine}, requests, [], concurrency=concurrency).warm_up()


def read_texts(engine: Engine, requests: Sequence[Request], *, concurrency: int) -> Texts:
    """Answer tokenised requests once and count acceptance; those that end with an error are left
    out."""
    num_drafts = engine.info.num_speculative_tokens
    meter = Meter(requests, num_speculative_tokens=num_drafts)
    completions = {}
    with closing_run(engine, requests, concurrency) as events:
        for event in events:
            if isinstance(event, StepRecord):
                meter.add_step(event)
            else:
                meter.add_completion(event)
                if event.finish_reason != "error":
                    completions[event.index] = event
    kept = [request for request in requests if request.index in completions]
    counters = [meter.counters[request.index] for request in kept]
    acceptance = measured_acceptance(counters, num_drafts) if num_drafts else None
    return Texts(kept, completions, acceptance)


@dataclass(slots=True)
class Costs:
    """The timed steps of one engine.

    Attributes:
        step_ms: by batch, of steps in which every request decodes with all its drafts.
        draft_ms: of each of these, drafting; empty where phases are not timed.
        prompt_ms: (rows, milliseconds) of steps that only read prompts.
    """

    engine: Engine
    step_ms: dict[int, list[float]] = field(default_factory=dict)
    draft_ms: dict[int, list[float]] = field(default_factory=dict)
    prompt_ms: list[tuple[int, float]] = field(default_factory=list)

    @property
    def num_drafts(self) -> int:
        """K of the engine."""
        return self.engine.info.num_speculative_tokens

    def measure(self, texts: Texts, batch: int) -> None:
        """A round: STEPS decode steps of `batch` requests in the middle of their answers, taken in
        turn where there are fewer.

        Raises:
            ConfigurationError: so many do not fit into the KV cache.
        """
        num_pure = 0
        with closing_run(self.engine, self._requests(texts, batch), batch) as events:
            for event in events:
                if not isinstance(event, StepRecord):
                    continue
                rows = sum(part.num_rows for part in event.requests)
                if all(part.is_prefill for part in event.requests):
                    self.prompt_ms.append((rows, event.total_ms))
                is_pure = rows == batch * (1 + self.num_drafts) and not any(
                    part.is_prefill for part in event.requests
                )
                num_pure += is_pure
                if is_pure and num_pure > UNSETTLED:
                    self._add(batch, event)
                if num_pure == STEPS + UNSETTLED:
                    return
        if batch not in self.step_ms:
            raise ConfigurationError(
                f"--concurrency {batch}: no step had so many requests at once\n"
                "  allowed: as many as the KV cache holds\n"
                "  to do: raise engine.kv_cache.memory_gib, or ask for fewer"
            )

    def _requests(self, texts: Texts, batch: int) -> list[Request]:
        num_steps = STEPS + UNSETTLED + BESIDE_PROMPTS
        num_tokens = num_steps * (1 + self.num_drafts) + 1
        most = self.engine.info.max_model_len
        taken = [texts.requests[i % len(texts.requests)] for i in range(batch)]
        halfway = [texts.halfway(request, num_tokens, most) for request in taken]
        return [replace(request, index=i, id=str(i)) for i, request in enumerate(halfway)]

    def _add(self, batch: int, step: StepRecord) -> None:
        self.step_ms.setdefault(batch, []).append(step.total_ms)
        if (drafting := step.phase_ms.get("propose")) is not None:
            self.draft_ms.setdefault(batch, []).append(drafting)

    def split(self, texts: Texts) -> None:
        """Where steps have no times of phases: take drafting's share from a profile of the same
        steps without graphs, whose phases are those of the device."""
        for batch in () if self.draft_ms or not self.num_drafts else self.step_ms:
            phases = self.engine.profile_phases(self._requests(texts, batch))
            if phases is None:
                return
            on_device = sum(phases.values()) - phases["schedule"]
            share = phases["propose"] / on_device if on_device else 0.0
            self.draft_ms[batch] = [share * each for each in self.step_ms[batch]]

    def table(self) -> CostTable:
        """Of the batches measured, `typical` times."""
        batches = tuple(sorted(self.step_ms))
        draft_ms = None
        if self.num_drafts and all(self.draft_ms.get(batch) for batch in batches):
            draft_ms = tuple((typical(self.draft_ms[batch]),) for batch in batches)
        return CostTable(
            batches=batches,
            drafts=(self.num_drafts,),
            step_ms=tuple((typical(self.step_ms[batch]),) for batch in batches),
            draft_ms=draft_ms,
        )

    def ms_per_prompt_row(self) -> float:
        """What a prompt's token adds to a step: the time of steps that only read prompts, less
        that of the smallest decode step, by rows."""
        least = typical(self.step_ms[min(self.step_ms)])
        rows = [
            max(0.0, milliseconds - least) / count
            for count, milliseconds in self.prompt_ms
            if count >= MIN_PROMPT_ROWS
        ]
        return median(rows) if rows else 0.0


def typical(times: Sequence[float]) -> float:
    """The mean without the OUTLIERS largest and smallest. On a shared machine a step is whole or
    interrupted: a mean has both in proportion, as a run has, and a median one of the two."""
    ordered = sorted(times)
    count = int(OUTLIERS * len(ordered))
    return mean(ordered[count : len(ordered) - count])


def interleaved(costs: Sequence[Costs], texts: Texts, batches: Sequence[int], rounds: int) -> None:
    """Rounds over every batch, the engines in turn in each, so that all see the same machine."""
    for _ in range(rounds):
        for batch in batches:
            for each in costs:
                each.measure(texts, batch)


def run_loads(
    engines: tuple[Engine, Engine],
    requests: Sequence[Request],
    parts: Sequence[tuple[int, int]],
    *,
    concurrency: int,
) -> tuple[Meter, Meter]:
    """Decode the parts of a load one after another, each with both engines in turn."""
    first, second = (
        Meter(requests, num_speculative_tokens=e.info.num_speculative_tokens) for e in engines
    )
    for begin, end in parts:
        for engine, meter in zip(engines, (first, second), strict=True):
            with closing_run(engine, requests[begin:end], concurrency) as events:
                for event in events:
                    if isinstance(event, StepRecord):
                        meter.add_step(event)
                    else:
                        meter.add_completion(event)
    return first, second
