"""Step costs and acceptance of loaded engines, from short runs over a workload's own requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean, median

from hydraspec.analysis.predict.model import Acceptance, measured_acceptance
from hydraspec.engine.base import Engine, closing_run
from hydraspec.engine.costs import CostTable, StepTimes, filled_to, full_size, over_contexts
from hydraspec.errors import ConfigurationError
from hydraspec.lab.rounds import Measurement
from hydraspec.metrics.meter import Meter
from hydraspec.metrics.sinks import Side
from hydraspec.types import Completion, Request, StepRecord

STEPS = 12  # timed decode steps of a round
UNSETTLED = 2  # steps before them, which are not timed
BESIDE_PROMPTS = 32  # steps in which the first requests decode while others are read, at most
# Share of the timed steps left out at either end. On a shared machine a step is whole or
# interrupted: a mean has both in proportion, as a run has, and a median one of the two.
OUTLIERS = 0.05
MIN_PROMPT_ROWS = 8  # fewer say nothing about the time of a row


@dataclass(slots=True, frozen=True)
class Answers:
    """An engine's answers to a workload's requests, and how often drafts were accepted."""

    requests: Sequence[Request]  # tokenised, in an order in which categories are mixed
    completions: Mapping[int, Completion]  # by index of the request
    acceptance: Acceptance | None  # of the same requests; None without drafts

    @property
    def mean_context(self) -> int:
        """Mean tokens of a request in the middle of its answer."""
        return round(mean(len(self._halfway_ids(request)) for request in self.requests))

    def _halfway_ids(self, request: Request) -> list[int]:
        done = self.completions[request.index]
        return [*done.prompt_token_ids, *done.output_token_ids[: len(done.output_token_ids) // 2]]

    def halfway(self, request: Request, num_tokens: int, max_model_len: int) -> Request:
        """The request resumed halfway through its answer, to decode `num_tokens` without stops: its
        steps then have the context that steps have on average in a run."""
        ids = self._halfway_ids(request)
        ids = ids[: max(1, max_model_len - num_tokens)]
        sampling = replace(
            request.sampling, max_tokens=num_tokens, ignore_eos=True, stop=(), stop_token_ids=()
        )
        return replace(request, prompt_token_ids=ids, sampling=sampling, prompt=None, messages=None)


def warm_up(engine: Engine, requests: Sequence[Request], concurrency: int) -> None:
    """Have the engine compile and capture what the requests need, as before a run."""
    Measurement({Side.method: engine}, requests, [], concurrency=concurrency).warm_up()


def read_answers(engine: Engine, requests: Sequence[Request], *, concurrency: int) -> Answers:
    """Answer tokenised requests once and count acceptance; those that end with an error are left
    out."""
    num_drafts = engine.info.num_speculative_tokens
    meter = Meter(requests, num_speculative_tokens=num_drafts)
    completions = {}
    for ended in _decode(engine, requests, meter, concurrency):
        if ended.finish_reason != "error":
            completions[ended.index] = ended
    kept = [request for request in requests if request.index in completions]
    counters = [meter.counters[request.index] for request in kept]
    acceptance = measured_acceptance(counters, num_drafts) if num_drafts else None
    return Answers(kept, completions, acceptance)


def run_loads(
    engines: Sequence[Engine],
    requests: Sequence[Request],
    parts: Sequence[tuple[int, int]],
    *,
    concurrency: int,
) -> list[Meter]:
    """Decode the parts of a load one after another, each with all engines in turn. Returns the
    meter of each engine."""
    meters = [
        Meter(requests, num_speculative_tokens=engine.info.num_speculative_tokens)
        for engine in engines
    ]
    for begin, end in parts:
        for engine, meter in zip(engines, meters, strict=True):
            _decode(engine, requests[begin:end], meter, concurrency)
    return meters


def _decode(
    engine: Engine, requests: Sequence[Request], meter: Meter, concurrency: int
) -> list[Completion]:
    completions = []
    meter.begin_run()
    with closing_run(engine, requests, concurrency) as events:
        for event in events:
            if isinstance(event, StepRecord):
                meter.add_step(event)
            else:
                meter.add_completion(event)
                completions.append(event)
    return completions


Filled = dict[int, StepTimes]  # by context


def new_times() -> StepTimes:
    """No timed steps yet, of which outliers will be left out."""
    return StepTimes(OUTLIERS, OUTLIERS)


def joined(
    own: StepTimes, filled: Filled, context: int, batches: Sequence[int], drafts: Sequence[int]
) -> CostTable:
    """The table of the requests' own steps, whose mean context this is, and of filled requests at
    other contexts, there without batches that do not fit; without these the first alone."""
    table = own.table(batches, drafts)
    tables = {
        each: times.table(known, drafts)
        for each, times in filled.items()
        if (known := [b for b in batches if all(times.step_ms.get((b, k)) for k in drafts)])
    }
    return over_contexts(tables | {context: table}) if tables else table


@dataclass(slots=True)
class Costs:
    """The timed steps of one engine.

    Attributes:
        times: decode steps of the engine, and of the same drafter with other K.
        filled: the same at each context, in a cache that is filled and not read.
        prompt_ms: (rows, milliseconds) of steps that only read prompts.
    """

    engine: Engine
    times: StepTimes = field(default_factory=new_times)
    filled: Filled = field(default_factory=dict)
    prompt_ms: list[tuple[int, float]] = field(default_factory=list)

    @property
    def num_drafts(self) -> int:
        """K of the engine: drafts of a step."""
        return self.engine.info.num_speculative_tokens

    def measure(self, answers: Answers, batch: int) -> None:
        """Time a round: STEPS decode steps of `batch` requests in the middle of their answers,
        reused in turn if there are fewer.

        Raises:
            ConfigurationError: so many requests do not fit into the KV cache.
        """
        self._time(self._requests(answers, batch), batch, self.times, self.prompt_ms)
        if not self.times.step_ms[batch, self.num_drafts]:
            raise ConfigurationError(
                f"--concurrency {batch}: no step had so many requests at once\n"
                "  allowed: as many as the KV cache holds\n"
                "  to do: raise engine.kv_cache.memory_gib, or ask for fewer"
            )

    def measure_at(self, context: int, answers: Answers, batch: int) -> None:
        """Time a round of `batch` requests with `context` tokens each, whose KV is filled."""
        times = self.filled.setdefault(context, new_times())
        requests = [filled_to(request, context) for request in self._requests(answers, batch)]
        self._time(requests, batch, times, [])

    def fits(self, context: int, batch: int) -> bool:
        """Returns whether so many requests of `context` tokens may run at once for a round."""
        most = self.engine.most_at_once(context + self.num_tokens)
        return most is None or batch <= most

    def _time(
        self,
        requests: Sequence[Request],
        batch: int,
        times: StepTimes,
        prompt_ms: list[tuple[int, float]],
    ) -> None:
        num_seen = 0
        with closing_run(self.engine, requests, batch) as events:
            for event in events:
                if not isinstance(event, StepRecord):
                    continue
                if all(part.is_prefill for part in event.requests):
                    rows = sum(part.num_rows for part in event.requests)
                    prompt_ms.append((rows, event.total_ms))
                if full_size(event) != (batch, self.num_drafts):
                    continue
                num_seen += 1
                if num_seen > UNSETTLED:
                    times.add(event)
                if num_seen == STEPS + UNSETTLED:
                    return

    @property
    def num_tokens(self) -> int:
        """Output tokens of a request of a round."""
        num_steps = STEPS + UNSETTLED + BESIDE_PROMPTS
        return num_steps * (1 + self.num_drafts) + 1

    def _requests(self, answers: Answers, batch: int) -> list[Request]:
        most = self.engine.info.max_model_len
        taken = [answers.requests[i % len(answers.requests)] for i in range(batch)]
        halfway = [answers.halfway(request, self.num_tokens, most) for request in taken]
        return [replace(request, index=i, id=str(i)) for i, request in enumerate(halfway)]

    def split(self, answers: Answers, batches: Sequence[int]) -> None:
        """Estimate the drafting time of steps without times of phases: step time x drafting's share
        in a profile of such steps without graphs, which times phases on the device."""
        for batch in batches:
            size = batch, self.num_drafts
            if self.times.draft_ms[size]:
                return
            phases = self.engine.profile_phases(self._requests(answers, batch))
            if phases is None:
                return
            on_device = sum(phases.values()) - phases["schedule"]
            share = phases["propose"] / on_device if on_device else 0.0
            self.times.draft_ms[size] = [share * each for each in self.times.step_ms[size]]

    def table(self, batches: Sequence[int], context: int) -> CostTable:
        """Typical times of the engine's steps, by batch size: of its own requests, whose mean
        context this is, and of filled ones by context."""
        return joined(self.times, self.filled, context, batches, [self.num_drafts])

    def ms_per_prompt_row(self, batches: Sequence[int]) -> float:
        """Milliseconds that a prompt's token adds to a step: (time of a prompt-only step
        - time of the smallest decode step) / rows, the median; 0 where none was timed."""
        least = self.times.typical(self.times.step_ms[min(batches), self.num_drafts])
        rows = [
            max(0.0, milliseconds - least) / count
            for count, milliseconds in self.prompt_ms
            if count >= MIN_PROMPT_ROWS
        ]
        return median(rows) if rows else 0.0


def interleaved(
    costs: Sequence[Costs],
    answers: Answers,
    batches: Sequence[int],
    rounds: int,
    contexts: Sequence[int] = (),
) -> None:
    """Time rounds over every batch size, and again at each of `contexts` where the KV of a batch
    fits, the engines in turn, so that all see the same machine."""
    for _ in range(rounds):
        for batch in batches:
            for each in costs:
                each.measure(answers, batch)
            for context in contexts:
                if all(each.fits(context, batch) for each in costs):
                    for each in costs:
                        each.measure_at(context, answers, batch)
